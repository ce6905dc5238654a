"""The demo model's tokenizer, ours and the reference's."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import transformers

from engine.text.template_process import TemplateRenderer
from engine.text.tokenizer import Tokenizer

NOW = datetime(2026, 3, 9, 12, 30, tzinfo=UTC)


@pytest.fixture(scope="session")
def tokenizer(demo_model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_model_folder)


@pytest.fixture(scope="session")
def reference(demo_model_folder: Path) -> transformers.PreTrainedTokenizerFast:
    loaded = transformers.AutoTokenizer.from_pretrained(demo_model_folder)
    assert isinstance(loaded, transformers.PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    renderer.start()
    yield renderer
    renderer.close()
