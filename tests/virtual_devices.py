"""Several devices on one CPU, for processes that tests start."""

import os


def flags(count: int) -> str:
    """XLA_FLAGS of the suite with so many virtual devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
