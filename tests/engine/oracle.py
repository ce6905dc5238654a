"""Hugging Face transformers as the oracle for numbers, on any model folder."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.from_folder import engine_from_folder
from tests.engine.orders import Transcript, greedy, order, run_to_end

Prompts = list[tuple[int, ...]]


def write_tiny_llama(folder: Path, *, seed: int = 0, tied: bool = True, bias: bool = False) -> None:
    """A random Llama with grouped queries, as transformers itself would save it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        attention_bias=bias,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)


def oracle_words(folder: Path, prompts: Prompts, max_tokens: int) -> list[list[int]]:
    """Greedy float32 output of transformers, one prompt at a time, end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        out = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        words.append(out[0, len(prompt) :].tolist())
    return words


def engine_words_alone(folder: Path, prompts: Prompts, max_tokens: int) -> list[list[int]]:
    """What the engine says in float32 when each prompt runs by itself."""
    engine = small_engine(folder)
    words = []
    for i, prompt in enumerate(prompts):
        engine.add(order(str(i), prompt, greedy(max_tokens)))
        words.append(run_to_end(engine).token_ids[str(i), 0])
    return words


def engine_words_together(
    folder: Path, prompts: Prompts, max_tokens: int, join_at: list[int]
) -> list[list[int]]:
    """What the engine says in float32 when prompt i joins before step join_at[i]."""
    engine = small_engine(folder)
    transcript = Transcript()
    for step in range(max(join_at) + 1):
        for i, prompt in enumerate(prompts):
            if join_at[i] == step:
                engine.add(order(str(i), prompt, greedy(max_tokens)))
        transcript.note(engine.step())
        engine.check()
    run_to_end(engine, transcript)
    return [transcript.token_ids[str(i), 0] for i in range(len(prompts))]


def small_engine(folder: Path) -> Engine:
    """Chunks of 16 tokens, so that most prompts take several steps."""
    settings = EngineSettings(
        num_blocks=256, max_num_batched_tokens=40, chunk_size=16, max_num_seqs=20
    )
    return engine_from_folder(folder, settings, dtype="float32")
