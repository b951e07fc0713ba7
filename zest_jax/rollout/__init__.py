"""The compiled multi-turn sampler, its protocols, and the trajectories it leaves."""
