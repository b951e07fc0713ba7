"""The language-model head at loss positions only, a few targets at a time.

The logits of 16,384 targets over Qwen's 151,936 tokens are 10 GB in float32, several times over
with their softmax and gradient. Here a chunk of targets is scored, reduced to two numbers each and
forgotten; the backward pass makes the chunk's logits again, which costs a third of the head's work
and holds one chunk at a time.

Shape letters: R rows, X targets per row, C targets of a chunk per row, D width, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp

from zest_jax.parallel.sharding import keep_rows_split, row_shards

# Targets scored at a time on one device: 2.5 GB of float32 logits at Qwen's vocabulary, enough for
# the products to run at full speed.
CHUNK = 4096


def head_log_probs(
    hidden_RXD: jax.Array,
    weight: jax.Array,
    target_RX: jax.Array,
    *,
    tied: bool,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probability of each target and entropy of its distribution, in nats.

    .. math::
        z = \frac{h W}{T}, \qquad \log\pi(a) = z_a - \log\sum_v e^{z_v}, \qquad
        H = \log\sum_v e^{z_v} - \sum_v \pi_v z_v

    Both can be differentiated, by hidden states and weight. The products run in the type of the
    hidden states, sums and softmax in float32; the weight's gradient is summed in float32.

    Args:
      hidden_RXD: hidden states that predict the targets.
      weight: the head [D, V], or the embedding [V, D] where `tied`; rounded to the type of the
        hidden states as it is used.
      target_RX: token ids.
      tied: which of the two `weight` is.
      temperature: T.
      chunk: most targets to score at a time on one device.

    Returns:
      log pi(target) [R, X] and H [R, X], float32.
    """
    R, X, D = hidden_RXD.shape
    # Chunks cut every row alike, so that rows may lie on several devices.
    width = max(1, min(X, chunk // max(1, R // row_shards(R))))
    chunks = math.ceil(X / width)
    width = math.ceil(X / chunks)
    short = chunks * width - X
    hidden_NRCD = _cut(jnp.pad(hidden_RXD, ((0, 0), (0, short), (0, 0))), chunks)
    target_NRC = _cut(jnp.pad(target_RX, ((0, 0), (0, short))), chunks)
    logp_NRC, entropy_NRC = _scores(tied, temperature, hidden_NRCD, weight, target_NRC)
    return _join(logp_NRC)[:, :X], _join(entropy_NRC)[:, :X]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(tied, temperature, hidden_NRCD, weight, target_NRC):
    return _scores_forward(tied, temperature, hidden_NRCD, weight, target_NRC)[0]


def _scores_forward(tied, temperature, hidden_NRCD, weight, target_NRC):
    w = weight.astype(hidden_NRCD.dtype)

    def one(chunk):
        hidden_RCD, target_RC = chunk
        z_RCV = _logits(hidden_RCD, w, tied) / temperature
        lse_RC = jax.nn.logsumexp(z_RCV, axis=-1)
        entropy_RC = lse_RC - jnp.sum(jnp.exp(z_RCV - lse_RC[..., None]) * z_RCV, axis=-1)
        logp_RC = jnp.take_along_axis(z_RCV, target_RC[..., None], axis=-1)[..., 0] - lse_RC
        return logp_RC, entropy_RC, lse_RC

    logp, entropy, lse = _each(one, (hidden_NRCD, target_NRC))
    return (logp, entropy), (hidden_NRCD, weight, target_NRC, lse, entropy)


def _scores_backward(tied, temperature, kept, cotangents):
    hidden_NRCD, weight, target_NRC, lse_NRC, entropy_NRC = kept
    w = weight.astype(hidden_NRCD.dtype)

    def one(total, chunk):
        hidden_RCD, target_RC, lse_RC, entropy_RC, by_logp_RC, by_entropy_RC = chunk
        log_RCV = _logits(hidden_RCD, w, tied) / temperature - lse_RC[..., None]
        # d log pi(a) / dz_v = [v = a] - pi_v,  dH / dz_v = -pi_v (log pi_v + H)
        slope_RCV = -jnp.exp(log_RCV) * (
            by_logp_RC[..., None] + by_entropy_RC[..., None] * (log_RCV + entropy_RC[..., None])
        )
        at_RCV = jax.lax.broadcasted_iota(jnp.int32, log_RCV.shape, 2) == target_RC[..., None]
        slope_RCV += jnp.where(at_RCV, by_logp_RC[..., None], 0.0)
        slope_RCV = (slope_RCV / temperature).astype(hidden_RCD.dtype)
        back, across = ("RCV,VD->RCD", "RCV,RCD->VD") if tied else ("RCV,DV->RCD", "RCD,RCV->DV")
        by_hidden_RCD = keep_rows_split(jnp.einsum(back, slope_RCV, w))
        pair = (slope_RCV, hidden_RCD) if tied else (hidden_RCD, slope_RCV)
        by_weight = jnp.einsum(across, *pair, preferred_element_type=jnp.float32)
        return total + by_weight, by_hidden_RCD

    chunks = (hidden_NRCD, target_NRC, lse_NRC, entropy_NRC, *cotangents)
    zero = jnp.zeros(weight.shape, jnp.float32)
    if len(hidden_NRCD) == 1:
        by_weight, by_hidden = one(zero, jax.tree.map(lambda x: x[0], chunks))
        by_hidden = by_hidden[None]
    else:
        by_weight, by_hidden = jax.lax.scan(one, zero, chunks)
    return by_hidden, by_weight.astype(weight.dtype), None


_scores.defvjp(_scores_forward, _scores_backward)


def _logits(hidden_RCD: jax.Array, w: jax.Array, tied: bool) -> jax.Array:
    pattern = "RCD,VD->RCV" if tied else "RCD,DV->RCV"
    return jnp.einsum(pattern, hidden_RCD, w, preferred_element_type=jnp.float32)


def _each(one, chunks):
    """`one` of every chunk in turn; without a loop where there is only one."""
    if len(chunks[0]) == 1:
        return jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], chunks)))
    return jax.lax.map(one, chunks)


def _cut(x_RX: jax.Array, chunks: int) -> jax.Array:
    """[R, N * C, ...] -> [N, R, C, ...]."""
    R, X, *rest = x_RX.shape
    return jnp.moveaxis(x_RX.reshape(R, chunks, X // chunks, *rest), 1, 0)


def _join(x_NRC: jax.Array) -> jax.Array:
    N, R, C = x_NRC.shape
    return jnp.moveaxis(x_NRC, 0, 1).reshape(R, N * C)
