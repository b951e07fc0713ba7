"""Tables as text, by hand."""

import pytest

from zest_jax.columns import in_columns


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        ("l", "a    bb  c\nddd  e   ff"),
        ("lr", "a    bb   c\nddd   e  ff"),
        ("rlr", "  a  bb   c\nddd  e   ff"),
    ],
)
def test_columns_are_as_wide_as_their_widest_cell(sides, text):
    assert in_columns([("a", "bb", "c"), ["ddd", "e", "ff"]], sides) == text


def test_rows_of_unequal_length_are_an_error():
    with pytest.raises(ValueError):
        in_columns([("a", "b"), ("c",)])
