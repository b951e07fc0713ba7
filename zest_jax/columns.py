"""Tables as text. Everyone may import this."""

from collections.abc import Iterable, Sequence


def in_columns(rows: Iterable[Sequence[str]], sides: str = "l") -> str:
    """Rows of cells as lines, every column as wide as its widest cell.

    Args:
      rows: as many cells in each.
      sides: "l" or "r" for each column: where its cells stand; the last is that of all the rest.
    """
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), sides[-1])

    def placed(cell: str, width: int, side: str) -> str:
        return cell.rjust(width) if side == "r" else cell.ljust(width)

    return "\n".join(
        "  ".join(map(placed, row, widths, sides[: len(widths)])).rstrip() for row in rows
    )
