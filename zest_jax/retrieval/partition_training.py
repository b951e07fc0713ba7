"""What a partitioned index is trained with: k-means, SOAR's second leaf, anisotropic codes.

All of it runs on the device over chunks of bounded size, and is a function of its arguments: the
same vectors, settings and seed give the same index.

Sources: SOAR, arXiv 2404.00774, eq. 5 (the loss of a second assignment); ScaNN, arXiv 1908.10396,
theorem 3.2 (the weight of the error along the vector) and section 3.3 (codebooks under it). The
codebooks here are found by exact descent over one block of components at a time, which needs no
joint system of equations and never raises the loss.

Shape letters: R vectors of a sample or chunk, E embedding size, L leaves, M blocks of components,
D components of a block, C centres of a block (16), P bytes (two codes each), A assignments.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

CENTRES = 16  # a code has 4 bits
_SCORES = 1 << 23  # scores of vectors against leaves that exist at a time


@functools.partial(jax.jit, static_argnames=("num_leaves", "spherical", "iterations"))
def train_leaves(
    sample_RE: jax.Array,
    num_leaves: int,
    *,
    spherical: bool = False,
    iterations: int = 12,
    seed: int = 0,
) -> jax.Array:
    """Centres of a partition by k-means (Lloyd's iteration).

    Begins with vectors of the sample; a leaf that gets none takes one that lies far from its
    centre.

    Args:
      sample_RE: vectors, at least as many as leaves.
      num_leaves: L.
      spherical: keep centres at length 1 and assign by inner product.
      iterations: of Lloyd.
      seed: of the first centres.

    Returns:
      centre_LE float32.
    """
    sample_RE = sample_RE.astype(jnp.float32)
    R, E = sample_RE.shape
    L = num_leaves

    def shaped(centre_LE: jax.Array) -> jax.Array:
        if not spherical:
            return centre_LE
        length_L = jnp.linalg.norm(centre_LE, axis=1, keepdims=True)
        return centre_LE / jnp.maximum(length_L, 1e-12)

    chunk = max(1, min(R, _SCORES // L))
    chunks = -(-R // chunk)
    pad_CRE = jnp.pad(sample_RE, ((0, chunks * chunk - R), (0, 0))).reshape(chunks, chunk, E)
    real_CR = (jnp.arange(chunks * chunk) < R).astype(jnp.float32).reshape(chunks, chunk)

    def iteration(_: Any, centre_LE: jax.Array) -> jax.Array:
        def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
            vector_RE, real_R = part
            score_RL = leaf_scores(vector_RE, centre_LE, spherical)
            leaf_R = jnp.argmax(score_RL, axis=1)
            # Sums as a product: exact in any order of execution, unlike scattered additions.
            member_RL = jax.nn.one_hot(leaf_R, L) * real_R[:, None]
            near_R = jnp.max(score_RL, axis=1) - 0.5 * jnp.sum(vector_RE**2, axis=1)
            sums = (total[0] + member_RL.T @ vector_RE, total[1] + member_RL.sum(0))
            return sums, jnp.where(real_R > 0, near_R, jnp.inf)

        zero = (jnp.zeros((L, E)), jnp.zeros(L))
        (sum_LE, count_L), near_CR = jax.lax.scan(add, zero, (pad_CRE, real_CR))
        # The i-th leaf without members takes the i-th farthest vector.
        _, far_L = jax.lax.top_k(-near_CR.reshape(-1), L)
        rank_L = jnp.cumsum(count_L == 0) - 1
        spare_LE = sample_RE[far_L[jnp.maximum(rank_L, 0)]]
        mean_LE = sum_LE / jnp.maximum(count_L, 1)[:, None]
        return shaped(jnp.where(count_L[:, None] > 0, mean_LE, spare_LE))

    first_L = jax.random.choice(jax.random.key(seed), R, (L,), replace=False)
    return jax.lax.fori_loop(0, iterations, iteration, shaped(sample_RE[first_L]))


def leaf_scores(vector_RE: jax.Array, centre_LE: jax.Array, spherical: bool) -> jax.Array:
    """How well leaves suit vectors [R, L]: largest at the least distance, or inner product."""
    score_RL = vector_RE @ centre_LE.T
    return score_RL if spherical else score_RL - 0.5 * jnp.sum(centre_LE**2, axis=1)


@functools.partial(jax.jit, static_argnames=("soar_lambda", "spherical"))
def assign(
    vector_RE: jax.Array,
    centre_LE: jax.Array,
    soar_lambda: float | None = None,
    spherical: bool = False,
) -> jax.Array:
    """The leaves of vectors.

    The second leaf c' of SOAR minimises, with the residuals r = x - c and r' = x - c',

        |r'|^2 + lambda * (r' . r / |r|)^2

    so that queries along r, which miss the first leaf, find the vector in the second.

    Args:
      vector_RE: vectors.
      centre_LE: centres, at least two for a second assignment.
      soar_lambda: lambda; None for one assignment.
      spherical: as the centres were trained.

    Returns:
      leaf_RA int32; A is 2 with `soar_lambda` and 1 without.
    """
    vector_RE = vector_RE.astype(jnp.float32)
    leaf_R = jnp.argmax(leaf_scores(vector_RE, centre_LE, spherical), axis=1)
    if soar_lambda is None:
        return leaf_R[:, None].astype(jnp.int32)
    residual_RE = vector_RE - centre_LE[leaf_R]
    length_R = jnp.linalg.norm(residual_RE, axis=1, keepdims=True)
    along_RE = residual_RE / jnp.maximum(length_R, 1e-12)
    # |r'|^2 without |x|^2, which is the same for all leaves.
    distance_RL = -2 * leaf_scores(vector_RE, centre_LE, False)
    parallel_RL = jnp.sum(vector_RE * along_RE, axis=1, keepdims=True) - along_RE @ centre_LE.T
    loss_RL = distance_RL + soar_lambda * parallel_RL**2
    loss_RL = loss_RL.at[jnp.arange(len(leaf_R)), leaf_R].set(jnp.inf)
    return jnp.stack([leaf_R, jnp.argmin(loss_RL, axis=1)], axis=1).astype(jnp.int32)


def parallel_weight(vector_RE: jax.Array, threshold: float) -> jax.Array:
    """How much more an error along the vector x costs than one across it, less 1; [R].

    With T the threshold, eta = (E - 1) T^2 / (|x|^2 - T^2), at least 1; the loss of an error e is
    |e|^2 + (eta - 1) (e . x / |x|)^2. 0 for vectors not longer than T, and for T = 0.
    """
    E = vector_RE.shape[1]
    square_R = jnp.sum(vector_RE.astype(jnp.float32) ** 2, axis=1)
    left_R = square_R - threshold**2
    eta_R = (E - 1) * threshold**2 / jnp.where(left_R > 0, left_R, 1)
    return jnp.where(left_R > 0, jnp.maximum(eta_R, 1) - 1, 0)


def split_blocks(vector_RE: jax.Array, blocks: int, size: int) -> jax.Array:
    """Components in blocks [M, D, R], filled up with zeros."""
    R, E = vector_RE.shape
    padded_RE = jnp.pad(vector_RE, ((0, 0), (0, blocks * size - E)))
    return padded_RE.reshape(R, blocks, size).transpose(1, 2, 0)


def anisotropic_loss(error_RE: jax.Array, along_RE: jax.Array, weight_R: jax.Array) -> jax.Array:
    """|e|^2 + w (e . u)^2 of every vector [R]."""
    return jnp.sum(error_RE**2, 1) + weight_R * jnp.sum(error_RE * along_RE, 1) ** 2


def _sweep(codebook_MCD: jax.Array, state: Any, data: Any, learn: bool) -> tuple[jax.Array, Any]:
    """Chooses the codes of one block after the other, and with `learn` its centres as well.

    Args:
      codebook_MCD: centres.
      state: codes [M, R]; the error along the vectors by block [M, R], e . u; and its sum [R].
      data: residuals [M, D, R], directions u [M, D, R], weights w [R].
      learn: move every centre to the minimum of the loss of its members.

    Returns:
      Codebook, and the new state.
    """
    residual_MDR, along_MDR, weight_R = data
    D = codebook_MCD.shape[2]

    def choose(centre_CD: jax.Array, x_DR: jax.Array, u_DR: jax.Array, rest_R: jax.Array) -> Any:
        """The best code of each vector and its error along u, given all other blocks."""
        # One pass over the vectors, unrolled over the centres: a minimum with its place and what
        # belongs to it, which `argmin` and a look-up would take several passes for.
        best_R: Any = jnp.inf
        code_R: Any = 0
        chosen_R: Any = 0.0
        for c in range(CENTRES):
            error = [x_DR[d] - centre_CD[c, d] for d in range(D)]
            parallel_R = sum(error[d] * u_DR[d] for d in range(D))
            loss_R = sum(e * e for e in error) + weight_R * (rest_R + parallel_R) ** 2
            better_R = loss_R < best_R
            best_R = jnp.where(better_R, loss_R, best_R)
            chosen_R = jnp.where(better_R, parallel_R, chosen_R)
            code_R = jnp.where(better_R, c, code_R)
        return code_R, chosen_R

    def move(centre_CD: jax.Array, code_R: Any, x_DR: Any, u_DR: Any, rest_R: Any) -> jax.Array:
        """Solves (sum of I + w u u^T) c = sum of x + w u (rest + x . u) over a centre's vectors."""
        member_CR = (code_R == jnp.arange(CENTRES)[:, None]).astype(jnp.float32)
        square_R = (weight_R * u_DR[:, None] * u_DR[None]).reshape(D * D, -1)
        aim_DR = x_DR + weight_R * (rest_R + jnp.sum(x_DR * u_DR, axis=0)) * u_DR
        sum_CX = member_CR @ jnp.concatenate([square_R, aim_DR]).T
        count_C = member_CR.sum(1)
        left_CDD = sum_CX[:, : D * D].reshape(CENTRES, D, D)
        left_CDD += jnp.maximum(count_C, 1)[:, None, None] * jnp.eye(D)
        solved_CD = jnp.linalg.solve(left_CDD, sum_CX[:, D * D :, None])[..., 0]
        return jnp.where(count_C[:, None] > 0, solved_CD, centre_CD)

    def block(total_R: jax.Array, at: Any) -> tuple[jax.Array, Any]:
        centre_CD, along_R, x_DR, u_DR = at
        rest_R = total_R - along_R
        code_R, along_R = choose(centre_CD, x_DR, u_DR, rest_R)
        if learn:
            centre_CD = move(centre_CD, code_R, x_DR, u_DR, rest_R)
            along_R = jnp.sum((x_DR - centre_CD.T[:, code_R]) * u_DR, axis=0)
        return rest_R + along_R, (centre_CD, code_R, along_R)

    _, along_MR, total_R = state
    total_R, (codebook_MCD, code_MR, along_MR) = jax.lax.scan(
        block, total_R, (codebook_MCD, along_MR, residual_MDR, along_MDR)
    )
    return codebook_MCD, (code_MR, along_MR, total_R)


