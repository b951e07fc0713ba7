"""Attention on TPUs through JAX's splash kernel (flash attention that skips hidden blocks).

The kernel is a Mosaic program, which the compiler cannot split by itself: under a mesh it runs in
`jax.shard_map`, each device on its own rows and heads, with no exchange between them.

Shape letters: B batch, L length, H query heads, J key/value heads, K head size. Within a device the
same letters stand for that device's share.
"""

import functools
import math

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zest_jax.parallel.sharding import BATCH

# Output and normalisers carry this name, so that a remat policy may keep them: without it the
# backward pass runs the forward kernel once more.
RESIDUAL_NAME = "attention"
_LANES = 128  # blocks are multiples of a vector register's width
_HEADS = "tensor"


def splash_attention(
    query_BLHK: jax.Array,
    key_BLJK: jax.Array,
    value_BLJK: jax.Array,
    segment_BL: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `attention.attention`: softmax(q k / sqrt(K)) v, causal, within segments.

    Tracing within `jax.set_mesh(mesh)`, rows are split over (data, fsdp) and heads over tensor;
    what the devices cannot share evenly every one of them computes whole, and a warning says so.

    Args:
      query_BLHK: rotated queries.
      key_BLJK: rotated keys of the same tokens.
      value_BLJK: values.
      segment_BL: segments, each a run of neighbours, padding last; None where a row is one
        sequence.
      interpret: run the kernel step by step on any machine, for tests (slow).

    Returns:
      [B, L, H, K] in the type of the queries; what stands at padding is of no use.
    """
    B, _, H, _ = query_BLHK.shape
    J = key_BLJK.shape[2]
    local = functools.partial(_on_one_device, interpret=interpret)
    arrays = [query_BLHK, key_BLJK, value_BLJK] + ([] if segment_BL is None else [segment_BL])
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mesh.size == 1 or any(types.get(axis) != AxisType.Auto for axis in (*BATCH[0], _HEADS)):
        return local(*arrays)  # one device, no mesh of ours, or within a shard_map already
    parts = math.prod(mesh.shape[axis] for axis in BATCH[0])
    rows: tuple[str, ...] | None = BATCH[0]
    heads: str | None = _HEADS
    if B % parts:
        _warn(f"{B} rows do not share evenly over data x fsdp = {parts}")
        rows = None
    if H % mesh.shape[_HEADS] or J % mesh.shape[_HEADS]:
        _warn(f"{H} query and {J} key heads do not both share over tensor={mesh.shape[_HEADS]}")
        heads = None
    by_head = P(rows, None, heads, None)
    return jax.shard_map(
        local,
        in_specs=(by_head, by_head, by_head, P(rows, None))[: len(arrays)],
        out_specs=by_head,
        check_vma=False,  # the kernel does not declare along which axes its outputs vary
    )(*arrays)


def _on_one_device(
    query_BLHK: jax.Array,
    key_BLJK: jax.Array,
    value_BLJK: jax.Array,
    segment_BL: jax.Array | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    B, L, H, K = query_BLHK.shape
    block, padded = _blocks(L)
    kernel = make_splash_mha(
        MultiHeadMask([CausalMask((padded, padded))] * H),
        block_sizes=BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=RESIDUAL_NAME,
        interpret=interpret,
    )
    # The kernel does not scale; its axes are heads, length, size. Padding stands after every true
    # token, where causality hides it.
    scaled_BLHK = (query_BLHK.astype(jnp.float32) * K**-0.5).astype(query_BLHK.dtype)
    query_BHLK, key_BJLK, value_BJLK = (
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, padded - L), (0, 0)))
        for x in (scaled_BLHK, key_BLJK, value_BLJK)
    )
    segments = None
    if segment_BL is not None:
        segment_BL = jnp.pad(segment_BL, ((0, 0), (0, padded - L)))
        segments = SegmentIds(q=segment_BL, kv=segment_BL)
    out_BHLK = jax.vmap(kernel)(query_BHLK, key_BJLK, value_BJLK, segments)
    return out_BHLK[:, :, :L].transpose(0, 2, 1, 3)


def _blocks(length: int) -> tuple[int, int]:
    """Block size, and the length padded to a multiple of it.

    Of n blocks a side the causal kernel computes n + 1 out of 2n, against a half that is needed,
    while every block costs a fixed start and 512 x 512 float32 scores stay well within a core's
    scratch memory. So: 512, and 1024 once a row has four of those.
    """
    largest = 1024 if length >= 4096 else 512
    count = -(-length // largest)
    block = -(-length // (count * _LANES)) * _LANES
    return block, count * block


@functools.cache
def _warn(reason: str) -> None:
    """Once per reason: attention is traced several times for one program."""
    logging.warning("splash attention: %s, so every device of these computes them all", reason)
