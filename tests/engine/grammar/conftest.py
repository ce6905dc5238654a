from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.grammar.grammar_compiler import GrammarCompiler
from engine.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import LEGACY_SPACE, definition, write_folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are bytes, letters and a few pieces of words."""
    folder = tmp_path_factory.mktemp("small")
    write_folder(folder, definition(LEGACY_SPACE))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=Tokenizer.from_folder(folder).vocab_size,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
