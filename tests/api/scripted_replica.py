"""Dispatcher and replica in one, at the Redis seam: it says whatever a test's script says.

It takes queued requests by the real `assign`, and publishes by the real `step`, so the gateway
cannot tell the difference.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import redis
from redis.exceptions import RedisError
from sqlalchemy import Engine

from control.metering.settlement import ChoiceOutput, Settlement, settle
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import report
from control.streams.functions import Publication, assign, invoke, step
from control.streams.keys import ModelKeys
from control.streams.messages import (
    Cancel,
    Charge,
    read_inbox_message,
    unpack_entry,
    unpack_request,
)
from engine.interface.generation_delta import FinishReason, GenerationDelta, Usage
from engine.interface.generation_request import GenerationRequest, PriorityClass

REPLICA = "double"
TOKEN = "token"
UNCHARGED = Charge("nobody", 1.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class Run:
    """One request while its script plays."""

    request: GenerationRequest
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    log_bytes: int = 0
    said: list[GenerationDelta] = field(default_factory=list)
    _serial: int = 0
    _offset: int = 0

    def say(
        self,
        text: str,
        *,
        choice: int = 0,
        num_tokens: int = 1,
        finish: FinishReason | None = None,
    ) -> GenerationDelta:
        """Some more of a choice."""
        delta = GenerationDelta(
            self.request.request_id,
            choice,
            self._serial,
            self._offset,
            token_ids=(7,) * num_tokens,
            text=text,
            finish_reason=finish,
        )
        self._serial += 1
        self._offset += num_tokens
        return delta

    def end(self, error: str | None = None, *, cached: int = 0) -> GenerationDelta:
        """The ending."""
        usage = Usage(self.request.num_prompt_tokens, self._offset, cached)
        last = GenerationDelta(
            self.request.request_id, 0, self._serial, self._offset, usage=usage, error=error
        )
        self._serial += 1
        return last

    def outputs(self) -> tuple[ChoiceOutput, ...]:
        """What each choice said, as it is to be stored."""
        choices = []
        for choice in range(self.request.num_choices):
            said = [delta for delta in self.said if delta.choice == choice]
            token_ids = tuple(token_id for delta in said for token_id in delta.token_ids)
            reason = next((d.finish_reason for d in said if d.finish_reason), None)
            text = "".join(delta.text for delta in said)
            choices.append(ChoiceOutput(choice, token_ids, text, reason))
        return tuple(choices)

    @property
    def prompt(self) -> str:
        """The first prompt as text (the scripted model's tokens are bytes)."""
        return bytes(t for t in self.request.prompts[0] if t < 256).decode()


Script = Callable[[Run], Iterator[GenerationDelta]]


def hello(run: Run) -> Iterator[GenerationDelta]:
    """Two words in each choice."""
    for choice in range(run.request.num_choices):
        yield run.say("Hello", choice=choice)
        yield run.say(" world", choice=choice, finish=FinishReason.STOP)
    yield run.end()


def talk_until_cancelled(run: Run) -> Iterator[GenerationDelta]:
    """Words without end, quickly, until the gateway cancels."""
    while not run.cancelled.wait(0.01):
        yield run.say("word ")
    yield run.end("cancelled")


def keep_silent_until_cancelled(run: Run) -> Iterator[GenerationDelta]:
    """Nothing at all, until the gateway cancels."""
    run.cancelled.wait(30)
    yield run.end("cancelled")


class ScriptedReplica:
    """Serves one model on threads of its own. `script` may be changed between requests."""

    def __init__(
        self, client: redis.Redis, database: Engine, model: str, weights_digest: str
    ) -> None:
        self.script: Script = hello
        self.runs: dict[str, Run] = {}
        self._client = client
        self._database = database
        self._keys = ModelKeys(model)
        self._digest = weights_digest
        self._stop = threading.Event()
        self.changed = threading.Condition()
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._take, self._listen, self._report)
        ]

    def start(self) -> None:
        """Begin to serve."""
        self._client.set(self._keys.leader, TOKEN)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; requests under way are cancelled."""
        self._stop.set()
        for run in self.runs.values():
            run.cancelled.set()
        for thread in self._threads:
            thread.join(10)

    def latest(self) -> Run:
        """The run that began last; waits for one."""
        with self.changed:
            if not self.changed.wait_for(lambda: bool(self.runs), 10):
                raise AssertionError("no request came")
            return next(reversed(self.runs.values()))

    def forget(self) -> None:
        """Forget all runs."""
        self.runs.clear()

    def _take(self) -> None:
        queue, last = self._keys.queue(PriorityClass.INTERACTIVE), "0"
        while not self._stop.is_set():
            for entry_id, fields in self._read(queue, last):
                last = entry_id
                if b"header" not in fields:
                    continue
                entry = unpack_entry(fields[b"header"])
                packed = self._client.hget(self._keys.live(entry.request_id), "request")
                reply = invoke(self._client, assign(self._keys, TOKEN, entry, REPLICA, UNCHARGED))
                if reply[0] != b"assigned":
                    continue
                assert isinstance(packed, bytes)
                run = Run(unpack_request(packed))
                with self.changed:
                    self.runs[entry.request_id] = run
                    self.changed.notify_all()
                threading.Thread(target=self._play, args=(run, reply[1]), daemon=True).start()

    def _listen(self) -> None:
        inbox, last = self._keys.inbox(REPLICA), "0"
        while not self._stop.is_set():
            for entry_id, fields in self._read(inbox, last):
                last = entry_id
                message = read_inbox_message(fields)
                if isinstance(message, Cancel) and message.request_id in self.runs:
                    self.runs[message.request_id].cancelled.set()

    def _report(self) -> None:
        snapshot = ReplicaSnapshot(
            replica_id=REPLICA,
            model=self._keys.model,
            version="v1",
            weights_digest=self._digest,
            is_accepting=True,
            kv_tokens_total=1,
            kv_tokens_free=1,
            kv_blocks_total=1,
            kv_blocks_free=1,
            num_sequences_max=1,
            num_running=0,
            num_waiting=0,
            steps_total=0,
            tokens_total=0,
        )
        while True:
            report(self._client, snapshot)
            if self._stop.wait(1):
                return

    def _read(self, stream: str, last: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
        with contextlib.suppress(RedisError):
            reply = self._client.xread({stream: last}, block=100)
            assert isinstance(reply, list)
            for _, entries in reply:
                for entry_id, fields in entries:
                    yield entry_id.decode(), fields

    def _play(self, run: Run, attempt: int) -> None:
        for delta in self.script(run):
            self.publish(run, attempt, [delta])
        run.ended.set()

    def publish(self, run: Run, attempt: int, deltas: list[GenerationDelta]) -> None:
        """Say the deltas; an ending is settled first."""
        usage = deltas[-1].usage
        if usage is not None:
            outputs = run.outputs() if run.request.keeps_output else ()
            settlement = Settlement(
                run.request.request_id,
                attempt,
                usage,
                error=deltas[-1].error,
                outputs=outputs,
            )
            with self._database.begin() as connection:
                settle(connection, [settlement])
        run.said.extend(deltas)
        publication = Publication.of(attempt, run.log_bytes, deltas)
        run.log_bytes += len(publication.frames)
        invoke(self._client, step(self._keys, [publication]))
