from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SequenceSpec
from tests.engine.steps import Row, spec, step

EOS = 2
LIMITS = ModelLimits(vocab_size=1000, max_model_len=500, eos_token_ids=frozenset({EOS, 3}))
TABLE = (5, 0, 9, 3, 8, 1)


def say(prompt: list[int], count: int, *, a_spec: SequenceSpec | None = None) -> list[int]:
    """What the runner says in `count` steps, its prompt given in chunks of 3."""
    runner = ScriptedRunner(LIMITS, 20, 4)
    a_spec = a_spec or spec(num_prompt_tokens=len(prompt))
    context, start = list(prompt), 0
    while len(context) < len(prompt) + count:
        chunk = context[start : start + 3]
        is_sampled = start + len(chunk) == len(context)
        output = runner.execute(step(Row(a_spec, chunk, start, TABLE, is_sampled)))
        start += len(chunk)
        assert not output.errors
        context += [token_id for token_id in output.token_ids.tolist() if token_id >= 0]
    return context[len(prompt) :]


def test_it_says_its_prompt_back_and_then_its_end_again_and_again() -> None:
    assert say([11, 12, 13], 6) == [11, 12, 13, EOS, EOS, EOS]
    assert say(list(range(100, 110)), 11) == [*range(100, 110), EOS]
    assert say([11], 3) == [11, EOS, EOS]


def test_it_goes_on_after_resumed_tokens() -> None:
    resumed = spec(num_prompt_tokens=3, sampling=SamplingParams(max_tokens=9))
    assert say([11, 12, 13, 11, 12], 2, a_spec=resumed) == [13, EOS]


def test_a_wrong_table_is_a_wrong_word_and_an_unwritten_one_an_error() -> None:
    runner = ScriptedRunner(LIMITS, 4, 4)
    runner.execute(step(Row(spec("a", 4), (11, 12, 13, 14), 0, (1,))))
    runner.execute(step(Row(spec("b", 4), (21, 22, 23, 24), 0, (2,))))
    wrong = Row(spec("a", 4), (11,), 4, (2, 3))
    unwritten = Row(spec("b", 4), (21,), 4, (3, 0))
    assert runner.execute(step(wrong)).token_ids.tolist() == [22]
    runner = ScriptedRunner(LIMITS, 4, 4)
    output = runner.execute(step(unwritten))
    assert output.token_ids.tolist() == [-1]
    assert list(output.errors) == [0]


def test_each_step_takes_the_given_time() -> None:
    slept: list[float] = []
    runner = ScriptedRunner(LIMITS, 4, 4, delay_ms=25.0, sleep=slept.append)
    for start in range(3):
        runner.execute(step(Row(spec(), (7,), start, (0,))))
    assert slept == [0.025] * 3
