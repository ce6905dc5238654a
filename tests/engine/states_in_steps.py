"""Runs a decoder by hand, on sequences whose tokens are cut into steps in any way."""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.layers.step_layout import step_layout
from engine.models.decoder import Decoder

BLOCK_SIZE, NUM_BLOCKS = 4, 90


def logits_in_steps(
    decoder: Decoder, prompts: list[list[int]], next_count: Callable[[], int]
) -> list[Tensor]:
    """Each prompt's logits at every position; in each step, next_count() tokens of each."""
    states = states_in_steps(decoder, prompts, next_count)
    with torch.inference_mode():
        return [all_logits(decoder, state) for state in states]


def all_logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    return decoder.logits(hidden, np.arange(len(hidden))).clone()


def states_in_steps(
    decoder: Decoder, prompts: list[list[int]], next_count: Callable[[], int]
) -> list[Tensor]:
    """Each prompt's last hidden states, so computed."""
    caches = decoder.new_caches(NUM_BLOCKS, BLOCK_SIZE)
    # Leftovers of others, which nobody may see.
    caches.tensor.fill_(50.0)
    blocks = iter(random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    width = -(-max(map(len, prompts)) // BLOCK_SIZE)
    tables = np.zeros((len(prompts), width), dtype=np.int32)
    for row, prompt in enumerate(prompts):
        for place in range(-(-len(prompt) // BLOCK_SIZE)):
            tables[row, place] = next(blocks)
    done = np.zeros(len(prompts), dtype=np.int64)
    lengths = np.array([len(prompt) for prompt in prompts])
    found: list[list[Tensor]] = [[] for _ in prompts]
    while (done < lengths).any():
        rows = np.flatnonzero(done < lengths)
        counts = np.array([min(next_count(), lengths[row] - done[row]) for row in rows])
        layout = step_layout(done[rows], counts, tables[rows], BLOCK_SIZE)
        tokens = [
            t
            for row, n in zip(rows, counts, strict=True)
            for t in prompts[row][done[row] : done[row] + n]
        ]
        with torch.inference_mode():
            hidden, is_finite = decoder.hidden_states(np.array(tokens), layout, caches)
        assert is_finite.all()
        parts = torch.split(hidden, counts.tolist())
        for row, part in zip(rows.tolist(), parts, strict=True):
            found[row].append(part)
        done[rows] += counts
    return [torch.cat(parts) for parts in found]
