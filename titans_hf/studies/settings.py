"""What the studies' command lines share: lists of numbers, fields of configurations, and a table of results."""

import argparse
import json
from collections import defaultdict

from ..configuration_titans import VARIANTS
from .families import FAMILIES


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def read_fields(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """`--set lmm.memory_depth=1` as JSON per model; `titans.` stands for every variant among the models."""
    unknown = [model for model in args.models if model not in FAMILIES]
    if unknown:
        parser.error(f"--models: there is no {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    fields: dict[str, dict] = defaultdict(dict)
    for setting in args.set:
        place, _, value = setting.partition("=")
        model, _, field = place.partition(".")
        named = [x for x in args.models if x == model or (model == "titans" and x in VARIANTS)]
        if not named or not field or not value:
            parser.error(f"--set: {setting!r} is not MODEL.FIELD=VALUE of a model of --models")
        for one in named:
            try:
                fields[one][field] = json.loads(value)
            except json.JSONDecodeError:
                fields[one][field] = value
    return {model: json.dumps(own, sort_keys=True) for model, own in fields.items()}


def show(rows: list[dict]) -> str:
    """Rows as aligned text, under the names of their fields."""
    cells = [list(rows[0]), *([("" if x is None else str(x)) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    return "\n".join("".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
