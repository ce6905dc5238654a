"""OpenVINO GenAI's continuous batching as the works use it. Runs in a venv of its own.

Two threads, one stream, the KV cache in the weights' precision: the fastest that we found on
two cores. The weights' own format (fp16, int8) is chosen when the model is exported.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import openvino  # type: ignore[import-not-found]  # installed in the peer's own venv
import openvino_genai  # type: ignore[import-not-found]  # installed in the peer's own venv

from benchmarks.offline_work import Prompts

NUM_THREADS = 2


class OpenVinoEngine:
    """A pipeline that takes token ids and gives token ids. `kv` is "bf16" or "u8"."""

    def __init__(self, folder: str, kv: str, *, has_prefix_cache: bool) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = 2_048
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = has_prefix_cache
        properties = {
            "INFERENCE_NUM_THREADS": NUM_THREADS,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": kv,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", properties
        )
        self._numbers = itertools.count()

    def submit(self, prompt: Sequence[int], output: int) -> object:
        """Queue a prompt for just so many greedy tokens; returns its handle."""
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.min_new_tokens = config.max_new_tokens = output
        config.apply_chat_template = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self.pipeline.add_request(next(self._numbers), ids, config)

    def generate(self, prompts: Prompts, output: int) -> list[list[int]]:
        """See `offline_work.Generate`."""
        handles = [self.submit(prompt, output) for prompt in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]  # type: ignore[attr-defined]  # untyped library
