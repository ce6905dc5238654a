"""A follower: a rank without a scheduler. `python -m engine.execution.ranks.follower FD`

    driver   ── join ──▶ ◀── HERE ── (all meet) ◀── READY ── ── step ─▶ ── step ─▶ ...   follower

It loads its share, then computes each step that it is told, meeting the other ranks only inside
the layers' sums. Whatever goes wrong is said on the channel before it ends; when the driver is
gone, however it died, so is the follower, even in the middle of a sum.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

from engine import garbage
from engine.execution.rank_model import RankModel
from engine.execution.ranks.channel import Channel
from engine.execution.ranks.gloo_group import GlooGroup
from engine.execution.ranks.join import HERE, READY, Join
from engine.execution.ranks.rank_step import decode
from engine.layers.shard import Shard
from engine.models.loader import load_decoder


def main(arguments: list[str]) -> None:
    """Follow the driver at the other end of the socket FD."""
    # The driver decides when to end, and drains first.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    threading.Thread(target=_end_with_driver, args=(channel,), daemon=True).start()
    try:
        _follow(channel)
    except Exception as error:
        channel.send(f"{type(error).__name__}: {error}".encode())
        raise


def _end_with_driver(channel: Channel) -> None:
    channel.wait_for_end()
    os._exit(0)


def _follow(channel: Channel) -> None:
    frame = channel.receive()
    if frame is None:
        return
    join = msgspec.json.decode(frame, type=Join)
    torch.set_num_threads(join.num_threads)
    channel.send(HERE)
    group = GlooGroup(Path(join.meeting_place), join.rank, join.size)
    decoder = load_decoder(Path(join.folder), join.dtype, Shard(join.rank, join.size, group))
    model = RankModel(decoder, join.num_blocks, join.block_size, join.num_host_blocks)
    garbage.settle()
    channel.send(READY)
    with torch.inference_mode():
        while (frame := channel.receive()) is not None:
            model.compute(decode(frame))


if __name__ == "__main__":
    main(sys.argv[1:])
