"""Published shapes of real models, from their config.json; the weights are random."""

from zest_jax.models import PolicyConfig

QWEN2 = {"rope_theta": 1e6, "qkv_bias": True, "qk_norm": False, "max_length": 32_768}
QWEN3 = {"rope_theta": 1e6, "head_dim": 128, "kv_heads": 8, "max_length": 40_960}

POLICIES: dict[str, PolicyConfig] = {
    # For trying a benchmark out on a CPU.
    "tiny": PolicyConfig(1024, 128, 2, 4, 2, 32, 256, dtype="float32"),
    "qwen2.5-0.5b": PolicyConfig(151_936, 896, 24, 14, 2, 64, 4864, dtype="bfloat16", **QWEN2),
    "qwen2.5-1.5b": PolicyConfig(151_936, 1536, 28, 12, 2, 128, 8960, dtype="bfloat16", **QWEN2),
    "qwen2.5-3b": PolicyConfig(151_936, 2048, 36, 16, 2, 128, 11_008, dtype="bfloat16", **QWEN2),
    "qwen2.5-7b": PolicyConfig(
        152_064, 3584, 28, 28, 4, 128, 18_944, tied=False, dtype="bfloat16", **QWEN2
    ),
    "qwen3-0.6b": PolicyConfig(151_936, 1024, 28, 16, mlp_width=3072, dtype="bfloat16", **QWEN3),
    "qwen3-1.7b": PolicyConfig(151_936, 2048, 28, 16, mlp_width=6144, dtype="bfloat16", **QWEN3),
}
