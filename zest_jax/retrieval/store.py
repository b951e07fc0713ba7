"""Passages tokenised once, and the joining of token pieces on device.

Shape letters: N passages, P passage length, S slots, R retrieved, U pieces, W piece length, C
output length.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.errors import UserError
from zest_jax.retrieval.encoders import pad_ragged
from zest_jax.retrieval.passages import TokenisedPassages


def splice(ids_SUW: jax.Array, length_SU: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Joins U ragged pieces per row into one row of `size` ids.

    Example: pieces [[7, 8, _], [9, _, _]] of lengths [2, 1] give [7, 8, 9, 0, ...] of length 3.

    Returns:
      ids [S, size], zero past the end, and lengths [S] (clipped to `size`: what does not fit is
      cut).
    """
    U, W = ids_SUW.shape[1:]
    end_SU = jnp.cumsum(length_SU, axis=1)
    at_C = jnp.arange(size)
    piece_SC = jnp.sum(end_SU[:, None, :] <= at_C[:, None], axis=-1)
    inside_SC = piece_SC < U
    piece_SC = jnp.minimum(piece_SC, U - 1)
    start_SC = jnp.take_along_axis(end_SU - length_SU, piece_SC, axis=1)
    flat_SX = ids_SUW.reshape(ids_SUW.shape[0], U * W)
    source_SC = jnp.clip(piece_SC * W + at_C - start_SC, 0, U * W - 1)
    ids_SC = jnp.where(inside_SC, jnp.take_along_axis(flat_SX, source_SC, axis=1), 0)
    return ids_SC, jnp.minimum(end_SU[:, -1], size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassageStore:
    """Every passage's token ids, and the pieces that stand around and between them.

    Attributes:
      ids_NP: token ids of each passage, right-padded.
      length_N: tokens of each passage.
      frame_UW: pieces before each of the R passages (the first holds the observation's opening)
        and, last, the observation's closing.
      frame_length_U: their lengths.
      size: tokens that an observation may have, C.
    """

    ids_NP: jax.Array
    length_N: jax.Array
    frame_UW: jax.Array
    frame_length_U: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls, passages: list[list[int]], heads: list[list[int]], tail: list[int], size: int
    ) -> "PassageStore":
        """Cuts every passage so that R of them, with their frame, fit into `size` tokens.

        Args:
          passages: ids of each passage as it is shown.
          heads: ids before each of the R passages.
          tail: ids after the last.
          size: tokens an observation may have.

        Raises:
          UserError: `size` leaves fewer than 8 tokens to a passage.
        """
        room = _room(heads, tail, size)
        ids_NP, length_N = pad_ragged([p[:room] for p in passages])
        frame_UW, frame_length_U = pad_ragged([*heads, tail])
        return cls(
            ids_NP=jnp.asarray(ids_NP),
            length_N=jnp.asarray(length_N),
            frame_UW=jnp.asarray(frame_UW),
            frame_length_U=jnp.asarray(frame_length_U),
            size=size,
        )

    @classmethod
    def from_tokens(
        cls,
        tokens: TokenisedPassages,
        heads: list[list[int]],
        tail: list[int],
        size: int,
        sharding: jax.sharding.Sharding | None = None,
    ) -> "PassageStore":
        """As `build`, from stored ids of any number of passages.

        Args:
          tokens: ids of each passage as it is shown.
          heads: ids before each of the R passages.
          tail: ids after the last.
          size: tokens an observation may have.
          sharding: of the passages' ids, where several devices share them.

        Raises:
          UserError: as `build`, or the device has no room (see `HostPassageStore`).
        """
        room = _room(heads, tail, size)
        frame_UW, frame_length_U = map(jnp.asarray, pad_ragged([*heads, tail]))
        ids_NP, length_N = tokens.padded(min(room, tokens.longest), sharding)
        return cls(ids_NP, length_N, frame_UW, frame_length_U, size)

    def observe(self, row_SR: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The observation's ids [S, C] and lengths [S] for the passages of each slot."""
        return _observation(
            self.ids_NP[row_SR],
            self.length_N[row_SR],
            self.frame_UW,
            self.frame_length_U,
            self.size,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostPassageStore:
    """A `PassageStore` whose passages stay on the host, mapped from disk, where a device has no
    room for them; a compiled step asks for those that it shows.

    Attributes:
      frame_UW: as in `PassageStore`.
      frame_length_U: their lengths.
      tokens: ids of each passage as it is shown.
      longest: tokens that a passage is cut to, P.
      size: tokens that an observation may have, C.
    """

    frame_UW: jax.Array
    frame_length_U: jax.Array
    tokens: TokenisedPassages = dataclasses.field(metadata={"static": True})
    longest: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_tokens(
        cls, tokens: TokenisedPassages, heads: list[list[int]], tail: list[int], size: int
    ) -> "HostPassageStore":
        """See `PassageStore.from_tokens`."""
        longest = min(_room(heads, tail, size), tokens.longest)
        frame_UW, frame_length_U = map(jnp.asarray, pad_ragged([*heads, tail]))
        return cls(frame_UW, frame_length_U, tokens, longest, size)

    def observe(self, row_SR: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `PassageStore.observe`."""
        shapes = (
            jax.ShapeDtypeStruct((*row_SR.shape, self.longest), jnp.int32),
            jax.ShapeDtypeStruct(row_SR.shape, jnp.int32),
        )
        read_SRP, length_SR = jax.pure_callback(self._read, shapes, row_SR)
        return _observation(read_SRP, length_SR, self.frame_UW, self.frame_length_U, self.size)

    def _read(self, row_SR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row_SR = np.asarray(row_SR)
        ids_MP, length_M = self.tokens.rows(row_SR.reshape(-1), self.longest)
        return (
            ids_MP.astype(np.int32).reshape(*row_SR.shape, self.longest),
            length_M.reshape(row_SR.shape),
        )


def _room(heads: list[list[int]], tail: list[int], size: int) -> int:
    """Tokens that each passage may have; see `PassageStore.build`."""
    room = (size - sum(map(len, heads)) - len(tail)) // len(heads)
    if room < 8:
        raise UserError(
            f"an observation of {size} tokens leaves {room} to each of {len(heads)} passages; "
            "raise observation_length or lower top_k"
        )
    return room


def _observation(
    passage_SRP: jax.Array,
    length_SR: jax.Array,
    frame_UW: jax.Array,
    frame_length_U: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Passages with their frame as one row of ids [S, C], and lengths [S]."""
    S, R, _ = passage_SRP.shape
    W = max(passage_SRP.shape[2], frame_UW.shape[1])
    # Small vocabularies are kept in 16 bits.
    passage_SRW = _widen(passage_SRP.astype(jnp.int32), W)
    frame_SUW = jnp.broadcast_to(_widen(frame_UW, W), (S, R + 1, W))
    frame_length_SU = jnp.broadcast_to(frame_length_U, (S, R + 1))
    piece_SUW = jnp.stack([frame_SUW[:, :R], passage_SRW], axis=2).reshape(S, 2 * R, W)
    length_SU = jnp.stack([frame_length_SU[:, :R], length_SR], axis=2)
    return splice(
        jnp.concatenate([piece_SUW, frame_SUW[:, R:]], axis=1),
        jnp.concatenate([length_SU.reshape(S, 2 * R), frame_length_SU[:, R:]], axis=1),
        size,
    )


def _widen(x: jax.Array, width: int) -> jax.Array:
    """The last axis padded with zeros to a width."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    return jnp.pad(x, pad) if x.shape[-1] < width else x


def frame_texts(observation: str, passage: str, retrieved: int) -> tuple[list[str], str, str]:
    """Splits a protocol's templates into what can be tokenised beforehand.

    Args:
      observation: text with `{passages}`.
      passage: text with `{title}`, `{text}` and perhaps `{rank}` (only before the title).
      retrieved: R.

    Returns:
      The text before each passage, the text after the last, and the passage's own template (from
      the title on).
    """
    before, after = observation.split("{passages}")
    if "{rank}" not in passage:
        return [before] + [""] * (retrieved - 1), after, passage
    head, body = passage.split("{title}")
    if "{rank}" in body:
        raise ValueError("{rank} must stand before {title} in a passage's template")
    heads = [head.format(rank=r + 1) for r in range(retrieved)]
    return [before + heads[0], *heads[1:]], after, "{title}" + body
