"""Where every parameter lies on the mesh: one table by parameter name.

The rules follow the usual pairing for decoders: the dimension that a layer contracts over
activations of full width (D) is split over `fsdp`, the one that it spreads work over (heads,
feed-forward, vocabulary) over `tensor`, so that a block needs one reduction after attention and one
after the feed-forward. What has one entry per width or head size is small and replicated.

Shape letters (in the names): V vocabulary, L positions, T token types, D width, H heads,
J key/value heads, K head size, F feed-forward width, A rank of an adapter.
"""

import math
from typing import Any

import jax
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zest_jax.errors import UserError

RULES: dict[str, P] = {
    "embed_VD": P("tensor", "fsdp"),
    "head_DV": P("fsdp", "tensor"),
    "final_norm_D": P(),
    "attention_norm_D": P(),
    "q_DHK": P("fsdp", "tensor", None),
    "k_DJK": P("fsdp", "tensor", None),
    "v_DJK": P("fsdp", "tensor", None),
    "o_HKD": P("tensor", None, "fsdp"),
    "q_bias_HK": P("tensor", None),
    "k_bias_JK": P("tensor", None),
    "v_bias_JK": P("tensor", None),
    "q_norm_K": P(),
    "k_norm_K": P(),
    "mlp_norm_D": P(),
    "gate_DF": P("fsdp", "tensor"),
    "up_DF": P("fsdp", "tensor"),
    "down_FD": P("tensor", "fsdp"),
    # Adapters (A rank, never split) lie as the matrix that they stand beside.
    "q_lora_a_DA": P("fsdp", None),
    "q_lora_b_AHK": P(None, "tensor", None),
    "k_lora_a_DA": P("fsdp", None),
    "k_lora_b_AJK": P(None, "tensor", None),
    "v_lora_a_DA": P("fsdp", None),
    "v_lora_b_AJK": P(None, "tensor", None),
    "o_lora_a_HKA": P("tensor", None, None),
    "o_lora_b_AD": P(None, "fsdp"),
    "gate_lora_a_DA": P("fsdp", None),
    "gate_lora_b_AF": P(None, "tensor"),
    "up_lora_a_DA": P("fsdp", None),
    "up_lora_b_AF": P(None, "tensor"),
    "down_lora_a_FA": P("tensor", None),
    "down_lora_b_AD": P(None, "fsdp"),
    # BERT-style encoders: biases everywhere, as many key and value heads as query heads.
    "position_LD": P(None, "fsdp"),
    "token_type_TD": P(None, "fsdp"),
    "embed_norm_D": P(),
    "embed_norm_bias_D": P(),
    "k_DHK": P("fsdp", "tensor", None),
    "v_DHK": P("fsdp", "tensor", None),
    "k_bias_HK": P("tensor", None),
    "v_bias_HK": P("tensor", None),
    "o_bias_D": P(),
    "attention_norm_bias_D": P(),
    "up_bias_F": P("tensor"),
    "down_bias_D": P(),
    "mlp_norm_bias_D": P(),
}
# Parameters under this key carry a leading dimension of layers, which the scan walks: never split.
STACKED = "blocks"
# A batch is split over both axes whose devices see different data.
BATCH = P(("data", "fsdp"))


def plan_shardings(tree: Any, mesh: Mesh) -> tuple[Any, list[str]]:
    """Shardings of a tree of parameters, and which rules could not be kept.

    Optimiser moments, gradients and whole training states work as well: a leaf's rule is the one of
    the parameter name that ends its path, and scalars are replicated.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh, as `make_mesh` gives it.

    Returns:
      A tree of NamedShardings, and a sentence for every axis that was dropped because it does not
      divide its dimension.

    Raises:
      ValueError: a leaf whose name has no rule.
    """
    notes: list[str] = []

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec(path, leaf.shape, mesh, notes))

    return jax.tree_util.tree_map_with_path(one, tree), notes


def param_shardings(tree: Any, mesh: Mesh) -> Any:
    """`plan_shardings` without the notes, which are logged as warnings instead."""
    shardings, notes = plan_shardings(tree, mesh)
    for note in notes:
        logging.warning("%s", note)
    return shardings


