from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.grammar.grammar_compiler import GrammarCompiler
from engine.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.small_model import write_small_model


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are bytes, letters and a few pieces of words."""
    folder = tmp_path_factory.mktemp("small")
    write_small_model(folder)
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(small_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(small_folder)


@pytest.fixture(scope="session")
def small_vocabulary(small_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(small_tokenizer)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_model_folder)


@pytest.fixture(scope="session")
def demo_vocabulary(demo_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(demo_tokenizer)


@pytest.fixture(scope="session")
def compiler(small_folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(small_folder)
    yield compiler
    compiler.close()
