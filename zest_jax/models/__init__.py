"""Policies (and later encoders): the networks, their attention, and their weights in and out."""

from zest_jax.models.config import PolicyConfig
from zest_jax.models.policy import Policy, bind, init_params

__all__ = ["Policy", "PolicyConfig", "bind", "init_params"]
