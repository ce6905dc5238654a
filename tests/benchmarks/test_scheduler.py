"""The scheduler's benchmark measures a steady load."""

from dataclasses import replace

from benchmarks.scheduler import SETTINGS, measure


def test_the_measured_load_is_steady() -> None:
    settings = replace(
        SETTINGS, num_blocks=1_024, num_host_blocks=64, max_num_seqs=8, max_num_batched_tokens=256
    )
    costs = measure(settings, num_waiting=32, num_warm_up=100, num_steps=300)
    assert len(costs.wall_ms) == len(costs.thread_ms) == 300
    assert min(costs.wall_ms) > 0.0
    assert costs.mean_running > 7.0
    assert costs.num_ended > 0
    assert "p99" in costs.table()
