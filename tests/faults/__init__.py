"""A fault campaign: real runs are hurt in every way, and must end with an unhurt run's numbers.

See `docs/survival.md`; the program is `python -m tests.faults`.
"""
