"""From what a caller asked to what is queued and what is reserved.

Pure: ids, seed and time are given. The same steps serve the gateway and a batch line, so a line
in a file means exactly what the same body means over HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from control.admission.reservation import Reservation
from control.protocol.generation_fields import GenerationFields
from control.registry.model_version import ModelVersion
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest, PriorityClass

TokenIds = Sequence[int]

# An answer's logprobs are held as a whole by whoever writes it: so many are some 50 MB of JSON.
MAX_LOGPROB_ENTRIES = 2**19


@dataclass(frozen=True, slots=True)
class Order:
    """Who asks, under which id, and until when.

    `minted_seed` is used when the request names none. Times are seconds on the shared clock.
    """

    request_id: str
    tenant_id: str
    key_id: str
    endpoint: str
    priority_class: PriorityClass
    minted_seed: int
    arrival: float
    deadline_at: float


def check_early(fields: GenerationFields, version: ModelVersion, vocab_size: int) -> None:
    """Raise InvalidRequest for whatever can be told before any prompt is encoded."""
    _, asked = fields.max_output
    fields.sampling(version.max_output_tokens if asked is None else asked, 0, vocab_size)


def build_request(
    fields: GenerationFields,
    prompts: Sequence[TokenIds],
    version: ModelVersion,
    vocab_size: int,
    order: Order,
) -> GenerationRequest:
    """The order for the engine, valid by its own law. Raises InvalidRequest."""
    prompt_param = "prompt" if "prompt" in type(fields).model_fields else "messages"
    prompts = [fields.truncated(prompt) for prompt in prompts]
    max_tokens = _max_tokens(fields, max(map(len, prompts), default=0), version, prompt_param)
    request = GenerationRequest(
        request_id=order.request_id,
        prompts=tuple(map(tuple, prompts)),
        sampling=fields.sampling(max_tokens, order.minted_seed, vocab_size),
        priority_class=order.priority_class,
        cache_scope=cache_scope(order.tenant_id, version.weights_digest),
        arrival=order.arrival,
        deadline_at=order.deadline_at,
        text=fields.text_options,
    )
    request.validate(vocab_size, version.max_model_len)
    _check_num_logprobs(request)
    return request


def reserve(
    fields: GenerationFields, request: GenerationRequest, version: ModelVersion, order: Order
) -> Reservation:
    """What to hold for the request: each prompt once, and the most every choice may say."""
    max_output = request.num_choices * request.sampling.max_tokens
    return Reservation(
        request_id=order.request_id,
        tenant_id=order.tenant_id,
        key_id=order.key_id,
        model=version.model,
        version=version.version,
        weights_digest=version.weights_digest,
        priority_class=order.priority_class,
        endpoint=order.endpoint,
        reserved_tokens=request.num_prompt_tokens + max_output,
        prompt_tokens=request.num_prompt_tokens,
        metadata=fields.metadata or {},
    )


def cache_scope(tenant_id: str, weights_digest: str) -> str:
    """The boundary that prefix reuse may not cross: one tenant, one set of weights."""
    return sha256(f"cache-scope\0{tenant_id}\0{weights_digest}".encode()).hexdigest()


def _check_num_logprobs(request: GenerationRequest) -> None:
    """Raise InvalidRequest if the answer could come to more logprobs than are worth holding."""
    sampling = request.sampling
    entries = 0
    if sampling.logprobs is not None:
        entries += request.num_choices * sampling.max_tokens * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        entries += request.num_prompt_tokens * sampling.n * (1 + sampling.prompt_logprobs)
    if entries > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"This asks for up to {entries} logprobs over all tokens and choices; at most "
            f"{MAX_LOGPROB_ENTRIES} are told. Lower n, the output limit, the number of prompts or "
            "the number of logprobs.",
            param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
        )


def _max_tokens(
    fields: GenerationFields, prompt_tokens: int, version: ModelVersion, prompt_param: str
) -> int:
    """The output limit of each choice. Raises InvalidRequest if the window cannot hold it."""
    name, asked = fields.max_output
    window = version.max_model_len
    left = window - prompt_tokens
    if asked is None:
        most = min(version.max_output_tokens, left)
        default = fields.default_max_output
        wanted = most if default is None else min(default, most)
    else:
        wanted = asked
    # Without a limit there must be room for a word; asked for none, there need not be.
    least = 1 if asked is None else 0
    if prompt_tokens + max(wanted, least) > window:
        requested = "output is left no room" if asked is None else f"{asked} more were requested"
        raise InvalidRequest(
            f"This model's context is {window} tokens; the prompt has {prompt_tokens} and "
            f"{requested}. Shorten the prompt or lower {name}.",
            param=prompt_param,
            code="context_length_exceeded",
        )
    if wanted > version.max_output_tokens:
        raise InvalidRequest(
            f"{name} is {wanted}; {version.pinned_name} writes at most "
            f"{version.max_output_tokens} tokens.",
            param=name,
        )
    return wanted
