"""One attempt of one request on its way from sampled tokens to words that may be seen.

Pure bookkeeping: sequence updates and a clock reading in, deltas and at last a settlement out.
Log, feed and ledger are all made from what passes through here, so they cannot disagree.

A token is *delivered* when it is part of a delta; a token that the engine sampled beyond the
match of a stop string, or that could not be published, is *wasted*. Text may lag behind its
tokens: half a character, or what could become a stop string, is held back until it is decided.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from control.metering.output_scores import OutputScores
from control.metering.settlement import ChoiceOutput, Settlement, WasteReason
from control.streams.frames import pack_frames
from control.streams.functions import Publication
from control.streams.messages import Assignment
from engine.interface.generation_delta import FinishReason, GenerationDelta, Usage
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.interface.token_logprobs import TokenLogprob
from engine.text.detokenizer import Detokenizer
from engine.text.stop_matcher import StopMatcher
from engine.text.token_reader import TokenReader
from engine.text.tokenizer import Tokenizer
from workers.request_times import Received, RequestTimes

_FINISHED = {SequenceEnd.STOP: FinishReason.STOP, SequenceEnd.LENGTH: FinishReason.LENGTH}
_FAILED = {
    SequenceEnd.DEADLINE: "deadline_exceeded",
    SequenceEnd.ERROR: "internal_error",
}


@dataclass(slots=True)
class _Choice:
    """`prompt_logprobs` go out with the first delta. `logprobs` are held only if they are kept."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_begun: bool = False
    finish_reason: FinishReason | None = None
    is_computing: bool = True


