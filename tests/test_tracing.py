"""Counting traces: one per name and shapes is expected, another is a retrace."""

import jax.numpy as jnp
import numpy as np

from zest_jax.tracing import TraceCounter


def double(x, y=0.0):
    """Twice x."""
    return 2 * x + y


def test_a_call_with_the_same_shapes_is_no_trace():
    traces = TraceCounter()
    step = traces.jit("double", double)
    for value in (1.0, 2.0, 3.0):
        assert step(jnp.full(3, value)).tolist() == [2 * value] * 3
    assert traces.traces == {"double": 1}
    assert traces.retraces == 0


def test_other_shapes_types_and_structures_are_traced_but_no_retraces():
    traces = TraceCounter()
    step = traces.jit("double", double)
    step(jnp.zeros(3))
    step(jnp.zeros(4))
    step(jnp.zeros(3, jnp.int32))
    step(jnp.zeros(3), y=jnp.zeros(3))
    step(jnp.zeros(3), jnp.zeros(3))
    assert traces.traces == {"double": 5}
    assert traces.retraces == 0


def test_a_second_trace_for_the_same_shapes_is_a_retrace():
    traces = TraceCounter()
    step = traces.jit("double", double)
    step(np.zeros(3, np.float32))
    step.clear_cache()
    step(np.ones(3, np.float32))
    assert traces.traces == {"double": 2}
    assert traces.retraces == 1


def test_a_number_where_an_array_was_is_a_retrace():
    # The classic slip: a Python number is traced again although its type looks the same.
    traces = TraceCounter()
    step = traces.jit("double", double)
    step(jnp.float32(1.0))
    step(1.0)
    assert traces.retraces == 1


def test_names_are_counted_apart_and_options_passed_on():
    traces = TraceCounter()
    one = traces.jit("one", double)
    other = traces.jit("other", double, static_argnames="y")
    one(jnp.zeros(2))
    other(jnp.zeros(2), y=1.0)
    other(jnp.zeros(2), y=2.0)
    assert traces.traces == {"one": 1, "other": 2}
    assert traces.retraces == 0
    assert one.__name__ == "double" and one.__doc__ == "Twice x."
