"""The answer to a request in its form: as a stream, or as a whole at its end."""

from api.event_labels import EventLabels
from api.gateway import Gateway
from api.prompts import VersionText
from api.streaming import StreamAnswer
from api.whole_answer import WholeAnswer
from control.identity.request_id import created_at_of
from control.protocol.answer_contents import AnswerContents
from control.protocol.answer_form import AnswerForm
from control.protocol.responses import CHAT, COMPLETION, ChunkEncoder, ReplyHead
from control.registry.model_version import ModelVersion
from engine.text.token_reader import TokenReader

Answer = StreamAnswer | WholeAnswer


def head_of(form: AnswerForm, request_id: str, version: ModelVersion) -> ReplyHead:
    """What all parts of the answer share."""
    created = int(created_at_of(request_id).timestamp())
    return ReplyHead(CHAT if form.is_chat else COMPLETION, request_id, created, version)


def answer_in(
    form: AnswerForm,
    head: ReplyHead,
    text: VersionText,
    gateway: Gateway,
    prompt_tokens: int,
    labels: EventLabels | None,
) -> Answer:
    """The answer, not yet begun. Only a stream has labels."""
    contents = AnswerContents(form, TokenReader(text.tokenizer, form.text))
    if not form.is_stream:
        return WholeAnswer(head, form.num_choices, contents)
    encoder = ChunkEncoder(
        head,
        includes_usage=form.includes_usage,
        has_continuous_usage=form.has_continuous_usage,
        opening_members=contents.opening_members,
    )
    return StreamAnswer(
        encoder=encoder,
        contents=contents,
        includes_usage=form.includes_usage,
        num_choices=form.num_choices,
        prompt_tokens=prompt_tokens,
        heartbeat_s=gateway.heartbeat_s,
        labels=labels,
    )
