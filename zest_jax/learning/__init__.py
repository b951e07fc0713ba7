"""How rewards become updates: advantages, losses, likelihoods and jitted steps."""
