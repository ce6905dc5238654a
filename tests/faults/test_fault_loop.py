"""The short form of the fault loop; `make test-faults` is the long one."""

import asyncio
import tempfile
from pathlib import Path

from tests.faults.chaos import Blow
from tests.faults.loop import run, running_service

SEED = 5
ORDER = [
    Blow("admission.after_hold", 2),
    Blow("flush Valkey"),
    Blow("settle.after_commit", 2),
    Blow("restart PostgreSQL"),
    Blow("kill gateway"),
    Blow("publish.after_step", 2),
]


def test_whatever_dies_every_request_has_one_ending_and_one_bill() -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        # PostgreSQL may be a user of its own, who must pass.
        Path(folder).chmod(0o711)
        with running_service(Path(folder), expire_after_s=1.0) as service:
            report = asyncio.run(run(service, SEED, 100, ORDER, pause_s=0.3))
    assert report.wrong == []
    assert sum(report.dealt.values()) == len(ORDER), report.missed
    assert report.num_accepted >= 50
