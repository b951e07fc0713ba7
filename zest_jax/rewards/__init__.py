"""Rewards as pure functions: one file a family, each with its equation, units and source."""
