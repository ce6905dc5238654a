"""The body of POST /v1/batches."""

from typing import Annotated, Literal

from pydantic import Field

from control.protocol.strict_model import MetadataText, ShortText, StrictModel, Unserved

Metadata = Annotated[dict[ShortText, MetadataText], Field(max_length=16)]


class BatchRequest(StrictModel):
    """A batch as asked for."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h", "12h", "4h", "1h"]
    metadata: Metadata | None = None

    output_expires_after: Unserved = None
