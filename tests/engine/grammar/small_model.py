"""A tiny random Llama whose tokens are bytes, letters and a few pieces of words."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import LEGACY_SPACE, definition, write_folder


def write_small_model(folder: Path, template: str | None = None) -> None:
    """Everything that a model folder holds, the chat template at will."""
    write_folder(folder, definition(LEGACY_SPACE), template)
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
