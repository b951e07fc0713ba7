"""Passages tokenised once, and the joining of token pieces on device.

Shape letters: N passages, P passage length, S slots, U queries of an action, R retrieved, F pieces
of the frame, W piece length, C output length.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.encoders import pad_ragged
from zest_jax.retrieval.layout import Frame
from zest_jax.retrieval.passages import TokenisedPassages


def splice(ids_SFW: jax.Array, length_SF: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Joins F ragged pieces per row into one row of `size` ids.

    Example: pieces [[7, 8, _], [9, _, _]] of lengths [2, 1] give [7, 8, 9, 0, ...] of length 3.

    Returns:
      ids [S, size], zero past the end, and lengths [S] (clipped to `size`: what does not fit is
      cut).
    """
    F, W = ids_SFW.shape[1:]
    end_SF = jnp.cumsum(length_SF, axis=1)
    at_C = jnp.arange(size)
    piece_SC = jnp.sum(end_SF[:, None, :] <= at_C[:, None], axis=-1)
    inside_SC = piece_SC < F
    piece_SC = jnp.minimum(piece_SC, F - 1)
    start_SC = jnp.take_along_axis(end_SF - length_SF, piece_SC, axis=1)
    flat_SX = ids_SFW.reshape(ids_SFW.shape[0], F * W)
    source_SC = jnp.clip(piece_SC * W + at_C - start_SC, 0, F * W - 1)
    ids_SC = jnp.where(inside_SC, jnp.take_along_axis(flat_SX, source_SC, axis=1), 0)
    return ids_SC, jnp.minimum(end_SF[:, -1], size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FramePieces:
    """A `Frame` on device.

    Attributes:
      ids_FW: its pieces, right-padded: U starts, R heads, the ending, the closing.
      length_F: their lengths; fixed, so that empty pieces cost nothing.
      queries: U.
    """

    ids_FW: jax.Array
    length_F: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(cls, frame: Frame) -> "FramePieces":
        pieces = [[*p] for p in (*frame.starts, *frame.heads, frame.ending, frame.closing)]
        ids_FW, length_F = pad_ragged(pieces)
        return cls(jnp.asarray(ids_FW), tuple(length_F.tolist()), len(frame.starts))

    @property
    def retrieved(self) -> int:
        return len(self.length_F) - self.queries - 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassageStore:
    """Every passage's token ids, and the pieces that stand around and between them.

    Attributes:
      ids_NP: token ids of each passage, right-padded.
      length_N: tokens of each passage.
      frame: what stands around them.
      size: tokens that an observation may have, C.
    """

    ids_NP: jax.Array
    length_N: jax.Array
    frame: FramePieces
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(cls, passages: list[list[int]], frame: Frame, size: int) -> "PassageStore":
        """Cuts every passage so that U * R of them, with their frame, fit into `size` tokens.

        Args:
          passages: ids of each passage as it is shown.
          frame: ids around them.
          size: tokens an observation may have.

        Raises:
          UserError: `size` leaves fewer than 8 tokens to a passage.
        """
        room = passage_room(frame, size)
        ids_NP, length_N = pad_ragged([p[:room] for p in passages])
        return cls(jnp.asarray(ids_NP), jnp.asarray(length_N), FramePieces.build(frame), size)

    @classmethod
    def from_tokens(
        cls,
        tokens: TokenisedPassages,
        frame: Frame,
        size: int,
        sharding: jax.sharding.Sharding | None = None,
    ) -> "PassageStore":
        """As `build`, from stored ids of any number of passages.

        Args:
          tokens: ids of each passage as it is shown.
          frame: ids around them.
          size: tokens an observation may have.
          sharding: of the passages' ids, where several devices share them.

        Raises:
          UserError: as `build`, or the device has no room (see `HostPassageStore`).
        """
        ids_NP, length_N = tokens.padded(min(passage_room(frame, size), tokens.longest), sharding)
        return cls(ids_NP, length_N, FramePieces.build(frame), size)

    def observe(
        self, row_SUR: jax.Array, asked_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The observation that shows these passages.

        Args:
          row_SUR: passages of each query, -1 behind the last one found.
          asked_S: queries that were asked; the results of the others are not shown. Without it,
            all were.

        Returns:
          Its ids [S, C] and lengths [S].
        """
        row_SUR = jnp.asarray(row_SUR)
        length_SUR = jnp.where(row_SUR < 0, 0, self.length_N[row_SUR])
        return observation(self.ids_NP[row_SUR], length_SUR, asked_S, self.frame, self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostPassageStore:
    """A `PassageStore` whose passages stay on the host, mapped from disk, where a device has no
    room for them; a compiled step asks for those that it shows.

    Attributes:
      frame: as in `PassageStore`.
      tokens: ids of each passage as it is shown.
      longest: tokens that a passage is cut to, P.
      size: tokens that an observation may have, C.
    """

    frame: FramePieces
    tokens: TokenisedPassages = dataclasses.field(metadata={"static": True})
    longest: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_tokens(cls, tokens: TokenisedPassages, frame: Frame, size: int) -> "HostPassageStore":
        """See `PassageStore.from_tokens`."""
        longest = min(passage_room(frame, size), tokens.longest)
        return cls(FramePieces.build(frame), tokens, longest, size)

    def observe(
        self, row_SUR: jax.Array, asked_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `PassageStore.observe`."""
        row_SUR = jnp.asarray(row_SUR)
        shapes = (
            jax.ShapeDtypeStruct((*row_SUR.shape, self.longest), jnp.int32),
            jax.ShapeDtypeStruct(row_SUR.shape, jnp.int32),
        )
        read_SURP, length_SUR = jax.pure_callback(self._read, shapes, row_SUR)
        length_SUR = jnp.where(row_SUR < 0, 0, length_SUR)
        return observation(read_SURP, length_SUR, asked_S, self.frame, self.size)

    def _read(self, row_SUR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row_SUR = np.maximum(np.asarray(row_SUR), 0)
        ids_MP, length_M = self.tokens.rows(row_SUR.reshape(-1), self.longest)
        return (
            ids_MP.astype(np.int32).reshape(*row_SUR.shape, self.longest),
            length_M.reshape(row_SUR.shape),
        )


def passage_room(frame: Frame, size: int) -> int:
    """Tokens that each passage may have; see `PassageStore.build`."""
    passages = len(frame.starts) * len(frame.heads)
    room = (size - frame.length) // passages
    if room < 8:
        raise UserError(
            f"an observation of {size} tokens leaves {room} to each of {passages} passages; "
            "raise observation_length or lower top_k"
        )
    return room


def observation(
    ids_SURP: jax.Array,
    length_SUR: jax.Array,
    asked_S: jax.Array | None,
    frame: FramePieces,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Passages with their frame as one row of ids [S, C], and lengths [S].

    A passage of no tokens is not there, and what stands before it is not either.
    """
    S, U, R, _ = ids_SURP.shape
    assert (U, R) == (frame.queries, frame.retrieved), "rows of another shape than the frame"
    W = max(ids_SURP.shape[3], frame.ids_FW.shape[1])
    # Small vocabularies are kept in 16 bits.
    ids_SURW = _widen(ids_SURP.astype(jnp.int32), W)
    ids_FW = _widen(frame.ids_FW, W)
    pieces: list[jax.Array] = []
    lengths: list[jax.Array] = []

    def stand(f: int, there_S: jax.Array) -> None:
        if frame.length_F[f]:
            pieces.append(jnp.broadcast_to(ids_FW[f], (S, W)))
            lengths.append(jnp.where(there_S, frame.length_F[f], 0))

    every_S = jnp.ones(S, bool)
    for u in range(U):
        # The first result's frame holds the observation's own: it stands if nothing was asked too.
        asked = every_S if u == 0 or asked_S is None else asked_S > u
        stand(u, asked)
        for r in range(R):
            length_S = jnp.where(asked, length_SUR[:, u, r], 0)
            stand(U + r, length_S > 0)
            pieces.append(ids_SURW[:, u, r])
            lengths.append(length_S)
        stand(U + R, asked)
    stand(U + R + 1, every_S)
    return splice(jnp.stack(pieces, axis=1), jnp.stack(lengths, axis=1), size)


def _widen(x: jax.Array, width: int) -> jax.Array:
    """The last axis padded with zeros to a width."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    return jnp.pad(x, pad) if x.shape[-1] < width else x
