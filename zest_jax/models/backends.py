"""Which attention back end a machine gets, and the proof that it computes the same.

Kernels come with the driver and with JAX's release, and have been wrong in some of both: before
one is used, its output and its gradients on a small batch are compared with plain XLA.

Shape letters: B batch, L length, H query heads, J key/value heads, K head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zest_jax.errors import UserError
from zest_jax.models.add_norm import add_and_norm
from zest_jax.models.attention import BACKENDS, attention
from zest_jax.models.attention_cache import HeadRule, decode_attention
from zest_jax.models.cache import Layer, cached_attention, empty_cache
from zest_jax.models.config import PolicyConfig
from zest_jax.models.rope import rotary, rotate

# Relative error (norm of the difference over norm) that bfloat16 inputs explain: rounding the
# scores' operands gives 0.002 to 0.006, a wrong mask or a lost segment at least 0.1.
TOLERANCE = 0.02
_LENGTH = 256
KERNELS = {"gpu": "cudnn", "tpu": "splash"}
"""The kernel of a platform, for whole sequences."""


def choose_attention(config: PolicyConfig, wanted: str = "auto") -> tuple[PolicyConfig, str]:
    """The policy with a back end that works here, and a sentence on what was chosen and why.

    Args:
      config: the policy.
      wanted: "auto" takes the machine's kernel where there is one and it passes the self-test, else
        XLA; a name takes that back end or fails.

    Raises:
      UserError: an unknown name, or a back end asked for by name that does not work here.
    """
    if wanted not in ("auto", *BACKENDS):
        raise UserError(
            f"attention back end {wanted!r} is unknown; take auto or one of {', '.join(BACKENDS)}."
        )
    platform = jax.default_backend()
    kernel = KERNELS.get(platform) if wanted == "auto" else wanted
    reason = ""
    if kernel is None:
        kernel, reason = "xla", f"there is no kernel for {platform}"
    elif kernel != "xla":
        problem = _unfit(config, kernel, platform) or self_test(config, kernel)
        if problem and wanted != "auto":
            raise UserError(
                f"the {kernel} attention back end cannot be used here: {problem}; "
                "take policy.attention=auto or xla."
            )
        if problem:
            kernel, reason = "xla", f"{kernel} was passed over: {problem}"
        else:
            reason = f"it agrees with xla on {platform}"
    else:
        reason = "as asked"
    decoding, why = _choose_decoding(config, kernel, platform)
    message = f"attention: {kernel} ({reason}); over the cache: {decoding} ({why})"
    logging.info("%s", message)
    return dataclasses.replace(config, attention=kernel, decoding=decoding), message


def _choose_decoding(config: PolicyConfig, attention: str, platform: str) -> tuple[str, str]:
    """What reads the cache beside that back end for whole sequences, and why."""
    if attention != "cudnn":
        return "xla", f"no kernel goes with {attention}"
    try:
        error = worst_difference_cached(config)
    except Exception as e:  # of many types, as above
        first = (str(e).strip() or repr(e)).splitlines()[0]
        return "xla", f"pallas was passed over: {type(e).__name__}: {first[:200]}"
    if not error < TOLERANCE:
        return "xla", f"pallas was passed over: it differs from xla by {error:.3g} (relative)"
    return "pallas", f"it agrees with xla on {platform}"


def self_test(config: PolicyConfig, backend: str) -> str:
    """Compares a back end with XLA on packed and on whole rows, gradients included.

    Args:
      config: the policy whose heads are tried.
      backend: "cudnn" or "splash".

    Returns:
      What is wrong, or "" if all differences are below `TOLERANCE`.
    """
    try:
        error = worst_difference(config, backend)
    except Exception as e:  # of many types: compiler, driver, missing library, unsupported shape
        first = (str(e).strip() or repr(e)).splitlines()[0]
        return f"{type(e).__name__}: {first[:200]}"
    if not error < TOLERANCE:  # NaN fails as well
        return f"it differs from xla by {error:.3g} (relative), more than {TOLERANCE}"
    return ""


def worst_difference(config: PolicyConfig, backend: str) -> float:
    """Largest relative difference from float32 XLA over output and gradients; NaN if any is.

    Relative means the norm of the difference over the norm, of the positions that are no padding.
    """
    rng = np.random.default_rng(0)
    B, L, H, J, K = 2, _LENGTH, config.heads, config.kv_heads, config.head_dim
    arrays = [rng.normal(size=(B, L, n, K)) for n in (H, J, J, H)]
    # Segments of all sizes, one of a single token, and padding at the end of the second row; then
    # one segment a row, as most rows of a long-context batch have.
    packed, single = (
        jnp.asarray([_numbered(sizes, L) for sizes in rows])
        for rows in (((100, 1, L - 101), (37, 64, 90)), ((L,), (L - 55,)))
    )
    worst = 0.0
    for segment_BL, most in ((None, 1), (packed, 3), (single, 1)):
        results = [
            _out_and_gradients(name, [jnp.asarray(a, dtype) for a in arrays], segment_BL, most)
            for name, dtype in ((backend, config.dtype), ("xla", jnp.float32))
        ]
        for got, want in zip(*results, strict=True):
            difference = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want, np.float64))
            worst = np.fmax(worst, difference / np.linalg.norm(np.asarray(want, np.float64)))
            if not np.isfinite(difference):
                return float("nan")
    return float(worst)


def worst_difference_cached(config: PolicyConfig) -> float:
    """Largest relative difference of decoding's kernels from float32 XLA; NaN if any is.

    A chunk first, then steps of one token, by slots of all lengths; then the norm.
    """
    rng = np.random.default_rng(0)
    S, C, H, J, K = 4, 32, config.heads, config.kv_heads, config.head_dim
    steps = [(C, [0, 1, 63, 200]), (1, [32, 33, 95, 232]), (1, [33, 34, 96, 233])]
    arrays = [[rng.normal(size=(S, c, n, K)) for n in (H, J, J)] for c, _ in steps]
    outputs: list[list[np.ndarray]] = []
    for decoding, dtype in (("pallas", config.dtype), ("xla", "float32")):
        one = dataclasses.replace(config, decoding=decoding, dtype=dtype, layers=1)
        attend = jax.jit(functools.partial(_attend_cached, one))
        cache = empty_cache(one, S, 256)
        layer = (cache["keys"][0], cache["values"][0])
        outputs.append([])
        for (_, starts), qkv in zip(steps, arrays, strict=True):
            out, layer = attend(*(jnp.asarray(x, dtype) for x in qkv), layer, jnp.asarray(starts))
            outputs[-1].append(np.asarray(out, np.float64).reshape(S, -1))
    pairs = [*zip(*outputs, strict=True), *_normed(config, rng)]
    return float(np.max([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]))


def _normed(config: PolicyConfig, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the kernel that adds and norms gives, and what it should."""
    x_SD, added_SD, scale_1D = (rng.normal(size=(n, config.width)) for n in (4, 4, 1))
    given = jnp.asarray(x_SD, jnp.float32), jnp.asarray(added_SD, config.dtype)
    scale_D = jnp.asarray(scale_1D[0], jnp.float32)
    interpret = jax.default_backend() == "cpu"
    got = add_and_norm(*given, scale_D, config.norm_eps, interpret=interpret)
    sum_SD = np.asarray(given[0], np.float64) + np.asarray(given[1], np.float64)
    mean_S1 = np.mean(sum_SD**2, axis=1, keepdims=True)
    wanted = (sum_SD, sum_SD / np.sqrt(mean_S1 + config.norm_eps) * scale_1D)
    return [(np.asarray(g, np.float64), w) for g, w in zip(got, wanted, strict=True)]


