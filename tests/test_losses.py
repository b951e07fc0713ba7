"""Losses: hand-worked values, gradients, masks, and accumulation equal to the full batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zest_jax.learning import losses

LOG2 = np.log(2.0)


class HandWorked(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_policy_gradient(self):
        # ratios 2, 1, .5, 1.1; row advantages 1 and -1; the last token is masked
        logp_old = jnp.log(jnp.array([[0.2, 0.5], [0.4, 0.1]]))
        logp_new = jnp.log(jnp.array([[0.4, 0.5], [0.2, 0.11]]))
        mask = jnp.array([[1, 1], [1, 0]])
        loss, metrics = self.variant(losses.policy_gradient_loss)(
            logp_new, logp_old, jnp.array([1.0, -1.0]), mask, 3.0
        )
        # A=1: min(2, 1.2) = 1.2 (clipped); min(1, 1) = 1
        # A=-1: min(-.5, -.8) = -.8 (clipped).   -(1.2 + 1 - .8) / 3
        self.assertAlmostEqual(float(loss), -1.4 / 3, places=5)
        expected = {
            "ratio": (2 + 1 + 0.5) / 3,
            "clip_fraction": 2 / 3,
            # rho - 1 - log rho: 2 - 1 - log 2 = .3069; 0; .5 - 1 + log 2 = .1931
            "kl_to_sampler": ((1 - LOG2) + 0 + (LOG2 - 0.5)) / 3,
            "exp_abs_delta": (2 + 1 + 2) / 3,
        }
        for name, value in expected.items():
            self.assertAlmostEqual(float(metrics[name]), value, places=5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_unequal_clip_widths(self):
        logp_old = jnp.zeros((1, 2))
        logp_new = jnp.log(jnp.array([[1.25, 0.85]]))
        advantage = jnp.array([[1.0, -1.0]])  # per token
        loss, metrics = self.variant(losses.policy_gradient_loss)(
            logp_new, logp_old, advantage, jnp.ones((1, 2)), 1.0, 0.1, 0.28
        )
        # min(1.25, 1.25) and min(-.85, -.9)
        self.assertAlmostEqual(float(loss), -(1.25 - 0.9), places=5)
        self.assertAlmostEqual(float(metrics["clip_fraction"]), 1.0, places=5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_cross_entropy(self):
        logp = jnp.log(jnp.array([[0.5, 0.25], [0.125, 0.9]]))
        mask = jnp.array([[True, True], [True, False]])
        # (1 + 2 + 3) log 2 over three tokens
        got = self.variant(losses.cross_entropy)(logp, mask, 3)
        self.assertAlmostEqual(float(got), 2 * LOG2, places=5)


@pytest.mark.parametrize(
    ("kind", "value"),
    # d = log ref - log new: log 2 and 0.  k3: 2 - log 2 - 1;  k1: -log 2;  k2: log^2 2 / 2
    [("low_var_kl", 1 - LOG2), ("k1", -LOG2), ("k2", LOG2**2 / 2)],
)
def test_kl_penalty(kind, value):
    logp_new, logp_ref = (
        jnp.log(jnp.array([[0.2, 0.5, 0.9]])),
        jnp.log(jnp.array([[0.4, 0.5, 0.1]])),
    )
    mask = jnp.array([[1, 1, 0]])
    got = losses.kl_penalty(logp_new, logp_ref, mask, 2.0, kind)
    assert float(got) == pytest.approx(value / 2, abs=1e-6)


def test_kl_penalty_is_capped_and_its_gradient_pulls_to_the_reference():
    one = jnp.ones((1, 1))
    assert float(losses.kl_penalty(-60 * one, -1 * one, one, 1.0)) == 10.0
    for kind in ("low_var_kl", "k2"):
        grad = jax.grad(lambda lp, kind=kind: losses.kl_penalty(lp, -one, one, 1.0, kind))
        assert grad(-1.5 * one).item() < 0 < grad(-0.5 * one).item()  # a descent step heads to -1
    with pytest.raises((ValueError, TypeError)):
        losses.kl_penalty(one, one, one, 1.0, "k4")


def test_gradient_on_policy_is_reinforce():
    logp = jnp.array([[-1.0, -2.0, -3.0], [-0.5, -0.1, -0.7]])
    advantage, mask = jnp.array([2.0, -1.0]), jnp.array([[1, 1, 0], [1, 1, 1]])
    grad = jax.grad(lambda lp: losses.policy_gradient_loss(lp, logp, advantage, mask, 5.0)[0])(logp)
    # -A / N at loss tokens: what was better than its group becomes likelier under descent
    np.testing.assert_allclose(grad, [[-0.4, -0.4, 0.0], [0.2, 0.2, 0.2]], rtol=1e-6)


def test_gradient_stops_where_the_step_has_gone_far_enough():
    old, mask = jnp.zeros((1, 2)), jnp.ones((1, 2))
    new = jnp.log(jnp.array([[1.5, 0.5]]))

    def grad(advantage):
        return jax.grad(
            lambda lp: losses.policy_gradient_loss(lp, old, jnp.array([advantage]), mask, 2.0)[0]
        )(new)

    # Good action: already 1.5 times likelier -> no gradient; half as likely -> push up.
    np.testing.assert_allclose(grad(1.0), [[0.0, -0.25]], atol=1e-7)
    # Bad action: still 1.5 times likelier -> push down; already halved -> no gradient.
    np.testing.assert_allclose(grad(-1.0), [[0.75, 0.0]], atol=1e-7)


def test_no_gradient_to_sampler_or_advantage():
    def loss(old, advantage):
        return losses.policy_gradient_loss(
            -jnp.ones((1, 2)), old, advantage, jnp.ones((1, 2)), 2.0
        )[0]

    grads = jax.grad(loss, argnums=(0, 1))(-jnp.ones((1, 2)), jnp.ones(1))
    assert not any(np.any(grad) for grad in grads)


def test_same_policy_has_unit_ratios():
    logp = -jax.random.exponential(jax.random.key(0), (4, 8))
    mask = jnp.ones((4, 8))
    _, metrics = losses.policy_gradient_loss(logp, logp, jnp.ones(4), mask, 32.0)
    got = {name: float(value) for name, value in metrics.items()}
    assert got == {"ratio": 1.0, "clip_fraction": 0.0, "kl_to_sampler": 0.0, "exp_abs_delta": 1.0}


def test_masked_positions_may_hold_anything():
    bad = jnp.array([[-1.0, jnp.nan, jnp.inf, -jnp.inf, 1e30]])
    good, mask = jnp.zeros((1, 5)).at[0, 0].set(-1.2), jnp.array([[1, 0, 0, 0, 0]])

    def total(logp):
        loss, metrics = losses.policy_gradient_loss(logp, good, jnp.ones(1), mask, 1.0)
        loss += losses.kl_penalty(logp, good, mask, 1.0)
        return loss + losses.cross_entropy(logp, mask, 1.0), metrics

    (value, metrics), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(bad)
    assert np.isfinite(value) and all(np.isfinite(list(metrics.values())))
    assert np.isfinite(grad).all() and not grad[0, 1:].any() and grad[0, 0] != 0


@pytest.mark.parametrize("cut", [[2, 4], [1, 5]])
def test_accumulation_equals_the_full_batch(cut):
    """Rows of very unequal length, cut anywhere: sums of parts are the whole, gradients too."""
    keys = jax.random.split(jax.random.key(1), 3)
    logp, old, reference = (-jax.random.exponential(key, (6, 10)) for key in keys)
    advantage = jnp.array([1.5, -0.5, 0.2, 0.0, -2.0, 0.8])
    mask = jnp.arange(10)[None] < jnp.array([1, 10, 3, 7, 2, 9])[:, None]
    normaliser = mask.sum()

    def loss(logp, rows):
        arrays = logp[rows], old[rows], advantage[rows], mask[rows]
        value, metrics = losses.policy_gradient_loss(*arrays, normaliser)
        value += 0.1 * losses.kl_penalty(logp[rows], reference[rows], mask[rows], normaliser)
        return value + losses.cross_entropy(logp[rows], mask[rows], normaliser), metrics

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    whole = step(logp, jnp.arange(6))
    edges = [0, *cut, 6]
    parts = [step(logp, jnp.arange(low, high)) for low, high in zip(edges, edges[1:], strict=False)]
    summed = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), summed, whole)


def test_wrong_shapes_are_refused():  # by the type checker, or without it by the function
    two = jnp.zeros((2, 3))
    with pytest.raises((ValueError, TypeError)):
        losses.cross_entropy(two, jnp.zeros((3, 2)), 1.0)
    with pytest.raises((ValueError, TypeError)):
        losses.policy_gradient_loss(two, two, jnp.zeros(3), two, 1.0)
    with pytest.raises((ValueError, TypeError)):
        losses.token_mean(jnp.zeros(3), jnp.zeros(3), 1.0)
