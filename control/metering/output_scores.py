"""The logprobs of a stored output, as the bytes that lie beside its text."""

from dataclasses import dataclass

import msgspec

from engine.interface.token_logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputScores:
    """What was asked for of one choice; None for what was not.

    `logprobs` has one entry per output token, `prompt_logprobs` one per prompt token but the
    first.
    """

    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(OutputScores)


def pack_scores(scores: OutputScores) -> bytes | None:
    """The scores as PostgreSQL keeps them; None when there are none."""
    return None if scores == OutputScores() else _encoder.encode(scores)


def unpack_scores(data: bytes | None) -> OutputScores:
    """Inverse of `pack_scores`."""
    return OutputScores() if data is None else _decoder.decode(data)
