"""Validity is no matter of speed, so its bar holds everywhere."""

from pathlib import Path

import pytest

from benchmarks.structured_output import main
from tests.engine.grammar.small_model import write_small_model


def test_whatever_ends_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_model(tmp_path)
    main(tmp_path, num_schemas=4, max_tokens=40)
    said = capsys.readouterr().out
    assert "4 outputs" in said
    assert "finished and not valid: 0" in said