def _attend_cached(
    config: PolicyConfig,
    q_SCHK: jax.Array,
    k_SCJK: jax.Array,
    v_SCJK: jax.Array,
    layer: Layer,
    start_S: jax.Array,
) -> tuple[jax.Array, Layer]:
    """Rotates, writes and attends, by the function that decoding of one or more tokens calls."""
    S, C, H, K = q_SCHK.shape
    rope = rotary(start_S[:, None] + jnp.arange(C), K, config.rope_theta, config.rope_scaling)
    if config.decoding == "pallas" and C == 1:
        product_SX = jnp.concatenate([x.reshape(S, -1) for x in (q_SCHK, k_SCJK, v_SCJK)], axis=1)
        flat = (rope[0].reshape(S, -1), rope[1].reshape(S, -1))
        interpret = jax.default_backend() == "cpu"
        out, keys, values = decode_attention(
            product_SX, HeadRule(H), flat, *layer, start_S, interpret=interpret
        )
        return out, (keys, values)
    q_SCHK, k_SCJK = rotate(q_SCHK, *rope), rotate(k_SCJK, *rope)
    return cached_attention(config, q_SCHK, k_SCJK, v_SCJK, layer, start_S)


def _numbered(sizes: tuple[int, ...], length: int) -> list[int]:
    """Segment numbers of a row: (2, 1) of 4 tokens is 1 1 2 0."""
    row = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
    return row + [0] * (length - len(row))


def _out_and_gradients(
    backend: str, arrays: list[jax.Array], segment_BL: jax.Array | None, most_segments: int
) -> list[jax.Array]:
    *qkv, slope_BLHK = arrays
    position_BL = jnp.broadcast_to(jnp.arange(qkv[0].shape[1]), qkv[0].shape[:2])
    kept_BL11 = True if segment_BL is None else (segment_BL > 0)[:, :, None, None]

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            x = attention(
                q,
                k,
                v,
                query_position_BL=position_BL,
                key_position_BM=position_BL,
                query_segment_BL=segment_BL,
                key_segment_BM=segment_BL,
                backend=backend,
                most_segments=most_segments,
            )
            return jnp.where(kept_BL11, x, 0)

        value, back = jax.vjp(out, q, k, v)
        return [value, *back(slope_BLHK.astype(value.dtype))]

    return run(*qkv)


def _unfit(config: PolicyConfig, backend: str, platform: str) -> str:
    """Why a kernel is out of the question before it is tried, or ""."""
    if KERNELS.get(platform) != backend:
        return f"it is not for {platform}"
    if backend == "cudnn" and config.dtype == "float32":
        return "it computes in bfloat16 only, and policy.dtype is float32"
    return ""
