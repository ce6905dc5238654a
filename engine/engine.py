"""The engine: requests in, tokens out, one step at a time.

    step():             schedule N | execute N | update N
    step_overlapped():  schedule N + 1 while N computes | start N + 1 | update N meanwhile

Both do the same things to the same values; the second only does them in another order, so
that the device never waits for a decision. The engine owns no thread, no queue and no text.
Every sequence gets exactly one update with an `end`: finished, cancelled, past its deadline,
or failed alone.
"""

import time
from collections.abc import Callable

from engine.engine_settings import EngineSettings
from engine.engine_stats import EngineStats
from engine.execution.execution import Execution, InlineExecution
from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.runner import ModelLimits, Runner
from engine.grammar.grammar_compiler import GrammarCompiler
from engine.interface.block_move import MoveKind
from engine.interface.errors import DuplicateRequest, InvalidRequest, QueueFull
from engine.interface.generation_request import GenerationRequest
from engine.interface.prefix_keys import child_key
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_chain import ChildKey
from engine.scheduling.admission import Predictor
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.inter_token_controller import InterTokenController
from engine.scheduling.output_length_predictor import OutputLengthPredictor
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.scheduling.sequence import Sequence, sequences_of
from engine.scheduling.step_time_model import StepShape, StepTimeModel
from engine.step_watchdog import StepWatchdog, Verdict


