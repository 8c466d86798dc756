"""`titans graft`: a pretrained transformer as a Titans model that starts as the same function."""

from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, Dtype, quiet, say


def graft(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of the pretrained model, or its Hub name.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    gguf_file: Annotated[
        str | None, typer.Option("--gguf-file", metavar="NAME", help="The file in SOURCE, if it is GGUF.")
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="mag or mal.")] = "mag",
    window: Annotated[
        int | None,
        typer.Option("--window", min=1, help="Tokens attention sees; left out, the source's own window, or 512."),
    ] = None,
    memory_layers: Annotated[
        str | None,
        typer.Option("--memory-layers", metavar="3,7,...|all", help="From 0; left out, every fourth and the last."),
    ] = None,
    full_attention_layers: Annotated[
        str | None,
        typer.Option("--full-attention-layers", metavar="0,1,...", help="Keep full attention there; left out, none."),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            "--sinks", min=0, help="First tokens that stay visible; left out, 4, or 0 if the source has a window."
        ),
    ] = None,
    memory_heads: Annotated[
        int | None, typer.Option("--memory-heads", min=1, help="Left out, as many as attention has.")
    ] = None,
    memory_depth: Annotated[int, typer.Option("--memory-depth", min=1, help="Layers of a memory's MLP.")] = 2,
    memory_expansion: Annotated[int, typer.Option("--memory-expansion", min=1, help="Width of its hidden layers.")] = 2,
    memory_chunk_size: Annotated[int, typer.Option("--memory-chunk-size", min=1, help="Tokens of a chunk.")] = 64,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Precision; auto is the source's.")] = Dtype.auto,
    seed: Annotated[int, typer.Option("--seed", help="Of the memories' random start.")] = 0,
) -> None:
    """Give a pretrained transformer a memory: a copy as a Titans model that starts as the same function.

    Up to the window its logits are the source's; beyond it, those of the source with a sliding window and its first
    tokens, until the memory is trained. Sources are Llama, Mistral, Qwen2, Qwen3 and SmolLM models. Tokenizer, chat
    template and generation settings come along.

    \b
    titans graft path/to/source --out runs/graft --window 256
    titans graft path/to/folder --gguf-file model.Q4_1.gguf --out runs/graft --memory-layers all
    """
    import torch

    from ..hub.graft import check_equal, check_out, graft_config, graft_model, load_source, load_source_config, save

    quiet()
    check_out(out)
    config = graft_config(
        load_source_config(source, gguf_file),
        variant,
        window,
        "all" if memory_layers == "all" else layer_numbers("--memory-layers", memory_layers),
        layer_numbers("--full-attention-layers", full_attention_layers) or (),
        sinks,
        memory_num_heads=memory_heads,
        memory_depth=memory_depth,
        memory_expansion=memory_expansion,
        memory_chunk_size=memory_chunk_size,
    )
    found = load_source(source, gguf_file, dtype.value)
    torch.manual_seed(seed)
    student = graft_model(found.model, config)
    difference = check_equal(found.model, student)
    say(
        f"checked: logits differ by {difference:.1e} of the largest, in {str(found.model.dtype).removeprefix('torch.')}"
    )
    if found.tokenizer is None:
        say(f"{source} has no tokenizer that can be loaded: save one to {out}")
    save(student, found.tokenizer, out)
    typer.echo(
        f"{out}: {config.variant}, {student.num_parameters():,} parameters, {new_parameters(student):,} of them new"
    )


def layer_numbers(option: str, given: str | None) -> list[int] | None:
    """Numbers separated by commas; None if the option was left out."""
    if given is None:
        return None
    try:
        return [int(number) for number in given.split(",") if number.strip()]
    except ValueError as error:
        raise CommandError(f"{option} must be layer numbers separated by commas, got {given!r}") from error


def new_parameters(student) -> int:
    """The parameters of all memories."""
    memories = [layer.memory for layer in student.model.layers if layer.memory is not None]
    return sum(parameter.numel() for memory in memories for parameter in memory.parameters())
