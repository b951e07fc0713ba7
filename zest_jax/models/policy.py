"""The policy: one decoder for training, scoring and decoding, so that they cannot drift apart.

`Block` holds the arithmetic of a layer once. Training and scoring run the stacked blocks under
`lax.scan` (`Policy.__call__`); decoding runs the same blocks unrolled over a cache (`extend`), with
the layer weights sliced once outside the loop (`unstack`), since a loop that slices stacked weights
copies them at every step.

The residual stream is float32 whatever the compute type: in bfloat16 every layer's sum would be
rounded, which moved the log-probabilities of a 1.5B model twice as far from float32's and was no
faster (docs/performance.md). What the matrix products take is rounded by the norms before them.

Parameters live in a plain nested dict of float32 arrays (what is checkpointed, sharded by name and
updated); `bind` puts such a dict back into the NNX module, inside or outside of jit.

Shape letters: B batch, L length, D width, H query heads, J key/value heads, K head
size, F feed-forward width, V vocabulary, S slots, C chunk, A rank of an adapter, N flat tokens,
X and Y what a matrix contracts and makes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zest_jax.models.add_norm import add_and_norm
from zest_jax.models.attention import MOST_SEGMENTS, attention
from zest_jax.models.attention_cache import HeadRule, decode_attention
from zest_jax.models.attention_splash import RESIDUAL_NAME
from zest_jax.models.attention_tiles import Tiles
from zest_jax.models.cache import Cache, Layer, cached_attention, tiled_attention
from zest_jax.models.config import MATRICES, PolicyConfig
from zest_jax.models.rope import rotary, rotate
from zest_jax.parallel.sharding import keep_rows_split, look_up

Params = dict[str, Any]
# A layer's keys and values in, attention's output and whatever the caller wants to keep out.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# Matrices of the same input, and the name of the one that `Block.join` makes of them; then biases
# and norms.
_JOINED = {("q", "k", "v"): "qkv_DX", ("gate", "up"): "gate_up_DX"}
_JOINED_VECTORS = ("qkv_bias_X", "qk_norms_2K")
_UNROLLED = 8  # layers up to which a CPU trains without a loop over them


def _dots_and_attention(primitive: Any, *args: Any, **params: Any) -> Any:
    """Products, and what attention kernels give: dear to make again and small to keep."""
    if primitive.name.startswith("dot_product_attention_fwd"):  # cuDNN's
        return True
    if jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)(primitive, *args, **params):
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


_REMAT = {
    "none": None,
    "dots": _dots_and_attention,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def checkpointed(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The layer, keeping for its backward pass what the remat policy of that name says."""
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=_REMAT[remat], prevent_cse=False)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, back in the type of x."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class Block(nnx.Module):
    """One pre-norm transformer layer: grouped-query attention, then a SwiGLU feed-forward."""

    def __init__(self, config: PolicyConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, H, J, K, F = (
            config.width,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.mlp_width,
        )
        out_scale = 0.02 / (2 * config.layers) ** 0.5  # residual branches start small (GPT-2)

        def normal(shape: tuple[int, ...], scale: float = 0.02) -> nnx.Param:
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.attention_norm_D = nnx.Param(jnp.ones((D,)))
        self.q_DHK = normal((D, H, K))
        self.k_DJK = normal((D, J, K))
        self.v_DJK = normal((D, J, K))
        self.o_HKD = normal((H, K, D), out_scale)
        if config.qkv_bias:
            self.q_bias_HK = nnx.Param(jnp.zeros((H, K)))
            self.k_bias_JK = nnx.Param(jnp.zeros((J, K)))
            self.v_bias_JK = nnx.Param(jnp.zeros((J, K)))
        if config.qk_norm:
            self.q_norm_K = nnx.Param(jnp.ones((K,)))
            self.k_norm_K = nnx.Param(jnp.ones((K,)))
        self.mlp_norm_D = nnx.Param(jnp.ones((D,)))
        self.gate_DF = normal((D, F))
        self.up_DF = normal((D, F))
        self.down_FD = normal((F, D), out_scale)
        if config.lora is not None:  # drawn last, so that the rest does not depend on them
            sizes = {"D": D, "H": H, "J": J, "K": K, "F": F}
            for target in config.lora.targets:
                ins, outs = ([sizes[letter] for letter in axes] for axes in MATRICES[target])
                a_XA = normal((*ins, config.lora.rank), math.prod(ins) ** -0.5)
                b_AY = nnx.Param(jnp.zeros((config.lora.rank, *outs)))  # begins as the base itself
                for name, param in zip(config.lora.names(target), (a_XA, b_AY), strict=True):
                    setattr(self, name, param)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """Applies the layer; `attend` decides what the queries look at (a sequence or a cache).

        Args:
          x_BLD: the residual.
          rope: cosines and sines of every token.
          attend: queries, keys, values -> output, and what to keep.

        Returns:
          The new residual [B, L, D] (float32), and whatever `attend` keeps (a cache, or None).
        """
        c = self.config
        B, L, D = x_BLD.shape
        H, J, K = c.heads, c.kv_heads, c.head_dim
        h_BLD = self._norm(x_BLD, self.attention_norm_D)
        q_NY, k_NY, v_NY = self._project_all(h_BLD, ("q", "k", "v"))
        q_BLHK = q_NY.reshape(B, L, H, K)
        k_BLJK, v_BLJK = k_NY.reshape(B, L, J, K), v_NY.reshape(B, L, J, K)
        if c.qkv_bias:
            q_BLHK += self._cast(self.q_bias_HK)
            k_BLJK += self._cast(self.k_bias_JK)
            v_BLJK += self._cast(self.v_bias_JK)
        if c.qk_norm:
            q_BLHK = rms_norm(q_BLHK, self.q_norm_K[...], c.norm_eps)
            k_BLJK = rms_norm(k_BLJK, self.k_norm_K[...], c.norm_eps)
        out_BLHK, kept = attend(rotate(q_BLHK, *rope), rotate(k_BLJK, *rope), v_BLJK)
        return self._finish(x_BLD, out_BLHK.reshape(B, L, H * K)), kept

    def decode(
        self,
        x_SD: jax.Array,
        added_SD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer: Layer,
        start_S: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Layer]:
        """The same for one token a slot, with the kernels of NVIDIA GPUs.

        Args:
          x_SD: the residual, without
          added_SD: what the layer before adds to it, in the compute type.
          rope: cosines and sines [S, K / 2].
          layer: this layer's cache.
          start_S: tokens of each slot in it.

        Returns:
          The same two of this layer, and the cache with the tokens written.
        """
        c = self.config
        x_SD, h_SD = _add_and_norm(x_SD, added_SD, self.attention_norm_D, c.norm_eps)
        product_SX = jnp.concatenate(self._project_all(h_SD, ("q", "k", "v")), axis=1)
        bias_X, norms_2K = (getattr(self, name, None) for name in _JOINED_VECTORS)
        rule = HeadRule(
            c.heads,
            None if bias_X is None else bias_X[...],
            None if norms_2K is None else norms_2K[...],
            c.norm_eps,
        )
        out_SX, keys, values = decode_attention(
            product_SX, rule, rope, *layer, start_S, interpret=jax.default_backend() == "cpu"
        )
        x_SD, h_SD = _add_and_norm(x_SD, self._project(out_SX, "o"), self.mlp_norm_D, c.norm_eps)
        return x_SD, self._feed(h_SD), (keys, values)

    def join(self) -> None:
        """Lays the weights out for `decode`: what is read together as one array."""
        c = self.config
        if c.lora is None:  # adapters stand beside each matrix of its own
            for targets, name in _JOINED.items():
                parts = [getattr(self, _matrix(target))[...] for target in targets]
                flat = [part.reshape(len(part), -1).astype(c.dtype) for part in parts]
                setattr(self, name, nnx.Param(jnp.concatenate(flat, axis=1)))
        bias, norms = _JOINED_VECTORS
        if c.qkv_bias:
            biases = (self.q_bias_HK, self.k_bias_JK, self.v_bias_JK)
            flat_X = jnp.concatenate([x[...].reshape(-1) for x in biases])
            setattr(self, bias, nnx.Param(flat_X))
        if c.qk_norm:
            setattr(self, norms, nnx.Param(jnp.stack([self.q_norm_K[...], self.k_norm_K[...]])))

    def _finish(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """The residual [..., D] after attention's output [..., H K] and the feed-forward."""
        x = x + self._project(out, "o").reshape(x.shape)
        return x + self._feed(self._norm(x, self.mlp_norm_D)).reshape(x.shape)

    def _feed(self, h: jax.Array) -> jax.Array:
        """The feed-forward's products [N, D] of flat tokens."""
        gate_NF, up_NF = self._project_all(h, ("gate", "up"))
        return self._project(jax.nn.silu(gate_NF) * up_NF, "down")

    def _norm(self, x: jax.Array, scale: nnx.Param) -> jax.Array:
        return rms_norm(x, scale[...], self.config.norm_eps).astype(self.config.dtype)

    def _cast(self, param: nnx.Param) -> jax.Array:
        return param[...].astype(self.config.dtype)

    # Plain matrix products over flat tokens: with the batch axis apart, the gradient of a weight
    # contracts over two axes, which XLA does about twice slower on a CPU.
    def _project(self, x: jax.Array, target: str) -> jax.Array:
        """Products [N, Y] of flat tokens with the matrix of that name."""
        c = self.config
        x_NX = x.reshape(-1, x.shape[-1])
        y_NY = x_NX @ self._cast(getattr(self, _matrix(target))).reshape(x_NX.shape[1], -1)
        if c.lora is None or target not in c.lora.targets:
            return y_NY
        # Never as one matrix W + A B: its gradient would be as large as that of W.
        a, b = (self._cast(getattr(self, name)) for name in c.lora.names(target))
        low_NA = c.lora.scale * (x_NX @ a.reshape(x_NX.shape[1], -1))
        return y_NY + low_NA @ b.reshape(c.lora.rank, -1)

    def _project_all(self, x: jax.Array, targets: tuple[str, ...]) -> list[jax.Array]:
        """`_project` for several matrices of one input, joined where `join` did so."""
        weight = getattr(self, _JOINED[targets], None)
        if weight is None:
            return [self._project(x, target) for target in targets]
        ends = [math.prod(getattr(self, name).shape[1:]) for name in map(_matrix, targets)]
        y_NY = x.reshape(-1, x.shape[-1]) @ self._cast(weight)
        return jnp.split(y_NY, np.cumsum(ends[:-1]), axis=1)


class Policy(nnx.Module):
    """A Qwen-style decoder with its layers stacked along a leading axis."""

    def __init__(self, config: PolicyConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape_VD = (config.vocab_size, config.width)
        self.embed_VD = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape_VD, jnp.float32))

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stacked(rngs)
        self.final_norm_D = nnx.Param(jnp.ones((config.width,)))
        if not config.tied:
            head_DV = jax.random.normal(rngs.params(), shape_VD[::-1], jnp.float32)
            self.head_DV = nnx.Param(0.02 * head_DV)

    def __call__(
        self,
        ids_BL: jax.Array,
        position_BL: jax.Array,
        segment_BL: jax.Array | None = None,
        *,
        most_segments: int = MOST_SEGMENTS,
        remat: str = "none",
    ) -> jax.Array:
        """Hidden states [B, L, D] after the final norm, for training and scoring.

        Args:
          ids_BL: token ids; what stands past a sequence's end is never seen by it (causality), so
            it needs no mask here, only none of its outputs may be used.
          position_BL: position of each token within its own sequence.
          segment_BL: sequence number of each token where rows hold several (packing), else None.
          most_segments: at least the segments of any row; kernels are faster the fewer.
          remat: what the backward pass keeps of a layer: "none" (everything), "dots" (outputs of
            the matrix products and of attention kernels), "full" (only the layer's input).
        """
        x_BLD = self._embed(ids_BL)
        rope = self._rope(position_BL)

        attend = functools.partial(
            self._attend, position_BL, segment_BL, most_segments=most_segments
        )
        block_def, stacked = nnx.split(self.blocks)

        def layer(x_BLD: jax.Array, params: Any) -> tuple[jax.Array, None]:
            x_BLD, kept = nnx.merge(block_def, params)(x_BLD, rope, attend)
            return keep_rows_split(x_BLD), kept

        layer = checkpointed(layer, remat)
        # On a CPU a loop over layers costs copies of what the backward pass keeps, which a shallow
        # policy does without; on accelerators the loop costs nothing and compiles sooner.
        x_BLD, _ = jax.lax.scan(
            layer,
            x_BLD,
            stacked,
            unroll=jax.default_backend() == "cpu" and self.config.layers <= _UNROLLED,
        )
        return self._final(x_BLD)

    def unstack(self) -> list[Block]:
        """The layers as separate modules; call it once, outside the decoding loop.

        Where the cache is read by a kernel, on one device, matrices of the same input are joined to
        one: a product of few rows is as long as its weights take to be read, and each launch costs.
        """
        block_def, stacked = nnx.split(self.blocks)
        blocks = [
            nnx.merge(block_def, jax.tree.map(lambda a, i=i: a[i], stacked))
            for i in range(self.config.layers)
        ]
        if self.config.decoding == "pallas":
            for block in blocks:
                block.join()
        return blocks

    def extend(
        self, layers: list[Block], cache: Cache, ids_SC: jax.Array, start_S: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Runs a chunk of tokens after what the cache holds; C = 1 is a decoding step.

        Slot s's tokens take the cache slots start_S[s] .. start_S[s] + C - 1. Tokens past a slot's
        true length leave rubbish there, which later queries cannot see before it is overwritten.

        Args:
          layers: what `unstack` gave.
          cache: from `empty_cache`; its length must be at least max(start_S) + C, which is the
            caller's to guarantee (a write past the end would be shifted, not refused).
          ids_SC: token ids of the chunk.
          start_S: tokens of each slot already in the cache.

        Returns:
          Hidden states [S, C, D] after the final norm, and the cache with the chunk written.
        """
        position_SC = start_S[:, None] + jnp.arange(ids_SC.shape[1])
        rope = self._rope(position_SC)
        x_SCD = self._embed(ids_SC)
        if self.config.decoding == "pallas" and ids_SC.shape[1] == 1:
            return self._decode(layers, cache, x_SCD[:, 0], rope, start_S)
        new: Cache = {"keys": [], "values": []}
        for block, keys, values in zip(layers, cache["keys"], cache["values"], strict=True):
            attend = functools.partial(self._attend_cache, (keys, values), start_S)
            x_SCD, kept = block(x_SCD, rope, attend)
            x_SCD = keep_rows_split(x_SCD)
            new["keys"].append(kept[0])
            new["values"].append(kept[1])
        return self._final(x_SCD), new

    def extend_tiles(
        self, layers: list[Block], cache: Cache, ids_N: jax.Array, tiles: Tiles
    ) -> Cache:
        """The cache (in the kernels' layout) with tokens of several slots run through the policy.

        Args:
          layers: what `unstack` gave.
          cache: from `empty_cache`.
          ids_N: token ids; those that pad the tiles are run through the layers and kept nowhere.
          tiles: whose they are. A slot may have several tiles, which see each other.
        """
        _, position_N = tiles.of_tokens(0, len(ids_N))
        rope = self._rope(position_N[None])
        x_1ND = self._embed(ids_N[None])
        new: Cache = {"keys": [], "values": []}
        for block, keys, values in zip(layers, cache["keys"], cache["values"], strict=True):
            attend = functools.partial(_attend_tiles, (keys, values), tiles)
            x_1ND, kept = block(x_1ND, rope, attend)
            new["keys"].append(kept[0])
            new["values"].append(kept[1])
        return new

    def _decode(
        self,
        layers: list[Block],
        cache: Cache,
        x_SD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        start_S: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        half = self.config.head_dim // 2
        flat = (rope[0].reshape(-1, half), rope[1].reshape(-1, half))
        new: Cache = {"keys": [], "values": []}
        added_SD = jnp.zeros(x_SD.shape, self.config.dtype)
        for block, keys, values in zip(layers, cache["keys"], cache["values"], strict=True):
            x_SD, added_SD, kept = block.decode(x_SD, added_SD, flat, (keys, values), start_S)
            new["keys"].append(kept[0])
            new["values"].append(kept[1])
        _, hidden_SD = _add_and_norm(x_SD, added_SD, self.final_norm_D, self.config.norm_eps)
        return hidden_SD[:, None], new

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of hidden states [..., D], to be called at few positions."""
        if self.config.tied:
            weight_VD = self.embed_VD[...].astype(hidden.dtype)
            return jnp.einsum(
                "...D,VD->...V", hidden, weight_VD, preferred_element_type=jnp.float32
            )
        weight_DV = self.head_DV[...].astype(hidden.dtype)
        return jnp.einsum("...D,DV->...V", hidden, weight_DV, preferred_element_type=jnp.float32)

    def _attend(
        self,
        position_BL: jax.Array,
        segment_BL: jax.Array | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        most_segments: int,
    ) -> tuple[jax.Array, None]:
        """Every token looks at its own sequence."""
        out = attention(
            q,
            k,
            v,
            query_position_BL=position_BL,
            key_position_BM=position_BL,
            query_segment_BL=segment_BL,
            key_segment_BM=segment_BL,
            backend=self.config.attention,
            most_segments=most_segments,
        )
        return out, None

    def _attend_cache(
        self, layer: Layer, start_S: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Layer]:
        """Every token is written down and looks at what its slot holds."""
        return cached_attention(self.config, q, k, v, layer, start_S)

    def _rope(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rotary(position, c.head_dim, c.rope_theta, c.rope_scaling)

    def _embed(self, ids: jax.Array) -> jax.Array:
        return look_up(self.embed_VD[...], ids).astype(jnp.float32)

    def _final(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.final_norm_D[...], self.config.norm_eps).astype(self.config.dtype)


def _add_and_norm(
    x_SD: jax.Array, added_SD: jax.Array, scale: nnx.Param, eps: float
) -> tuple[jax.Array, jax.Array]:
    """The residual with what is added to it, and the norm of that in the compute type."""
    on_cpu = jax.default_backend() == "cpu"
    return add_and_norm(x_SD, added_SD, scale[...], eps, interpret=on_cpu)


def _attend_tiles(
    layer: Layer, tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Layer]:
    """Every token is written down and looks at what its slot holds, up to itself."""
    out_NHK, kept = tiled_attention(q[0], k[0], v[0], layer, tiles)
    return out_NHK[None], kept


def _matrix(target: str) -> str:
    """Name of the parameter: "q" is q_DHK."""
    return "{}_{}{}".format(target, *MATRICES[target])


@functools.cache
def _abstract(config: PolicyConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Policy(config, rngs=nnx.Rngs(0))))


def init_params(config: PolicyConfig, key: jax.Array) -> Params:
    """Random float32 parameters as a nested dict: embed_VD, blocks/{q_DHK, …}, final_norm_D, …"""
    return nnx.to_pure_dict(nnx.split(Policy(config, rngs=nnx.Rngs(params=key)))[1])


def param_shapes(config: PolicyConfig) -> Params:
    """`init_params` without the numbers: the same nested dict of `jax.ShapeDtypeStruct`s."""
    return nnx.to_pure_dict(_abstract(config)[1])


def bind(config: PolicyConfig, params: Params) -> Policy:
    """The policy module over a dict of parameters (arrays or tracers), as `init_params` made it."""
    graphdef, abstract = _abstract(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)
