"""Packing: episodes of all lengths laid into rows of one length, so that few positions are padding.

A packed batch is M micro-batches of R rows of L tokens. Positions restart in every episode and
segments keep them from seeing one another, so an episode's numbers do not depend on its neighbours.
The head and the loss need only the tokens that were sampled: they are listed per row (X of them),
each with the position whose hidden state predicts it, so that no logits exist anywhere else.

Shape letters: M micro-batches, R rows, L row length, X loss tokens per row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zest_jax.models.attention import MOST_SEGMENTS
from zest_jax.parallel import Placement

Array = Any  # numpy on the host, a jax.Array within a compiled step


@dataclasses.dataclass(frozen=True)
class Item:
    """One sequence to be packed.

    Attributes:
      ids: its token ids.
      targets: positions (>= 1) of the tokens that the loss or the score is about.
      logp: log-probability of each of those under the sampler; zeros where there is none.
    """

    ids: Array
    targets: Array
    logp: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed batch; every field but `micro_batches` has the leading axis M.

    Attributes:
      ids_MRL: token ids.
      position_MRL: position of each token in its own sequence.
      segment_MRL: sequence of each token within its row, from 1; 0 is padding.
      at_MRX: position in the row whose hidden state predicts a target.
      target_MRX: the target's id.
      logp_MRX: its log-probability under the sampler.
      owner_MRX: number of the sequence that it belongs to.
      mask_MRX: True for targets, False for padding.
      micro_batches: micro-batches that hold anything, a scalar: the rest is skipped, not computed.
      segments: most sequences of a row; static in a compiled step.
    """

    ids_MRL: Array
    position_MRL: Array
    segment_MRL: Array
    at_MRX: Array
    target_MRX: Array
    logp_MRX: Array
    owner_MRX: Array
    mask_MRX: Array
    micro_batches: Array
    segments: int = dataclasses.field(default=MOST_SEGMENTS, metadata={"static": True})

    @property
    def loss_tokens(self) -> int:
        """Targets of the whole batch: what losses are normalised by (on the host)."""
        return int(self.mask_MRX.sum())


@dataclasses.dataclass(frozen=True)
class PackSpec:
    """The fixed shape of a packed batch.

    Attributes:
      rows: rows of a micro-batch, R.
      length: tokens of a row, L.
      targets: loss tokens of a row, X.
      micro_batches: most micro-batches a batch may need, M.
      segments: most sequences of a row; attention kernels are faster the fewer.
    """

    rows: int
    length: int
    targets: int
    micro_batches: int
    segments: int = MOST_SEGMENTS

    @classmethod
    def for_items(cls, count: int, rows: int, length: int, targets: int) -> "PackSpec":
        """Room for `count` items even if each needs a row of its own."""
        return cls(rows, length, targets, -(-count // rows))


def placed(batch: Any, placement: Placement) -> Any:
    """A batch on the devices of a run: rows of every `Packed` in it split, all else whole."""

    def one(leaf: Any) -> Any:
        return placement.rows(leaf, axis=1) if isinstance(leaf, Packed) else placement.whole(leaf)

    return jax.tree.map(one, batch, is_leaf=lambda leaf: isinstance(leaf, Packed))


def pack(items: Sequence[Item], spec: PackSpec, owners: Sequence[int] | None = None) -> Packed:
    """Lays the items into rows, longest first, each into the first row with room for it.

    Args:
      items: the sequences.
      spec: the shape of the result.
      owners: number of each item; its index where not given.

    Raises:
      ValueError: an item is longer, or has more targets, than a row may have; or the rows run out.
    """
    M, R, L, X = spec.micro_batches, spec.rows, spec.length, spec.targets
    owners = range(len(items)) if owners is None else owners
    ids, position, segment = (np.zeros((M * R, L), np.int32) for _ in range(3))
    at, target, owner = (np.zeros((M * R, X), np.int32) for _ in range(3))
    logp, mask = np.zeros((M * R, X), np.float32), np.zeros((M * R, X), bool)
    tokens_used, targets_used = np.zeros(M * R, np.int64), np.zeros(M * R, np.int64)
    sequences = np.zeros(M * R, np.int32)
    opened = 0
    # A stable sort, so that the same items are always laid out the same way.
    for i in sorted(range(len(items)), key=lambda i: -len(items[i].ids)):
        item, n, x = items[i], len(items[i].ids), len(items[i].targets)
        if n > L or x > X:
            raise ValueError(
                f"a sequence of {n} tokens with {x} targets does not fit rows of {L} with {X}"
            )
        fits = np.flatnonzero(
            (tokens_used[:opened] + n <= L)
            & (targets_used[:opened] + x <= X)
            & (sequences[:opened] < spec.segments)
        )
        row = int(fits[0]) if len(fits) else opened
        if row == opened:
            if opened == M * R:
                raise ValueError(f"{len(items)} sequences need more than {M} x {R} rows")
            opened += 1
        a, b = int(tokens_used[row]), int(targets_used[row])
        sequences[row] += 1
        ids[row, a : a + n] = item.ids
        position[row, a : a + n] = np.arange(n)
        segment[row, a : a + n] = sequences[row]
        at[row, b : b + x] = a + item.targets - 1
        target[row, b : b + x] = item.ids[item.targets]
        logp[row, b : b + x] = item.logp
        owner[row, b : b + x] = owners[i]
        mask[row, b : b + x] = True
        tokens_used[row] += n
        targets_used[row] += x
    used = -(-opened // R)

    # Rows dealt round over the micro-batches in use would even out their load; order does not
    # matter to the loss, so they stay as they are.
    def by_micro_batch(x: np.ndarray) -> np.ndarray:
        return x.reshape(M, R, -1)

    return Packed(
        ids_MRL=by_micro_batch(ids),
        position_MRL=by_micro_batch(position),
        segment_MRL=by_micro_batch(segment),
        at_MRX=by_micro_batch(at),
        target_MRX=by_micro_batch(target),
        logp_MRX=by_micro_batch(logp),
        owner_MRX=by_micro_batch(owner),
        mask_MRX=by_micro_batch(mask),
        micro_batches=np.int32(used),
        segments=spec.segments,
    )
