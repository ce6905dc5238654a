"""A request that was accepted before, by whichever gateway: what its row tells about it."""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of
from control.protocol.answer_form import AnswerForm, unpack_form
from engine.interface.generation_delta import Usage

_READ = text(
    """
    SELECT r.request_id, r.endpoint, r.model, r.version, r.state, r.error_code, r.prompt_tokens,
           r.answer_form, u.prompt_tokens AS charged_tokens, u.completion_tokens, u.cached_tokens,
           EXISTS (SELECT FROM undelivered_requests n WHERE n.created_at = r.created_at
                   AND n.request_id = r.request_id) AS is_undelivered
    FROM requests r LEFT JOIN usage_events u USING (created_at, request_id)
    WHERE r.created_at = :created_at AND r.request_id = :request_id AND r.tenant_id = :tenant_id
    """
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """One request. `usage` is None until it ended, `error` the code of a bad end.

    `form` is None for one that was not made to be told over HTTP. `is_undelivered` says that its
    connection broke before any of the answer was written, and that nobody heard it since.
    """

    request_id: str
    endpoint: str
    model: str
    version: str
    state: str
    error: str | None
    prompt_tokens: int
    usage: Usage | None
    form: AnswerForm | None
    is_undelivered: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its ending is settled."""
        return self.usage is not None

    @property
    def pinned_name(self) -> str:
        """The model version that answers it."""
        return f"{self.model}@{self.version}"

    @property
    def failed_unheard(self) -> bool:
        """Whether it failed before anybody heard of it, so that a repetition runs afresh."""
        if self.error is None or self.usage is None:
            return False
        return self.is_undelivered or not self.usage.completion_tokens


async def read_accepted(
    connection: AsyncConnection, tenant_id: str, request_id: str
) -> Accepted | None:
    """The tenant's request of that id, if there is one. Raises ValueError if it is no id."""
    result = await connection.execute(
        _READ,
        {
            "created_at": created_at_of(request_id),
            "request_id": request_id,
            "tenant_id": tenant_id,
        },
    )
    row = result.one_or_none()
    if row is None:
        return None
    usage = None
    if row.completion_tokens is not None:
        usage = Usage(row.charged_tokens, row.completion_tokens, row.cached_tokens)
    return Accepted(
        request_id=row.request_id,
        endpoint=row.endpoint,
        model=row.model,
        version=row.version,
        state=row.state,
        error=row.error_code,
        prompt_tokens=row.prompt_tokens,
        usage=usage,
        form=None if row.answer_form is None else unpack_form(bytes(row.answer_form)),
        is_undelivered=row.is_undelivered,
    )