class Delivery:
    """The state of one attempt between the engine and the log.

    `log` holds what earlier attempts delivered, `first_offset` tokens: serials, offsets, characters
    and stop strings go on from there. `times` are the attempt's instants.
    """

    def __init__(
        self,
        assignment: Assignment,
        tokenizer: Tokenizer,
        log: Sequence[GenerationDelta],
        received: Received,
    ) -> None:
        self.request = assignment.request
        self.attempt = assignment.attempt
        self.error: str | None = None
        # Somebody else ends the request; of this attempt only its waste is to be told.
        self.is_abandoned = False
        self._cancel_error = "cancelled"
        self.waste: Counter[WasteReason] = Counter()
        self._serial = len(log)
        self._log_bytes = len(pack_frames(log))
        self._offset = sum(len(delta.token_ids) for delta in log)
        self.first_offset = self._offset
        self.times = RequestTimes(assignment, received)
        # Of each prompt: when its first choice was computed, which one it was, and its hit.
        self._prompt_hits: dict[int, tuple[float, int, int]] = {}
        reader, options = TokenReader(tokenizer, self.request.text), self.request.text
        self._choices = [
            _Choice(
                reader.answer(),
                StopMatcher(self.request.sampling.stop, shows_match=options.shows_stop),
            )
            for _ in range(self.request.num_choices)
        ]
        for delta in log:
            self._recall(delta)

    @property
    def is_over(self) -> bool:
        """True once the engine has ended every sequence."""
        return not any(choice.is_computing for choice in self._choices)

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Choices that have said their last word, whatever the engine still computes."""
        return tuple(i for i, c in enumerate(self._choices) if c.finish_reason is not None)

    def resumed_request(self) -> GenerationRequest:
        """The request as the engine is to run it: with the tokens already delivered."""
        if not self._offset:
            return self.request
        resumed = tuple(tuple(choice.token_ids) for choice in self._choices)
        return replace(self.request, resumed=resumed)

    def take(self, update: SequenceUpdate, now: float) -> GenerationDelta | None:
        """Note what one step did to one choice. Returns what is to be published of it.

        The engine must be told to stop a choice that is in `finished_choices` and whose update
        had no end.
        """
        choice = self._choices[update.choice]
        self.times.note_update(update, now)
        self._note_hit(update)
        choice.prompt_logprobs.extend(update.prompt_logprobs or ())
        is_stopped = update.end is SequenceEnd.STOP
        delivered, text = self._speak(choice, update.token_ids, is_stopped=is_stopped)
        self.waste[WasteReason.STOP] += len(update.token_ids) - len(delivered)
        was_finished = choice.finish_reason is not None and not delivered
        if update.end is not None:
            choice.is_computing = False
            if choice.finish_reason is None:
                text += self._end(choice, update.end)
        choice.text.append(text)
        if was_finished or not (delivered or text or update.end):
            return None
        if choice.finish_reason is None and not delivered and not text:
            return None
        logprobs = (update.logprobs or ())[: len(delivered)]
        return self._delta(update.choice, delivered, text, logprobs)

    def undeliver(self, deltas: Iterable[GenerationDelta], reason: WasteReason) -> None:
        """Note that the latest deltas could not be published and will never be."""
        for delta in reversed(list(deltas)):
            choice, num_tokens = self._choices[delta.choice], len(delta.token_ids)
            self._offset -= num_tokens
            self.waste[reason] += num_tokens
            choice.text.pop()
            if num_tokens:
                del choice.token_ids[-num_tokens:]

    def fail(self, error: str) -> None:
        """End the request with an error whatever its sequences did."""
        self.error = self.error or error

    def note_cancel(self, error: str) -> None:
        """Say with which error the request ends if the engine cancels any of its sequences."""
        self._cancel_error = error

    def settlement(self, replica_id: str) -> Settlement:
        """How the request ended; call once `is_over`."""
        is_started = self.times.scheduled_at is not None or self._offset > 0
        usage = Usage(
            prompt_tokens=self.request.num_prompt_tokens if is_started else 0,
            completion_tokens=self._offset,
            cached_tokens=sum(hit for _, _, hit in self._prompt_hits.values()),
        )
        return Settlement(
            request_id=self.request.request_id,
            attempt=self.attempt,
            usage=usage,
            finish_reasons=tuple(choice.finish_reason for choice in self._choices),
            error=self.error,
            waste={reason: count for reason, count in self.waste.items() if count},
            replica_id=replica_id,
            timings=self.times.timings(),
            outputs=tuple(self._outputs()),
        )

    def last_delta(
        self, usage: Usage, error: str | None, *, is_settled: bool = True
    ) -> Publication:
        """The publication that ends the request, after its settlement or in place of it."""
        last = GenerationDelta(
            request_id=self.request.request_id,
            choice=0,
            serial=self._serial,
            offset=self._offset,
            usage=usage,
            error=error,
            is_settled=is_settled,
        )
        return self.publication([last])

    def publication(self, deltas: Sequence[GenerationDelta]) -> Publication:
        """What comes next in the log."""
        publication = Publication.of(self.attempt, self._log_bytes, deltas)
        self._log_bytes += len(publication.frames)
        return publication

    def _recall(self, delta: GenerationDelta) -> None:
        choice = self._choices[delta.choice]
        self._speak(choice, delta.token_ids)
        choice.text.append(delta.text)
        self._keep(choice, delta)
        choice.finish_reason = delta.finish_reason or choice.finish_reason

    def _speak(
        self, choice: _Choice, token_ids: Sequence[int], *, is_stopped: bool = False
    ) -> tuple[tuple[int, ...], str]:
        """Push tokens through text and stop strings. Returns those delivered and their text.

        With `is_stopped` the last token is what ended the output: like a stop string it is not
        part of the text, unless the caller wants it.
        """
        delivered: list[int] = []
        said = ""
        unseen = len(token_ids) if is_stopped and not self.request.text.shows_stop else 0
        for token_id in token_ids:
            if choice.finish_reason is not None:
                break
            delivered.append(token_id)
            choice.token_ids.append(token_id)
            text = "" if len(delivered) == unseen else choice.detokenizer.push((token_id,))
            # A stop string counts only once the least number of tokens has been said.
            if len(choice.token_ids) > self.request.sampling.min_tokens:
                text, is_match = choice.matcher.push(text)
                if is_match:
                    choice.finish_reason = FinishReason.STOP
            said += text
        return tuple(delivered), said

    def _end(self, choice: _Choice, end: SequenceEnd) -> str:
        """Close a choice that the engine ended. Returns the text that was still held back."""
        text, is_match = choice.matcher.push(choice.detokenizer.flush())
        if not is_match:
            text += choice.matcher.flush()
        if is_match:
            choice.finish_reason = FinishReason.STOP
        elif end in _FINISHED:
            choice.finish_reason = _FINISHED[end]
        else:
            self.fail(_FAILED.get(end, self._cancel_error))
        return text

    def _delta(
        self,
        index: int,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...],
    ) -> GenerationDelta:
        choice, sampling = self._choices[index], self.request.sampling
        is_first_of_scored = sampling.prompt_logprobs is not None and not choice.has_begun
        delta = GenerationDelta(
            request_id=self.request.request_id,
            choice=index,
            serial=self._serial,
            offset=self._offset,
            token_ids=token_ids,
            text=text,
            finish_reason=choice.finish_reason,
            logprobs=None if sampling.logprobs is None else logprobs,
            prompt_logprobs=tuple(choice.prompt_logprobs) if is_first_of_scored else None,
        )
        self._keep(choice, delta)
        self._serial += 1
        self._offset += len(token_ids)
        return delta

    def _keep(self, choice: _Choice, delta: GenerationDelta) -> None:
        """Note what a delta said of likelihoods; only what is kept must outlive the stream."""
        choice.has_begun = True
        is_kept = self._is_kept
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = list(delta.prompt_logprobs) if is_kept else []
        if is_kept:
            choice.logprobs.extend(delta.logprobs or ())

    def _note_hit(self, update: SequenceUpdate) -> None:
        if update.scheduled_at is not None:
            # The other choices share what the first one has just computed, which is no hit.
            prompt = update.choice // self.request.sampling.n
            hit = (update.scheduled_at, update.choice, update.num_cached_tokens)
            self._prompt_hits[prompt] = min(hit, self._prompt_hits.get(prompt, hit))

    @property
    def _is_kept(self) -> bool:
        is_batch = self.request.priority_class is PriorityClass.BATCH
        return is_batch or self.request.keeps_output

    def _outputs(self) -> Iterable[ChoiceOutput]:
        """What must outlive the stream: batch results, and what may be asked for again by key."""
        if not self._is_kept:
            return
        sampling = self.request.sampling
        for index, choice in enumerate(self._choices):
            logprobs = None if sampling.logprobs is None else tuple(choice.logprobs)
            is_scored = sampling.prompt_logprobs is not None
            prompt_logprobs = tuple(choice.prompt_logprobs) if is_scored else None
            yield ChoiceOutput(
                index,
                tuple(choice.token_ids),
                "".join(choice.text),
                choice.finish_reason,
                OutputScores(logprobs, prompt_logprobs),
            )
