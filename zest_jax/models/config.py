"""The shape of a decoder-only policy, in the field's own words."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Everything that fixes a Qwen-style decoder's parameters and arithmetic.

    Qwen2/Qwen2.5 are `qkv_bias=True, qk_norm=False`; Qwen3 is `qkv_bias=False, qk_norm=True`;
    Llama-shaped models have neither.

    Attributes:
      vocab_size: rows of the embedding, V.
      width: residual width, D.
      layers: number of blocks.
      heads: query heads, H.
      kv_heads: key/value heads, J; H is a multiple of J (grouped-query attention).
      head_dim: size of a head, K (apart from D / H in Qwen3).
      mlp_width: hidden width of the SwiGLU feed-forward, F.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMS norm.
      qkv_bias: biases on the query, key and value projections.
      qk_norm: RMS norm over each head of query and key, before the rotation.
      tied: the head is the transposed embedding.
      max_length: the longest position the checkpoint was made for.
      dtype: compute type; parameters stay float32 (at learning rates near 1e-6 an update would be
        lost in bfloat16).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = True
    tied: bool = True
    max_length: int = 4096
    dtype: str = "float32"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary embedding")
