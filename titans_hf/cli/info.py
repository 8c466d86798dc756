"""`titans info`: what a model is and needs, from its configuration alone."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hub.describe import describe, find_dtype
from ..hub.loading import CommandError, Dtype, load_config, quiet, size

if TYPE_CHECKING:
    from ..configuration_titans import TitansConfig


def info(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_DIR", help="A preset, or the folder of a model.")],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Precision; auto is the folder's, float32 for presets.")] = (
        Dtype.auto
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a preset or the folder of a model.

    Tells its parameters, the bytes of its memory and of its cache, and which kernels would run. No weights are created
    or loaded. The cache, which grows only where layers have full attention, is compared with the keys and values that
    full attention in every layer, with the same heads and precision, would keep.

    \b
    titans info titans-mac-340m
    titans info runs/demo --json
    """
    quiet()
    config = find_config(name)
    facts = {"name": name, **describe(config, find_dtype(config, dtype))}
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(in_words(facts)))


def find_config(name: str) -> "TitansConfig":
    """A folder of that name, else a preset."""
    from ..configuration_titans import PRESETS, TitansConfig

    if not Path(name).exists() and name in PRESETS:
        return TitansConfig.preset(name)
    try:
        return load_config(name)
    except CommandError as error:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        if Path(name).exists() or not near:
            raise
        raise CommandError(f"{error}; the preset nearest to it is {near[0]}") from error


def in_words(facts: dict) -> list[str]:
    """The figures as text."""
    count, memory, kernels = facts["parameters"], facts["memory_state_bytes"], facts["kernels"]
    growth = facts["cache_bytes_per_token"]
    rows = {
        "model": f"{facts['name']}: Titans {facts['variant']}, {facts['layers']} layers, width {facts['hidden_size']}, "
        f"vocabulary {facts['vocabulary']:,}, {facts['dtype']}",
        **layer_rows(facts),
        "parameters": f"{count['all']:,}; {count['without_embeddings']:,} without embeddings",
        "memory": f"{size(memory['all'])} per sequence, weights and momentum; {size(memory['per_layer'])} per layer",
        "cache": f"{size(facts['cache_bytes'])} per sequence, memory included, "
        + (f"and {size(growth)} for every token read" if growth else "after any number of tokens"),
        "its parts": ", ".join(f"{name} {size(count)}" for name, count in facts["cache_parts"].items()),
        "with rewinding": f"{size(facts['cache_bytes_with_rewind'])}, where tokens may be cropped",
    }
    for name, full in facts["full_attention_cache_bytes"].items():
        rows[f"at {name} tokens"] = f"{size(full['bytes'])} in full attention: {full['ratio']:,.2f} times the cache"
    rows["kernels"] = f"{kernels['here']} ({kernels['why']})"
    if "on_a_gpu" in kernels:
        rows["on a GPU"] = f"{kernels['on_a_gpu']} ({kernels['why_there']})"
    width = max(map(len, rows)) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]


def layer_rows(facts: dict) -> dict[str, str]:
    """What layers differ in, if they do."""
    rows, layers, full = {}, facts["memory_layers"], facts["full_attention_layers"]
    if len(layers) < facts["layers"]:
        rows["memory in"] = f"layers {', '.join(map(str, layers)) or 'none'} of 0 to {facts['layers'] - 1}"
    if full:
        rows["full attention in"] = f"layers {', '.join(map(str, full))}, whose part of the cache grows"
    return rows
