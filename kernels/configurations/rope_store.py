"""RoPE and store of Llama 3 8B, of Qwen3 with its norms, and into an e4m3 cache from 90 on."""

from collections.abc import Iterator

from kernels.configuration import Configuration
from kernels.rope_store import blocks, rope_store_kernel

_HOPPER = 90


def configurations(capability: int) -> Iterator[Configuration]:
    """What is launched on this capability."""
    yield _stored("llama", 32, 8, 128)
    yield _stored("smol", 9, 3, 64)
    yield _stored("qwen3, norms", 32, 8, 128, has_norm=True)
    if capability >= _HOPPER:
        yield _stored("llama, e4m3", 32, 8, 128, cached="fp8e4nv")


def _stored(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    cached: str = "bf16",
    has_norm: bool = False,
) -> Configuration:
    block_half, block_heads = blocks(num_heads + 2 * num_kv_heads, head_dim)
    types = dict.fromkeys(("qkv", "cos", "sin", "query_weight", "key_weight", "query"), "*bf16")
    types |= dict.fromkeys(("positions", "slots"), "*i64")
    types |= {"cache": f"*{cached}", "qkv_stride": "i32:16", "num_slots": "i32:16"}
    types |= dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32")
    constants = {
        "has_rope": True,
        "has_norm": has_norm,
        "is_e4m3": cached != "bf16",
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "half": head_dim // 2,
        "block_heads": block_heads,
        "block_half": block_half,
    }
    return Configuration(f"rope_store {name}", rope_store_kernel, types, constants)
