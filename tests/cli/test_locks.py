"""The locks: exact versions, hashes for everything whose build is the same everywhere, and not a
word about the machine they were made on."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
HASHED = ("run.txt", "dev.txt", "openai-oldest.txt")
DIFFERS_BY_MACHINE = {"torch", "triton"}


def pinned(lock: str) -> dict[str, list[str]]:
    """Each requirement of a lock with its hashes."""
    text = (REQUIREMENTS / lock).read_text().replace("\\\n", " ")
    lines = [line.split("#", maxsplit=1)[0].strip() for line in text.splitlines()]
    words = [line.split() for line in lines if line]
    return {first: rest for first, *rest in words}


@pytest.mark.parametrize("lock", HASHED)
def test_every_requirement_has_an_exact_version_and_hashes(lock: str) -> None:
    requirements = pinned(lock)

    assert requirements
    for requirement, hashes in requirements.items():
        assert re.fullmatch(r"[a-z0-9._-]+==[0-9][^*\s]*", requirement)
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)


def test_only_packages_whose_builds_differ_by_machine_have_no_hashes() -> None:
    assert pinned("torch.txt") == {"torch==2.13.0": [], "triton==3.7.1": []}
    for lock in HASHED:
        names = {requirement.partition("==")[0] for requirement in pinned(lock)}
        assert not names & DIFFERS_BY_MACHINE
        assert not any(name.startswith(("nvidia-", "cuda-")) for name in names)


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.iterdir()), ids=lambda file: file.name)
def test_no_requirements_file_names_an_index_or_a_place_on_a_machine(file: Path) -> None:
    text = file.read_text()

    assert "://" not in text
    assert "find-links" not in text
    assert "index-url" not in text
    assert not re.search(r"(^|\s)/[a-z]", text)


def test_both_locks_agree_where_they_overlap() -> None:
    run, dev = (
        dict(requirement.split("==") for requirement in pinned(lock))
        for lock in ("run.txt", "dev.txt")
    )

    assert {name: run[name] for name in run.keys() & dev.keys()} == {
        name: dev[name] for name in run.keys() & dev.keys()
    }


def test_everything_asked_for_is_locked() -> None:
    for source, lock in (("run.in", "run.txt"), ("dev.in", "dev.txt")):
        lines = (REQUIREMENTS / source).read_text().splitlines()
        asked = [re.match(r"[A-Za-z0-9._-]+", line) for line in lines if not line.startswith("-")]
        names = {match.group().lower() for match in asked if match is not None}
        locked = {requirement.partition("==")[0] for requirement in pinned(lock)}
        assert names - locked <= DIFFERS_BY_MACHINE
