"""Where two outputs part, and whether either word was as right as the other.

Float32 sums differ in the last bits with the company that a row has. Where two tokens score the
same to within `TIE_LOGITS` and nothing scores more, either is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.step_layout import step_layout
from engine.models.decoder import Decoder

TIE_LOGITS = 1e-3
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a sequence that another run said otherwise, and what either scored."""

    sequence: int
    position: int
    logit_gap: float
    are_top_two: bool

    @property
    def is_tie(self) -> bool:
        """Whether both tokens were equally right."""
        return self.are_top_two and self.logit_gap < TIE_LOGITS

    def __str__(self) -> str:
        verdict = "shown logit tie" if self.is_tie else "NOT A TIE"
        return (
            f"sequence {self.sequence} differs from position {self.position}; "
            f"logit gap {self.logit_gap:.2e}: {verdict}"
        )


def first_differences(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    expected: Mapping[int, Sequence[int]],
    said: Mapping[int, Sequence[int]],
) -> list[Difference]:
    """Of each sequence the first word that differs; behind it the contexts are not the same."""
    found = []
    for number, prompt in enumerate(prompts):
        pairs = zip(expected[number], said[number], strict=False)
        index = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if index is not None:
            logits = _next_logits(decoder, [*prompt, *expected[number][:index]])
            one, other = expected[number][index], said[number][index]
            found.append(
                Difference(
                    sequence=number,
                    position=len(prompt) + index,
                    logit_gap=abs(float(logits[one] - logits[other])),
                    are_top_two=set(logits.topk(2).indices.tolist()) == {one, other},
                )
            )
    return found


def _next_logits(decoder: Decoder, context: list[int]) -> torch.Tensor:
    """The model's scores after a context, computed alone and in one go."""
    num_blocks = -(-len(context) // BLOCK_SIZE)
    layout = step_layout(
        np.zeros(1, np.int64),
        np.array([len(context)]),
        np.arange(num_blocks, dtype=np.int32)[None],
        BLOCK_SIZE,
    )
    caches = decoder.new_caches(num_blocks, BLOCK_SIZE)
    with torch.inference_mode():
        hidden, _ = decoder.hidden_states(np.array(context), layout, caches)
        return decoder.logits(hidden, np.array([len(context) - 1]))[0].clone()
