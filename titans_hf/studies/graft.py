"""What a graft's memory is worth: nats per token by place, beside its source with full attention and the window alone.

    python scripts/studies/graft.py SOURCE runs/graft runs/graft-memory/model --texts 'held-out/*.txt' --tokens 4096

The window alone is the graft before it was tuned: the source with a window and, where it has sinks, its first tokens;
without those it is read, too. The figure is the share of the gap between the window and full attention that the tuned
graft closes, over the places whose window has overflowed. There are two controls, its memory never written and the
memory of another text: the graft has read that one, and reads the text without writing. What they close, too, is not
memory of this text: the branch may have learned to make up for something that a window always lacks.
"""

import argparse
import glob
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .. import TitansCache, TitansConfig
from ..records.files import plots, write_record
from .places import places, token_losses
from .settings import show

FULL, ALONE, TUNED = "full attention", "window alone", "graft"
WITHOUT_SINKS = "window without sinks"
CONTROLS = ("graft, memory never written", "graft, memory of another text")


def load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, PreTrainedModel]:
    """The models to compare by name, the tuned graft last."""

    def read(folder: str | Path, **options) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), **options).eval()

    gguf = {} if args.gguf_file is None else {"gguf_file": args.gguf_file}
    models = {FULL: read(args.source, **gguf), ALONE: read(args.untuned)}
    if getattr(models[ALONE].config, "attention_sinks", 0):
        models[WITHOUT_SINKS] = read(args.untuned, attention_sinks=0)
    models[TUNED] = read(args.graft)
    for folder, name in ((args.untuned, ALONE), (args.graft, TUNED)):
        if not isinstance(models[name].config, TitansConfig):
            parser.error(f"{folder} is not a Titans model; make one with titans graft {args.source} --out DIR")
    return models


def read_texts(pattern: str, tokenizer, tokens: int, texts: int) -> list[Tensor]:
    """The first texts of that many tokens: evenly from each file, which is one long document."""
    files = sorted(glob.glob(pattern, recursive=True))
    found = []
    for file in files:
        ids = torch.tensor(tokenizer(Path(file).read_text(encoding="utf-8"), verbose=False).input_ids)
        rows = ids[: len(ids) // tokens * tokens].view(-1, tokens)
        wanted = -(-texts // len(files))
        found += rows[:: max(1, len(rows) // wanted)][:wanted]
    if len(found) < 2:
        raise ValueError(f"--texts: {pattern} holds {len(found)} texts of {tokens:,} tokens; give two or more")
    return found[:texts]


def by_place(losses: list[Tensor]) -> list[float]:
    """Mean nats in each stretch of texts of equal length."""
    found = torch.stack(losses).mean(0)
    return [round(found[start:end].mean().item(), 4) for start, end in places(len(found) + 1)]


@torch.no_grad()
def with_memory_of(model: PreTrainedModel, other: Tensor, text: Tensor) -> Tensor:
    """The losses of a text, read with the memory of another one and without writing; attention sees its own text."""
    read, cache = (TitansCache(model.config, rewind=False) for _ in range(2))
    model.base_model(other[None], past_key_values=read)
    options = {"past_key_values": cache, "use_cache": True, "memory_read_only": True}
    first = token_losses(model, text[:2], memory_read_only=True)
    model.base_model(text[None, :1], **options)
    for layer, other_layer in zip(cache.layers, read.layers, strict=True):
        layer.take_memory_of(other_layer)
    return torch.cat((first, token_losses(model, text[1:], **options)))


@torch.no_grad()
def measure(models: dict[str, PreTrainedModel], texts: list[Tensor]) -> dict[str, list[float]]:
    """Losses by place: those of the models, and of the last of them, the tuned graft, its two controls."""
    graft = models[TUNED]
    found: dict[str, list[Tensor]] = {name: [] for name in (*models, *CONTROLS)}
    half = len(texts) // 2  # texts come file by file: the other one is of another document
    for text, other in tqdm(list(zip(texts, texts[half:] + texts[:half])), desc="texts"):
        for name, model in models.items():
            found[name].append(token_losses(model, text))
        never, anothers = CONTROLS
        found[never].append(token_losses(graft, text, memory_read_only=True))
        found[anothers].append(with_memory_of(graft, other, text))
    return {name: by_place(losses) for name, losses in found.items()}


def closed(nats: dict[str, list[float]], tokens: int, window: int, by: str) -> float:
    """The share of the gap between window and full attention that one of the readers closes, beyond the window."""
    after = [i for i, (start, _) in enumerate(places(tokens)) if start >= window]
    if not after:
        raise ValueError(f"--tokens: {tokens:,} tokens do not reach far enough beyond the window of {window:,}")
    full, alone, reader = (mean(nats[name][i] for i in after) for name in (FULL, ALONE, by))
    return (alone - reader) / (alone - full) if alone != reader else 0.0


def table(nats: dict[str, list[float]], tokens: int) -> list[dict]:
    columns = [f"{start}-{end}" for start, end in places(tokens)]
    return [{"nats per token": name, **dict(zip(columns, values))} for name, values in nats.items()]


def draw(nats: dict[str, list[float]], tokens: int, window: int, path: Path) -> None:
    plt = plots()
    figure, axes = plt.subplots(figsize=(7, 4))
    ends = [end for _, end in places(tokens)]
    for name, values in nats.items():
        if name == WITHOUT_SINKS:
            continue  # so far above that the others would be one line
        style = "k-" if name == FULL else "o--" if name in CONTROLS else "o-"
        axes.plot(ends, values, style, markersize=3, label=name)
    axes.axvline(window, color="black", linestyle=":", linewidth=0.8, label="window")
    axes.set(xscale="log", xlabel="place in the text (tokens)", ylabel="nats per token")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub name of the model that was grafted from")
    parser.add_argument("untuned", type=Path, help="folder of the graft, as titans graft has made it")
    parser.add_argument("graft", type=Path, help="folder of the graft when it was tuned")
    parser.add_argument("--gguf-file", metavar="NAME", help="the source's file, if it is GGUF")
    parser.add_argument("--texts", required=True, metavar="GLOB", help="text files that neither was tuned on")
    parser.add_argument("--tokens", type=int, default=4096, help="of a text")
    parser.add_argument("--count", type=int, default=8, help="texts to read")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.graft)
    models = load(args, parser)
    texts, config = read_texts(args.texts, tokenizer, args.tokens, args.count), models[TUNED].config
    window = config.sliding_window
    nats = measure(models, texts)
    shares = {name: closed(nats, args.tokens, window, name) for name in (TUNED, *CONTROLS)}
    print(show(table(nats, args.tokens)))
    print(f"of the gap from the window of {window:,} to full attention is closed, beyond the window, by")
    for name, share in shares.items():
        print(f"{100 * share:6.1f} %  {name}")
    found = {
        "places": places(args.tokens),
        "window": window,
        "sinks": config.attention_sinks,
        "dtype": args.dtype,
        "texts": len(texts),
        "nats": nats,
        "closed": {name: round(share, 4) for name, share in shares.items()},
    }
    if args.record:
        write_record(args.record, source=args.source, graft=args.graft.as_posix(), **found)
        draw(nats, args.tokens, window, args.record.with_suffix(".png"))
    return found
