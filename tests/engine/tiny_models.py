"""Tiny random models of every family, written by transformers itself, and its logits.

Norms and biases are random too: left at one and zero, they would hide a forgotten one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB, MAX_POSITIONS, WINDOW = 96, 160, 24

_SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

Make = Callable[..., PreTrainedConfig]

# Name -> how transformers calls it, and what is special about it.
TINY_MODELS: Mapping[str, tuple[Make, dict[str, object]]] = {
    "llama 2": (LlamaConfig, {"rms_norm_eps": 1e-5}),
    "llama 3": (LlamaConfig, {"rope_parameters": _LLAMA_3, "tie_word_embeddings": True}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama with odd heads": (
        LlamaConfig,
        {
            "hidden_size": 63,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 14,
        },
    ),
    "llama, linear rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}},
    ),
    "llama, dynamic rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5000.0}},
    ),
    "llama, yarn": (LlamaConfig, {"rope_parameters": _YARN}),
    "llama, yarn to the letter": (
        LlamaConfig,
        {
            "rope_parameters": {
                **_YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.9,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "mistral without window": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen 2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen 2 with windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen 3": (Qwen3Config, {"head_dim": 10, "rope_parameters": _YARN}),
    "qwen 3 with windows": (
        Qwen3Config,
        {
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "smollm 3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
    "smollm 3 with windows": (
        SmolLM3Config,
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "gemma 2": (
        Gemma2Config,
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma 3": (
        Gemma3TextConfig,
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
}


def write_tiny_model(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> PreTrainedModel:
    """Save one of TINY_MODELS as transformers does, and return transformers' model."""
    torch.manual_seed(sum(map(ord, name)))
    make, special = TINY_MODELS[name]
    config = make(**{**_SIZES, **special})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