class Engine:
    """Continuous batching over any Runner.

    `execution` says where steps are computed; by default in the caller's thread. `clock` is
    the clock of `request.deadline_at`; it is read once per request, and from then on
    `monotonic` counts, so a jump of the wall clock ends nothing. `grammars` checks the grammars
    of requests, which the runner must be able to follow, and is closed with the engine; without
    it, a request with a grammar is an InvalidRequest.
    """

    def __init__(  # noqa: PLR0913 - all but three are seams with one usual value
        self,
        runner: Runner,
        settings: EngineSettings,
        *,
        execution: Execution | None = None,
        grammars: GrammarCompiler | None = None,
        predictor: Predictor | None = None,
        child_key: ChildKey = child_key,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = runner.limits
        self._execution = execution or InlineExecution(runner)
        self._grammars = grammars
        self._settings = settings
        self._child_key = child_key
        self._clock = clock
        self._monotonic = monotonic
        self._predictor = predictor or OutputLengthPredictor()
        self._step_times = StepTimeModel()
        self._controller = InterTokenController(settings.inter_token_target_s, self._step_times)
        self._kv_cache = KVCacheManager(
            settings.num_blocks, settings.block_size, settings.num_host_blocks
        )
        self._scheduler = Scheduler(
            self._kv_cache,
            SchedulerLimits(
                settings.max_num_batched_tokens,
                settings.chunk_size,
                settings.max_num_seqs,
                settings.max_waiting,
                settings.high_watermark,
                settings.low_watermark,
            ),
            self._predictor,
            self._controller,
        )
        self._roster = self._scheduler.roster
        self._watchdog = StepWatchdog()
        self._living: dict[str, dict[int, Sequence]] = {}
        self._deadlines = Deadlines(self._is_living)
        self._ended: list[SequenceUpdate] = []
        self._in_flight: SchedulerOutput | None = None
        self._started_at = 0.0
        self._num_steps = 0
        self._num_late_cancels = 0

    @property
    def settings(self) -> EngineSettings:
        """The sizes that this engine was built with."""
        return self._settings

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model that runs here."""
        return self._limits

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._living or self._ended or self._in_flight)

    def is_here(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._living

    def prepare(self, request: GenerationRequest) -> list[Sequence]:
        """Check a request and name its blocks; any thread may, since nothing is changed.

        Raises InvalidRequest when it can never run here, GrammarBusy when its grammar cannot be
        looked at now. Waits for that while the grammar is new.
        """
        self._validate(request)
        return sequences_of(
            request, self._limits.eos_token_ids, self._settings.block_size, self._child_key
        )

    def add(self, request: GenerationRequest, sequences: list[Sequence] | None = None) -> None:
        """Queue all choices of a request, or raise and queue none.

        `sequences` is what `prepare` returned for it, if that was called before. Raises
        InvalidRequest when it can never run here, QueueFull when it cannot wait, and
        DuplicateRequest when it is already here.
        """
        sequences = sequences or self.prepare(request)
        if self.is_here(request.request_id):
            raise DuplicateRequest(f"Request {request.request_id} is already running here.")
        if not self._roster.has_room_for(request.num_choices):
            raise QueueFull(
                f"{self._roster.num_waiting} sequences wait and at most "
                f"{self._settings.max_waiting} may; send the request elsewhere or later."
            )
        deadline = self._monotonic() + (request.deadline_at - self._clock())
        self._living[request.request_id] = {s.spec.choice: s for s in sequences}
        for sequence in sequences:
            self._roster.add(sequence)
            self._deadlines.add(deadline, sequence)
            # What an earlier attempt delivered may already be all there was to say, or the
            # prompt is a single token that is only to be scored.
            if sequence.end is not None:
                sequence.scheduled_at = None if request.sampling.max_tokens else self._monotonic()
                self._end(sequence, sequence.end)

    def cancel(
        self, request_id: str, choice: int | None = None, *, is_complete: bool = False
    ) -> None:
        """Stop one choice, or all; nobody holds their blocks on return, the next step reports it.

        `is_complete` says that nothing more is wanted (a stop string was found), rather than that
        nobody wants it: lengths are learned from it. A request or choice that is not here has
        ended before: counted, otherwise ignored.
        """
        living = self._living.get(request_id, {})
        targets = list(living.values()) if choice is None else [living.get(choice)]
        found = [sequence for sequence in targets if sequence is not None]
        if not found:
            self._num_late_cancels += 1
        for sequence in found:
            self._end(sequence, SequenceEnd.CANCELLED, is_complete=is_complete)

    def step(self) -> list[SequenceUpdate]:
        """Compute one step; return what was sampled and what ended since the last one."""
        updates = self._finish()
        self._end_overdue()
        self._start(self._scheduler.schedule())
        return updates + self._finish() + self._take_ended()

    def step_overlapped(self) -> list[SequenceUpdate]:
        """Decide a step while the one before it computes, start it, and report the one before."""
        self._end_overdue()
        work = self._scheduler.schedule()
        before = self._in_flight
        if before is None:
            self._start(work)
            return self._take_ended()
        result = self._await(before)
        self._start(work.with_sampled(before, result.token_ids))
        return self._update(before, result) + self._take_ended()

    def verdict(self) -> Verdict | None:
        """What is wrong with the engine's progress just now, if anything. Any thread may ask."""
        return self._watchdog.verdict(self._monotonic())

    def expected_tokens(self, request: GenerationRequest) -> int:
        """KV slots the request is expected to come to, over all choices. Any thread may ask."""
        sampling = request.sampling
        expected = self._predictor.expected_output(request.cache_scope, 0, sampling.max_tokens)
        num_prompt_tokens = request.num_prompt_tokens * sampling.n
        return num_prompt_tokens + request.num_choices * expected

    def expected_output(self, cache_scope: str) -> int:
        """Tokens that an output without a limit is expected to come to. Any thread may ask."""
        return self._predictor.expected_output(cache_scope, 0, self._limits.max_model_len)

    def stats(self) -> EngineStats:
        """A consistent picture; call it from the thread that steps."""
        kv_cache, roster = self._kv_cache, self._roster
        num_unpromised = kv_cache.num_blocks - roster.num_projected_blocks
        yielding = roster.yielding
        num_yielding_blocks = max(0, num_unpromised + yielding.num_blocks) - max(0, num_unpromised)
        return EngineStats(
            kv_blocks_free=kv_cache.num_free_blocks,
            kv_blocks_total=kv_cache.num_blocks,
            host_blocks_free=kv_cache.store.num_free_host_blocks,
            projected_free_tokens=max(0, num_unpromised) * kv_cache.block_size,
            running=roster.num_running,
            waiting=roster.num_waiting,
            running_interactive=roster.num_interactive,
            running_yielding=yielding.num_sequences,
            yielding_tokens=num_yielding_blocks * kv_cache.block_size,
            max_num_seqs=self._settings.max_num_seqs,
            steps_total=self._num_steps,
            preemptions_total=roster.num_preemptions,
            cached_tokens_total=roster.num_cached_tokens,
            offloaded_blocks_total=kv_cache.store.num_offloaded,
            loaded_blocks_total=kv_cache.store.num_loaded,
            late_events_total=self._scheduler.num_late_rows + self._num_late_cancels,
            stalls_total=self._watchdog.stalls_total,
            controller=self._controller.state(),
        )

    def close(self) -> None:
        """Give up the execution; nothing can be computed afterwards."""
        self._execution.close()
        if self._grammars is not None:
            self._grammars.close()

    def check(self) -> None:
        """Every living sequence is either waiting or running, and all books agree."""
        self._scheduler.check()
        num_living = sum(len(choices) for choices in self._living.values())
        assert num_living == self._roster.num_running + self._roster.num_waiting
        assert all(self._living.values()), "a request without living sequences is kept"

    def _validate(self, request: GenerationRequest) -> None:
        request.validate(self._limits.vocab_size, self._limits.max_model_len)
        max_tokens = request.sampling.max_tokens
        for tokens in request.resumed:
            if len(tokens) > max_tokens or not all(
                0 <= token_id < self._limits.vocab_size for token_id in tokens
            ):
                raise InvalidRequest(
                    f"Resumed tokens must lie in [0, {self._limits.vocab_size}) and be at most "
                    f"{max_tokens} (max_tokens).",
                    param="resumed",
                )
        longest = max(len(prompt) for prompt in request.prompts) + max_tokens
        if not self._kv_cache.can_ever_fit(longest):
            slots = self._settings.num_blocks * self._settings.block_size
            raise InvalidRequest(
                f"One choice can come to {longest} tokens with its prompt; the KV cache here "
                f"holds {slots}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._check_grammar(request)

    def _check_grammar(self, request: GenerationRequest) -> None:
        grammar = request.sampling.grammar
        if grammar is None:
            return
        if self._grammars is None:
            raise InvalidRequest(
                "This replica follows no grammar; ask for plain text.",
                param="response_format",
                code="unsupported_parameter",
            )
        self._grammars.check_blocking(grammar)

    def _start(self, work: SchedulerOutput) -> None:
        if work.is_empty:
            return
        self._in_flight = work
        self._started_at = self._monotonic()
        self._watchdog.step_started(self._started_at)
        self._execution.start(work)

    def _finish(self) -> list[SequenceUpdate]:
        work = self._in_flight
        return [] if work is None else self._update(work, self._await(work))

    def _await(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """The result of the step in flight, and what it teaches about time."""
        result = self._execution.finish()
        now = self._monotonic()
        self._in_flight = None
        self._num_steps += 1
        self._watchdog.step_finished(now, computed=work.num_rows > 0)
        self._controller.observe(StepShape.of(work), now - self._started_at - result.moves_s)
        self._kv_cache.store.recompute_s_per_token = self._step_times.seconds_per_prefill_token(0.0)
        if work.moves and all(move.kind is not MoveKind.COPY for move in work.moves):
            self._kv_cache.store.swap_cost.observe_moves(len(work.moves), result.moves_s)
        return result

    def _update(self, work: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceUpdate]:
        now = self._monotonic()
        updates = self._scheduler.update(
            work, result.token_ids, result.errors, now, result.logprobs
        )
        for update in updates:
            if update.end is not None:
                self._forget(update.request_id, update.choice)
        return updates

    def _end_overdue(self) -> None:
        now = self._monotonic()
        self._watchdog.waiting(now, self._roster.num_running + self._roster.num_waiting)
        for sequence in self._deadlines.take_overdue(now):
            self._end(sequence, SequenceEnd.DEADLINE)

    def _end(self, sequence: Sequence, end: SequenceEnd, *, is_complete: bool = False) -> None:
        spec, num_free = sequence.spec, self._kv_cache.num_free_blocks
        self._roster.remove(sequence, end, is_complete=is_complete)
        self._forget(spec.request_id, spec.choice)
        freed = self._kv_cache.num_free_blocks - num_free
        report = sequence.ended(end)._replace(step=self._num_steps, blocks_freed=freed)
        self._ended.append(report)

    def _forget(self, request_id: str, choice: int) -> None:
        choices = self._living[request_id]
        del choices[choice]
        if not choices:
            del self._living[request_id]
        if not self._living:
            # No step may come after this one to say so.
            self._watchdog.waiting(self._monotonic(), 0)
        self._deadlines.sweep(self._roster.num_running + self._roster.num_waiting)

    def _is_living(self, sequence: Sequence) -> bool:
        choices = self._living.get(sequence.spec.request_id, {})
        return choices.get(sequence.spec.choice) is sequence

    def _take_ended(self) -> list[SequenceUpdate]:
        ended, self._ended = self._ended, []
        return ended
