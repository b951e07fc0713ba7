"""Question sets: the seven benchmarks and files of one's own, through tensorflow-datasets.

    for task in datasets.read("nq", "data", limit=100): ...

`python -m zest_jax.prepare_data` prepares them. TensorFlow is not needed, and tensorflow-datasets
is imported only when a prepared set is opened.
"""

from zest_jax.datasets.benchmarks import BENCHMARKS, TRAINED_ON, Benchmark, evaluated_rows
from zest_jax.datasets.reading import read

__all__ = ["BENCHMARKS", "TRAINED_ON", "Benchmark", "evaluated_rows", "read"]
