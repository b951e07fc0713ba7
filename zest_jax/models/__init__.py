"""Policies (and later encoders): the networks, their attention, and their weights in and out."""

from zest_jax.models.config import PolicyConfig, RopeScaling
from zest_jax.models.hf import (
    load_config,
    load_generation,
    load_pretrained,
    local_folder,
    save_pretrained,
)
from zest_jax.models.policy import Policy, bind, init_params, param_shapes

__all__ = [
    "Policy",
    "PolicyConfig",
    "RopeScaling",
    "bind",
    "init_params",
    "load_config",
    "load_generation",
    "load_pretrained",
    "local_folder",
    "param_shapes",
    "save_pretrained",
]
