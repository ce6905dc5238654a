"""A model folder is what its manifest says, to the byte, or it is not ready."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from control.registry.manifest import (
    ManifestError,
    short_digest,
    verify_manifest,
    verify_text_files,
    write_manifest,
)

FILES = {
    "model-00001-of-00002.safetensors": b"w" * 1000,
    "model-00002-of-00002.safetensors": b"v" * 1000,
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
TEXT_FILES = [name for name in FILES if not name.endswith(".safetensors")]
VERIFIERS = [verify_manifest, verify_text_files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def test_an_untouched_folder_verifies_to_the_digest_it_was_given(folder: Path) -> None:
    digest = verify_manifest(folder)
    assert digest == write_manifest(folder) == verify_text_files(folder)
    assert digest == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert digest.startswith(short_digest(digest))
    assert len(short_digest(digest)) == 12


def test_the_digest_depends_on_the_content_not_on_the_manifests_layout(folder: Path) -> None:
    digest = verify_manifest(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=4))
    assert verify_manifest(folder) == digest


def test_another_revision_has_another_digest(folder: Path) -> None:
    digest = verify_manifest(folder)
    (folder / "tokenizer.json").write_bytes(b'{"model": []}')
    assert write_manifest(folder) != digest


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ManifestError, match=f"{name} was changed"):
        verify_manifest(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_found(name: str, folder: Path) -> None:
    (folder / name).write_bytes(FILES[name][:-1])
    with pytest.raises(ManifestError, match=f"{name} has {len(FILES[name]) - 1} bytes"):
        verify_manifest(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ManifestError, match=f"{name} is in the manifest but missing"):
        verify_manifest(folder)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "special_tokens_map.json"])
def test_an_extra_file_is_found(name: str, verify: Callable[[Path], str], folder: Path) -> None:
    (folder / name).write_bytes(b"{}")
    with pytest.raises(ManifestError, match=f"{name} is not in the manifest"):
        verify(folder)


@pytest.mark.parametrize("verify", [*VERIFIERS, write_manifest])
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".pickle", ".py", ".PT", ".Py"])
def test_files_that_could_run_code_are_refused(
    suffix: str, verify: Callable[[Path], str], folder: Path
) -> None:
    (folder / f"pytorch_model{suffix}").write_bytes(b"")
    with pytest.raises(ManifestError, match=f"pytorch_model{suffix} could run code"):
        verify(folder)


@pytest.mark.parametrize("verify", [*VERIFIERS, write_manifest])
@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_a_link_is_refused_even_to_the_same_bytes(
    name: str, verify: Callable[[Path], str], folder: Path
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(FILES[name])
    (folder / name).unlink()
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ManifestError, match=f"{name} is a link"):
        verify(folder)
    elsewhere.unlink()


@pytest.mark.parametrize("verify", [*VERIFIERS, write_manifest])
def test_folders_and_pipes_are_refused(verify: Callable[[Path], str], folder: Path) -> None:
    (folder / "sub").mkdir()
    with pytest.raises(ManifestError, match="sub is not an ordinary file"):
        verify(folder)
    (folder / "sub").rmdir()
    os.mkfifo(folder / "pipe")
    with pytest.raises(ManifestError, match="pipe is not an ordinary file"):
        verify(folder)


def test_the_light_check_needs_no_weights_but_every_text_file(folder: Path) -> None:
    digest = verify_manifest(folder)
    for name in set(FILES) - set(TEXT_FILES):
        (folder / name).unlink()
    assert verify_text_files(folder) == digest
    for name in TEXT_FILES:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(ManifestError, match=f"{name} was changed"):
            verify_text_files(folder)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "files": {}}',
        '{"version": 1}',
        '{"version": 1, "files": {"../config.json": {"size": 2, "sha256": "%s"}}}' % ("0" * 64),
        '{"version": 1, "files": {"config.json": {"size": "2", "sha256": "%s"}}}' % ("0" * 64),
        '{"version": 1, "files": {"config.json": {"size": 2, "sha256": "short"}}}',
        '{"version": 1, "files": {"config.json": null}}',
    ],
)
def test_a_malformed_manifest_is_refused_by_name(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        verify_manifest(folder)


def test_a_folder_without_manifest_or_weights_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"manifest\.json cannot be read"):
        verify_manifest(folder)
    for name in set(FILES) - set(TEXT_FILES):
        (folder / name).unlink()
    with pytest.raises(ManifestError, match=r"holds no \.safetensors"):
        write_manifest(folder)
    with pytest.raises(ManifestError, match="cannot be listed"):
        write_manifest(folder / "nowhere")


def test_verification_needs_no_asserts_and_no_torch(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"[]")
    program = """
import sys
from collections.abc import Callable
from pathlib import Path
from control.registry.manifest import ManifestError, verify_manifest
try:
    verify_manifest(Path(sys.argv[1]))
except ManifestError:
    print("refused", "torch" in sys.modules)
"""
    command = [sys.executable, "-O", "-c", program, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "refused False\n"
