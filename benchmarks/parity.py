"""The same weights say the same words as in transformers, and as many ranks as you like do too.

Two hundred greedy prompts in float32: raw texts, and conversations with and without a system
message, with several turns, and with an answer that is to go on. The prompts' own tokens are
compared first. The engine runs all prompts together, joining at random times in small chunks.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.first_differences import Difference, first_differences
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.from_folder import engine_from_folder
from engine.interface.chat_options import ChatOptions
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.models.loader import load_decoder
from engine.ranked_engine import ranked_engine
from engine.text.prompt_encoder import ChatMessage, PromptEncoder
from engine.text.template_process import TemplateRenderer
from engine.text.tokenizer import Tokenizer

MAX_TOKENS = 24
SETTINGS = EngineSettings(
    num_blocks=1024, max_num_batched_tokens=96, chunk_size=48, max_num_seqs=16, max_waiting=512
)

TOPICS = (
    "the tides", "a cup of coffee", "bridges", "the moon", "bread", "glaciers", "chess",
    "honey bees", "the number seven", "volcanoes", "a good night's sleep", "printing",
    "rivers", "the colour blue", "bicycles", "salt", "the Silk Road", "maple trees",
    "clocks", "penguins", "a Python list", "the north wind", "stairs", "olive oil", "kites",
)  # fmt: skip
OPENINGS = (
    "The first thing that one should know about {} is",
    "Once upon a time, a child asked her grandmother about {}. The old woman said:",
    'def describe():\n    """Say something about {}."""\n    return "',
    "| subject | {} |\n|---|---|\n| why it matters |",
)

Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How two hundred outputs compare: with transformers, or of several ranks with one."""

    against: str
    num_prompts: int
    num_tokens: int
    num_other_prompts: int
    differences: list[Difference]

    @property
    def is_met(self) -> bool:
        """Every prompt was written down alike, and every difference is a tie."""
        return not self.num_other_prompts and all(found.is_tie for found in self.differences)

    def table(self) -> str:
        """The comparison in words."""
        lines = [
            f"{self.num_prompts} prompts, {self.num_tokens} tokens, float32, against "
            f"{self.against}: {self.num_other_prompts} prompts encoded otherwise, "
            f"{len(self.differences)} outputs differ",
            *(f"  {found}" for found in self.differences),
            f"  bar: no difference but shown logit ties: {'met' if self.is_met else 'MISSED'}",
        ]
        return "\n".join(lines)


def measure(
    folder: Path, num_ranks: int, topics: Sequence[str] = TOPICS, max_tokens: int = MAX_TOKENS
) -> Parity:
    """Against transformers with one rank, otherwise against one rank. A topic is eight prompts."""
    chats = [chat for topic in topics for chat in _chats(topic)]
    texts = [opening.format(topic) for topic in topics for opening in OPENINGS]
    prompts = [*_encoded_texts(folder, texts), *asyncio.run(_encoded_chats(folder, chats))]
    if num_ranks > 1:
        expected = _engine_words(
            engine_from_folder(folder, SETTINGS, dtype="float32"), prompts, max_tokens
        )
        said = _engine_words(
            ranked_engine(folder, SETTINGS, num_ranks, dtype="float32"), prompts, max_tokens
        )
        num_other = 0
        against = f"one rank, by {num_ranks} ranks"
    else:
        theirs = _transformers_prompts(folder, texts, chats)
        num_other = sum(one != other for one, other in zip(prompts, theirs, strict=True))
        expected = _transformers_words(folder, prompts, max_tokens)
        said = _engine_words(
            engine_from_folder(folder, SETTINGS, dtype="float32"), prompts, max_tokens
        )
        against = "transformers"
    decoder = load_decoder(folder, "float32")
    return Parity(
        against,
        len(prompts),
        sum(map(len, expected.values())),
        num_other,
        first_differences(decoder, prompts, expected, said),
    )


def main(folder: Path, num_ranks: int) -> None:
    """Print the comparison; the exit status says whether the bar was met."""
    parity = measure(folder, num_ranks)
    sys.stdout.write(parity.table() + "\n")
    if not parity.is_met:
        raise SystemExit(1)


def _chats(topic: str) -> list[Chat]:
    """Four kinds of conversations; one that ends with the assistant's words is to go on."""
    question = {"role": "user", "content": f"Tell me something about {topic}."}
    rule = {"role": "system", "content": "You answer in one short sentence."}
    answer = {"role": "assistant", "content": f"What would you like to know about {topic}?"}
    more = {"role": "user", "content": "Why do people care?"}
    begun = {"role": "assistant", "content": f"Well, {topic}"}
    return [[question], [rule, question], [question, answer, more], [rule, question, begun]]


def _is_to_go_on(chat: Chat) -> bool:
    return chat[-1]["role"] == "assistant"


def _encoded_texts(folder: Path, texts: list[str]) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_folder(folder)
    return [tuple(tokenizer.encode_prompt(text, add_special_tokens=True)) for text in texts]


async def _encoded_chats(folder: Path, chats: list[Chat]) -> list[tuple[int, ...]]:
    renderer = TemplateRenderer()
    renderer.start()
    try:
        encoder = PromptEncoder(Tokenizer.from_folder(folder), renderer, 2048)
        now = datetime(2026, 1, 1)
        encoded = []
        for chat in chats:
            goes_on = _is_to_go_on(chat)
            options = ChatOptions(not goes_on, goes_on)
            messages = [ChatMessage(one["role"], one["content"]) for one in chat]
            encoded.append(tuple(await encoder.encode_chat(messages, now, options)))
        return encoded
    finally:
        renderer.close()


def _transformers_prompts(
    folder: Path, texts: list[str], chats: list[Chat]
) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    for chat in chats:
        goes_on = _is_to_go_on(chat)
        ids = tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            return_dict=False,
        )
        prompts.append(tuple(ids))
    return prompts


def _transformers_words(
    folder: Path, prompts: list[tuple[int, ...]], max_tokens: int
) -> dict[int, list[int]]:
    """One prompt at a time, end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = {}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        words[number] = out[0, len(prompt) :].tolist()
    return words


def _engine_words(
    engine: Engine, prompts: list[tuple[int, ...]], max_tokens: int
) -> Mapping[int, list[int]]:
    """All prompts in one engine, joining at random times, end tokens included."""
    random = Random(1)
    words: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    waiting = list(enumerate(prompts))
    try:
        while waiting or engine.has_work:
            for number, prompt in waiting[: random.randint(0, 3)]:
                engine.add(_request(number, prompt, max_tokens))
                waiting.pop(0)
            for update in engine.step():
                words[int(update.request_id)] += update.token_ids
    finally:
        engine.close()
    return words


def _request(number: int, prompt: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompts=(prompt,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )
