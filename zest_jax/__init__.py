"""Self-evolving search agents in JAX: a proposer writes questions, a solver learns to answer
them."""

import os

# transformers says at every import that there is no PyTorch; we use its tokenizers alone.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