def _start(codebook_MCD: jax.Array, data: Any) -> Any:
    """Every code 0, and the error along the vectors that this makes."""
    residual_MDR, along_MDR, _ = data
    error_MDR = residual_MDR - codebook_MCD[:, 0, :, None]
    along_MR = jnp.sum(error_MDR * along_MDR, axis=1)
    return jnp.zeros(along_MR.shape, jnp.int32), along_MR, along_MR.sum(0)


def _blocked(
    residual_RE: jax.Array, vector_RE: jax.Array, blocks: int, size: int, threshold: float
) -> Any:
    length_R = jnp.linalg.norm(vector_RE, axis=1, keepdims=True)
    along_RE = vector_RE / jnp.maximum(length_R, 1e-12)
    return (
        split_blocks(residual_RE, blocks, size),
        split_blocks(along_RE, blocks, size),
        parallel_weight(vector_RE, threshold),
    )


@functools.partial(jax.jit, static_argnames=("blocks", "size", "plain", "rounds"))
def train_codebook(
    residual_RE: jax.Array,
    vector_RE: jax.Array,
    blocks: int,
    size: int,
    threshold: float,
    *,
    plain: int = 8,
    rounds: int = 4,
    seed: int = 0,
) -> jax.Array:
    """The centres of every block of components.

    Args:
      residual_RE: what is to be coded: vectors without the centre of their leaf.
      vector_RE: the vectors themselves, whose direction weighs the error.
      blocks: M.
      size: D; M * D is E or more.
      threshold: ScaNN's `anisotropic_quantization_threshold`; 0 weighs all directions alike.
      plain: iterations of plain k-means before.
      rounds: rounds over all blocks with the weighted loss.
      seed: of the first centres.

    Returns:
      codebook_MCD float32, C = 16.
    """
    residual_RE, vector_RE = residual_RE.astype(jnp.float32), vector_RE.astype(jnp.float32)
    data = _blocked(residual_RE, vector_RE, blocks, size, threshold)
    R = len(residual_RE)
    first_C = jax.random.choice(jax.random.key(seed), R, (CENTRES,), replace=R < CENTRES)
    codebook_MCD = data[0][:, :, first_C].transpose(0, 2, 1)
    unweighted = (data[0], data[1], jnp.zeros_like(data[2]))

    def run(count: int, data: Any, codebook_MCD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return jax.lax.fori_loop(
            0, count, lambda _, x: _sweep(x[0], x[1], data, True), (codebook_MCD, state)
        )

    codebook_MCD, state = run(plain, unweighted, codebook_MCD, _start(codebook_MCD, data))
    codebook_MCD, _ = run(rounds, data, codebook_MCD, state)
    return codebook_MCD


@functools.partial(jax.jit, static_argnames="passes")
def encode(
    residual_RE: jax.Array,
    vector_RE: jax.Array,
    codebook_MCD: jax.Array,
    threshold: float,
    *,
    passes: int = 2,
) -> jax.Array:
    """Codes of vectors by descent over the blocks, from the nearest centre of each.

    Args:
      residual_RE, vector_RE, threshold: see `train_codebook`.
      codebook_MCD: the centres.
      passes: rounds over all blocks with the weighted loss.

    Returns:
      code_MR int32, 0 to 15.
    """
    M, _, D = codebook_MCD.shape
    residual_RE, vector_RE = residual_RE.astype(jnp.float32), vector_RE.astype(jnp.float32)
    data = _blocked(residual_RE, vector_RE, M, D, threshold)
    unweighted = (data[0], data[1], jnp.zeros_like(data[2]))
    _, state = _sweep(codebook_MCD, _start(codebook_MCD, data), unweighted, False)
    for _ in range(passes):
        _, state = _sweep(codebook_MCD, state, data, False)
    return state[0]


def pack_codes(code_MR: jax.Array) -> jax.Array:
    """Two codes a byte [P, R] uint8: block 2p in the low half, block 2p + 1 in the high one."""
    if code_MR.shape[0] % 2:
        code_MR = jnp.pad(code_MR, ((0, 1), (0, 0)))
    return (code_MR[0::2] | (code_MR[1::2] << 4)).astype(jnp.uint8)


def decode(code_PR: jax.Array, codebook_MCD: jax.Array) -> jax.Array:
    """The residuals [R, M * D] that packed codes stand for."""
    M, _, D = codebook_MCD.shape
    P, R = code_PR.shape
    code_MR = jnp.stack([code_PR & 15, code_PR >> 4], axis=1).reshape(2 * P, R)[:M]
    part_MRD = jax.vmap(lambda centre_CD, code_R: centre_CD[code_R])(codebook_MCD, code_MR)
    return part_MRD.transpose(1, 0, 2).reshape(R, M * D)