def shard_params(params: Any, mesh: Mesh) -> Any:
    """Places parameters (or any tree that `plan_shardings` takes) on the mesh by the rules."""
    return jax.device_put(params, param_shardings(params, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over data and fsdp, everything else whole: for arrays [B, …] of any rank."""
    return NamedSharding(mesh, BATCH)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Places a tree of host arrays [B, …] on the mesh, rows split over the devices.

    With several processes each passes its own rows, and B is what they hold together.

    Raises:
      UserError: the devices cannot share the rows evenly.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    sharding = batch_sharding(mesh)

    def one(leaf: Any) -> jax.Array:
        rows = leaf.shape[0] * jax.process_count()
        if rows % parts:
            raise UserError(
                f"a batch of {rows} rows cannot be split over data x fsdp = {parts} devices; "
                f"choose a batch size that is a multiple of {parts}"
            )
        return jax.make_array_from_process_local_data(sharding, leaf)

    return jax.tree.map(one, batch)


def keep_rows_split(x: jax.Array) -> jax.Array:
    """Pins activations [B, …] to rows split over data and fsdp, all else whole, under a set mesh.

    Without it the compiler may as well gather the rows and reduce over split weights: correct, but
    every device then computes the whole batch. It acts while tracing within `jax.set_mesh(mesh)`;
    elsewhere, and where the devices cannot share the rows evenly, it returns `x` as it is.
    """
    if _row_shards(x.shape[0]) is None:
        return x
    return jax.lax.with_sharding_constraint(x, P(*BATCH, *[None] * (x.ndim - 1)))


def look_up(table_VD: jax.Array, ids_BL: jax.Array) -> jax.Array:
    """Rows of an embedding [V, D] for ids [B, L], rows of the batch split as by `keep_rows_split`.

    The rules split D over `fsdp`, and so the batch is; left alone, the compiler brings the embedded
    tokens of all rows to every device. Here each device looks up its part of D for the rows of its
    fsdp group, and the group then exchanges parts for rows.
    """
    if _row_shards(ids_BL.shape[0]) is None:
        return table_VD[ids_BL]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape["fsdp"] == 1 or table_VD.shape[1] % mesh.shape["fsdp"]:
        return keep_rows_split(table_VD[ids_BL])
    pin = jax.lax.with_sharding_constraint
    rest = [None] * (ids_BL.ndim - 1)
    x_BLD = pin(table_VD[pin(ids_BL, P("data", *rest))], P("data", *rest, "fsdp"))
    return keep_rows_split(x_BLD)


def for_decoding(params: Any, dtype: str) -> Any:
    """A policy's parameters as a rollout reads them: whole on every device but for what `tensor`
    splits, matrices of the layers in the type that is computed in.

    They are gathered once, before the first token, in that type. It acts while tracing within
    `jax.set_mesh(mesh)`; elsewhere it returns `params` as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return params

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [str(getattr(k, "key", "")) for k in path]
        placed = _spec(path, leaf.shape, mesh, [])
        if STACKED in names and leaf.ndim > 2 and "bias" not in names[-1]:
            # The TPU compiler would cast behind the gathering, and move and hold float32.
            leaf = jax.lax.with_sharding_constraint(leaf.astype(dtype), placed)
            leaf = jax.lax.optimization_barrier(leaf)
        kept = P(*(axis if axis == "tensor" else None for axis in placed))
        return jax.lax.with_sharding_constraint(leaf, kept)

    return jax.tree_util.tree_map_with_path(one, params)


def keep_placed(tree: Any) -> Any:
    """Pins parameters, moments or gradients to where the rules place them, under a set mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, _spec(path, leaf.shape, mesh, []))

    return jax.tree_util.tree_map_with_path(one, tree)


def row_shards(rows: int) -> int:
    """Over how many groups of devices `keep_rows_split` splits that many rows."""
    return _row_shards(rows) or 1


def _row_shards(rows: int) -> int | None:
    mesh = jax.sharding.get_abstract_mesh()
    axes = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(axes.get(axis) != AxisType.Auto for axis in BATCH[0]):  # no mesh, or in shard_map
        return None
    shards = math.prod(mesh.shape[axis] for axis in BATCH[0])
    return None if rows % shards else shards


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Any, notes: list[str]) -> P:
    names = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    rule = next((RULES[name] for name in reversed(names) if name in RULES), None)
    if rule is None:
        if not shape:
            return P()
        where = jax.tree_util.keystr(path)
        raise ValueError(f"parameter {where} of shape {shape} has no sharding rule")
    stacked = STACKED in names
    axes = ([None] if stacked else []) + list(rule)
    kept: list[str | None] = []
    for i, axis in enumerate(axes):
        if axis is not None and shape[i] % mesh.shape[axis]:
            notes.append(
                f"{jax.tree_util.keystr(path)}: dimension {i} of {shape} is not a multiple of "
                f"{axis}={mesh.shape[axis]}, so it is not split over that axis"
            )
            axis = None
        kept.append(axis)
    return P(*kept)
