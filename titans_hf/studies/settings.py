"""What the studies' command lines share: lists of numbers, and a table of results."""


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def show(rows: list[dict]) -> str:
    """Rows as aligned text, under the names of their fields."""
    cells = [list(rows[0]), *([("" if x is None else str(x)) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    return "\n".join("".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
