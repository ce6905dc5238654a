"""Any schedule, for as long as one likes: `python -m tests.engine.any_schedule_long --minutes 30`.

Every seed is a schedule. The first one that goes wrong is shortened and printed, to be played
again by `play(sizes, moves)`; its seed belongs into FAILED_SEEDS of test_any_schedule.py.
"""

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.engine.random_schedules import play, random_schedule, shortened


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9 * 1000)
    options = parser.parse_args()
    stop_at = time.monotonic() + 60 * options.minutes
    tally: Counter[str] = Counter()
    seed = options.seed
    print(f"from seed {seed}", flush=True)
    while time.monotonic() < stop_at:
        sizes, moves = random_schedule(seed)
        try:
            tally.update(play(sizes, moves))
        except Exception:  # noqa: BLE001 whatever it is, it is told and ends the run
            traceback.print_exc()
            print(f"\nFAILED SEED {seed}")
            sizes, moves = shortened(sizes, moves)
            print(sizes, *moves, sep="\n")
            return 1
        tally["schedules"] += 1
        seed += 1
    print(*(f"{count:>12,} {name}" for name, count in sorted(tally.items())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
