"""How an answer gets its words: from a request that is accepted now, or from one that was before.

A request that was accepted is heard from its first word on, at whatever gateway: from its log
while that is kept, then from what was stored of it, if it was.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from redis.exceptions import RedisError

from api.gateway import Gateway
from api.stored import reading
from control.admission.accepted import Accepted, read_accepted
from control.admission.reservation import Reservation
from control.errors import KeyMoved, RequestLost, StoreUnavailable, StreamExpired
from control.metering.stored_deltas import read_stored_deltas
from control.streams.follower import Subscription
from engine.interface.errors import InvalidRequest
from engine.interface.generation_delta import GenerationDelta
from engine.interface.generation_request import GenerationRequest
from engine.text.token_reader import TokenReader

ACCEPT_LIMIT_S = 10.0
LOOK_AGAIN_S = 0.05
NUM_LOOKS = 40
RETRY_AFTER_MS = 1000


class NeverQueued(RequestLost):
    """The request was accepted, and whoever accepted it died before it was queued."""


class Entrance(Protocol):
    """Where the words of one answer come from."""

    @property
    def model(self) -> str:
        """The model that says them."""

    @property
    def request_id(self) -> str:
        """The request that they answer."""

    @property
    def is_known(self) -> bool:
        """Whether the request was accepted before."""

    @property
    def is_undelivered(self) -> bool:
        """Whether it is noted of the request that nobody heard of it."""

    @property
    def is_following(self) -> bool:
        """Whether this gateway may be among the request's followers by now."""

    async def enter(self, subscription: Subscription) -> None:
        """See to it that the subscription hears them all. Raises ServiceError."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to be accepted."""

    gateway: Gateway
    reservation: Reservation
    request: GenerationRequest

    @property
    def model(self) -> str:
        """The model that is asked."""
        return self.reservation.model

    @property
    def request_id(self) -> str:
        """The new request's id."""
        return self.request.request_id

    @property
    def is_known(self) -> bool:
        """It is accepted now."""
        return False

    @property
    def is_undelivered(self) -> bool:
        """It is not begun."""
        return False

    @property
    def is_following(self) -> bool:
        """A request is queued with its first follower's name."""
        return True

    async def enter(self, subscription: Subscription) -> None:
        """Accept the request, or refuse it and leave nothing.

        One that somebody else queued meanwhile, under the same id, is followed.
        """
        if not await self.gateway.admission.accept(self.reservation, self.request):
            await self.gateway.follower.attach(subscription)


@dataclass(slots=True)
class KnownRequest:
    """A request that was accepted, of this tenant.

    `after` is how many of its tokens the reader has. `is_kept` says that its ending can be told
    as long as its row is there, as that of a request with a key can.
    """

    gateway: Gateway
    tenant_id: str
    accepted: Accepted
    after: int | None = None
    is_kept: bool = False
    is_following: bool = field(default=False, init=False)

    @property
    def model(self) -> str:
        """The model that answers it."""
        return self.accepted.model

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.accepted.request_id

    @property
    def is_known(self) -> bool:
        """It is."""
        return True

    @property
    def is_undelivered(self) -> bool:
        """What its row told when it was found."""
        return self.accepted.is_undelivered

    async def enter(self, subscription: Subscription) -> None:
        """Follow the request, or tell again what it said.

        Raises StreamExpired if nobody has that any more, InvalidRequest if the reader claims to
        have more than was said, NeverQueued if Redis does not know it, and KeyMoved if it was given
        back.
        """
        try:
            await self._check_head()
            for _ in range(NUM_LOOKS):
                self.is_following = True
                if await self.gateway.follower.attach(subscription):
                    return
                self.is_following = False
                accepted = await self._look()
                if accepted.has_ended:
                    await self._recall(accepted, subscription)
                    return
                await asyncio.sleep(LOOK_AGAIN_S)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(
                "The stream's log does not answer. Try again shortly.",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error
        raise NeverQueued(
            "The request was accepted and is not to be found.", retry_after_ms=RETRY_AFTER_MS
        )

    async def _check_head(self) -> None:
        if self.after is None:
            return
        usage = self.accepted.usage
        if usage is not None:
            head = usage.completion_tokens
        else:
            head = await self.gateway.follower.num_logged(self.model, self.request_id)
        if self.after > head:
            raise InvalidRequest(
                f"The stream is at {head} tokens; there is nothing after {self.after}.",
                param="last-event-id",
            )

    async def _look(self) -> Accepted:
        async with reading(self.gateway.database) as connection:
            accepted = await read_accepted(connection, self.tenant_id, self.request_id)
        if accepted is None:
            raise KeyMoved("The request was given back.", retry_after_ms=RETRY_AFTER_MS)
        return accepted

    async def _recall(self, accepted: Accepted, subscription: Subscription) -> None:
        """Hear a request that Redis has forgotten from what PostgreSQL kept of it."""
        assert accepted.usage is not None
        deltas: list[GenerationDelta] = []
        form = accepted.form
        # Whose tokens came in which order is not kept, so several choices are told from the start.
        if form is not None and (form.num_choices == 1 or not self.after):
            registry = await self.gateway.registry.current()
            version = registry.resolve(accepted.pinned_name)
            if version is not None:
                text = await self.gateway.prompts.of(version)
                reader = TokenReader(text.tokenizer, form.text)
                async with reading(self.gateway.database) as connection:
                    deltas = await read_stored_deltas(connection, self.request_id, reader)
        if not deltas and not self.is_kept:
            raise StreamExpired(
                "What this request said is kept for ten minutes after its end, or for a day if "
                "it was made with an Idempotency-Key."
            )
        last = GenerationDelta(
            self.request_id,
            0,
            len(deltas),
            accepted.usage.completion_tokens,
            usage=accepted.usage,
            error=accepted.error,
        )
        for delta in [*deltas, last]:
            subscription.put(delta, is_from_log=True)


async def entered(entering: "asyncio.Task[None]") -> None:
    """Wait until the words can be heard; what is under way is not torn apart by a hang-up."""
    try:
        async with asyncio.timeout(ACCEPT_LIMIT_S):
            await asyncio.shield(entering)
    except TimeoutError as error:
        raise StoreUnavailable("The ledger does not answer. Try again shortly.") from error
