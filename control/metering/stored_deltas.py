"""The output of a request that ended, as deltas made from what PostgreSQL keeps of it.

Each token of a choice is a delta of its own, so that a reader who had some of them gets the others.
A delta has the text that was certain once its token had come, as in the stream; where a stop string
was cut off, the text as it was stored decides.
"""

from collections.abc import Iterator

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of
from control.metering.output_scores import unpack_scores
from control.metering.settlement import ChoiceOutput
from control.protocol.logprob_objects import Reader
from engine.interface.generation_delta import FinishReason, GenerationDelta

_READ = text(
    """
    SELECT choice, token_ids, text, finish_reason, scores FROM request_outputs
    WHERE created_at = :created_at AND request_id = :request_id ORDER BY choice
    """
)


async def read_stored_deltas(
    connection: AsyncConnection, request_id: str, reader: Reader
) -> list[GenerationDelta]:
    """All deltas but the last, choice after choice; none if nothing was kept."""
    key = {"created_at": created_at_of(request_id), "request_id": request_id}
    deltas: list[GenerationDelta] = []
    for row in await connection.execute(_READ, key):
        stored = ChoiceOutput(
            row.choice,
            tuple(row.token_ids),
            bytes(row.text).decode(),
            None if row.finish_reason is None else FinishReason(row.finish_reason),
            unpack_scores(row.scores),
        )
        deltas.extend(deltas_of(request_id, stored, reader, deltas[-1] if deltas else None))
    return deltas


def deltas_of(
    request_id: str, stored: ChoiceOutput, reader: Reader, previous: GenerationDelta | None
) -> Iterator[GenerationDelta]:
    """The choice's deltas, which follow the previous one's."""
    serial = 0 if previous is None else previous.serial + 1
    offset = 0 if previous is None else previous.offset + len(previous.token_ids)
    answer, said, certain = reader.answer(), 0, 0
    last = len(stored.token_ids) - 1
    for place, token_id in enumerate(stored.token_ids):
        certain = min(certain + len(answer.push((token_id,))), len(stored.text))
        is_last = place == last
        end = len(stored.text) if is_last else certain
        yield GenerationDelta(
            request_id,
            stored.choice,
            serial + place,
            offset + place,
            (token_id,),
            stored.text[said:end],
            stored.finish_reason if is_last else None,
            logprobs=stored.scores.logprobs and stored.scores.logprobs[place : place + 1],
            prompt_logprobs=None if place else stored.scores.prompt_logprobs,
        )
        said = end
    if not stored.token_ids and stored.finish_reason is not None:
        yield GenerationDelta(
            request_id,
            stored.choice,
            serial,
            offset,
            finish_reason=stored.finish_reason,
            prompt_logprobs=stored.scores.prompt_logprobs,
        )
