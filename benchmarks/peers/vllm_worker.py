"""vLLM as an offline worker: python -m benchmarks.peers.vllm_worker FOLDER.

Runs in a venv of its own. The dtype is bfloat16; a folder with quantised weights says so itself.
"""

import sys

from benchmarks.offline_work import Generate, Prompts
from benchmarks.offline_worker import serve_works


def main(folder: str) -> None:
    """Serve until stdin ends."""

    def load() -> Generate:
        import vllm  # type: ignore[import-not-found]  # noqa: PLC0415 - in the peer's own venv

        engine = vllm.LLM(
            model=folder,
            dtype="bfloat16",
            max_model_len=2_048,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

        def generate(prompts: Prompts, output: int) -> list[list[int]]:
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
            )
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            answers = engine.generate(requests, sampling, use_tqdm=False)
            return [list(answer.outputs[0].token_ids) for answer in answers]

        return generate

    serve_works(load)


if __name__ == "__main__":
    main(sys.argv[1])
