"""Passages, encoders and indexes: retrieval as arrays beside the policy."""

from zest_jax.retrieval.encoders import BagEncoder, TokenEncoder
from zest_jax.retrieval.exact import exact_search
from zest_jax.retrieval.retriever import Retriever
from zest_jax.retrieval.store import PassageStore, splice

__all__ = ["BagEncoder", "PassageStore", "Retriever", "TokenEncoder", "exact_search", "splice"]
