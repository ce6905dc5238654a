"""Carries whole blocks of KV within the device's cache and between it and the host's.

Blocks are copied one by one, in their order. That is also the fast way on a CPU: a block is a
few hundred long runs, which one strided copy moves at memory speed, while an indexed copy of
many blocks (gather, then scatter) moves every byte twice and took three to ten times as long.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.interface.block_move import BlockMove, MoveKind


class BlockMover:
    """Owns the host's cache, which has the layout of the device's with its own block count.

    The device's is [layers, 2 x kv_heads, num_blocks x block_size, head_dim].
    """

    def __init__(self, device_caches: Tensor, block_size: int, num_host_blocks: int) -> None:
        layers, heads, _, head_dim = device_caches.shape
        # Empty, not zeros: memory that no block was offloaded to is never touched.
        host_caches = torch.empty(
            (layers, heads, num_host_blocks * block_size, head_dim),
            dtype=device_caches.dtype,
            pin_memory=device_caches.is_cuda and num_host_blocks > 0,
        )
        self._device = _by_block(device_caches, block_size)
        self._host = _by_block(host_caches, block_size)

    def carry_out(self, moves: Sequence[BlockMove]) -> float:
        """Do the moves, each on what the ones before left behind; returns the seconds it took."""
        began = time.perf_counter()
        for kind, source, destination in moves:
            origin = self._host if kind is MoveKind.LOAD else self._device
            target = self._host if kind is MoveKind.OFFLOAD else self._device
            target[:, destination].copy_(origin[:, source])
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.device)
        return time.perf_counter() - began


def _by_block(caches: Tensor, block_size: int) -> Tensor:
    """The same memory as [layers x 2 x kv_heads, num_blocks, block_size x head_dim]."""
    layers, heads, num_slots, head_dim = caches.shape
    return caches.view(layers * heads, num_slots // block_size, block_size * head_dim)
