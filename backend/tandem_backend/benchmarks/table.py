# SPDX-License-Identifier: Apache-2.0
"""Plain columns for the terminal."""

from collections.abc import Sequence

Cell = str | int | float


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The first column to the left, the others to the right. Floats get two digits after the point."""
    cells = [list(headings), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    )


def _text(cell: Cell) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
