"""Frozen judges, asked by text: an endpoint, a policy in this process, or recorded answers."""
