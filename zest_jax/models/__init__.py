"""Policies and encoders: the networks, their attention, and their weights in and out."""

from zest_jax.models.config import PolicyConfig, RopeScaling
from zest_jax.models.encoder_folders import instruction
from zest_jax.models.encoders import Encoder, Recipe, load_encoder
from zest_jax.models.hf import (
    load_config,
    load_generation,
    load_pretrained,
    local_folder,
    save_pretrained,
)
from zest_jax.models.policy import Policy, bind, init_params, param_shapes

__all__ = [
    "Encoder",
    "Policy",
    "PolicyConfig",
    "Recipe",
    "RopeScaling",
    "bind",
    "init_params",
    "instruction",
    "load_config",
    "load_encoder",
    "load_generation",
    "load_pretrained",
    "local_folder",
    "param_shapes",
    "save_pretrained",
]
