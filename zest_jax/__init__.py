"""Self-evolving search agents in JAX: a proposer writes questions, a solver learns to answer them."""

__version__ = "0.1.0"
