"""What a graft's memory is worth: nats per token by place, beside its source with full attention and the window alone.

    python scripts/studies/graft.py SOURCE runs/graft-memory/model --texts 'held-out/*.txt' --tokens 4096

The window alone is the graft with its memory never written. The figure is the share of the gap between the window and
full attention that the memory closes, over the places whose window has overflowed. The control is the memory of
another text: the graft has read that one, and reads the text without writing. What it closes, too, is not memory of
this text: the branch may have learned to make up for something that a window always lacks.
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


def measure(source: PreTrainedModel, graft: PreTrainedModel, texts: list[Tensor]) -> dict[str, list[float]]:
    """Losses by place: full attention, the window alone, the graft, and the graft with the memory of another text."""
    found: dict[str, list[Tensor]] = {"full attention": [], "window alone": [], "graft": [], "another's memory": []}
    for text, other in tqdm(list(zip(texts, [*texts[1:], texts[0]])), desc="texts"):
        found["full attention"].append(token_losses(source, text))
        found["window alone"].append(token_losses(graft, text, memory_read_only=True))
        found["graft"].append(token_losses(graft, text))
        found["another's memory"].append(with_memory_of(graft, other, text))
    return {name: by_place(losses) for name, losses in found.items()}


def closed(nats: dict[str, list[float]], tokens: int, window: int, by: str = "graft") -> float:
    """The share of the gap between window and full attention that one of the readers closes, beyond the window."""
    after = [i for i, (start, _) in enumerate(places(tokens)) if start >= window]
    if not after:
        raise ValueError(f"--tokens: {tokens:,} tokens do not reach far enough beyond the window of {window:,}")
    full, alone, reader = (mean(nats[name][i] for i in after) for name in ("full attention", "window alone", by))
    return (alone - reader) / (alone - full) if alone != reader else 0.0


def table(nats: dict[str, list[float]], tokens: int) -> list[dict]:
    columns = [f"{start}-{end}" for start, end in places(tokens)]
    return [{"nats per token": name, **dict(zip(columns, values))} for name, values in nats.items()]


def draw(nats: dict[str, list[float]], tokens: int, window: int, path: Path) -> None:
    plt = plots()
    figure, axes = plt.subplots(figsize=(7, 4))
    ends = [end for _, end in places(tokens)]
    styles = {"full attention": "k-", "window alone": "o-", "graft": "o-", "another's memory": "o--"}
    for name, values in nats.items():
        axes.plot(ends, values, styles[name], markersize=3, label=name)
    axes.axvline(window, color="black", linestyle=":", linewidth=0.8, label="window")
    axes.set(xscale="log", xlabel="place in the text (tokens)", ylabel="nats per token")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub name of the model that was grafted from")
    parser.add_argument("graft", type=Path, help="folder of the graft, tuned or not")
    parser.add_argument("--gguf-file", metavar="NAME", help="the source's file, if it is GGUF")
    parser.add_argument("--texts", required=True, metavar="GLOB", help="text files that neither was tuned on")
    parser.add_argument("--tokens", type=int, default=4096, help="of a text")
    parser.add_argument("--count", type=int, default=8, help="texts to read")
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.graft)
    gguf = {} if args.gguf_file is None else {"gguf_file": args.gguf_file}
    source = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32, **gguf).eval()
    graft = AutoModelForCausalLM.from_pretrained(args.graft, dtype=torch.float32).eval()
    if not isinstance(graft.config, TitansConfig):
        parser.error(f"{args.graft} is not a Titans model; make one with titans graft {args.source} --out DIR")
    texts, window = read_texts(args.texts, tokenizer, args.tokens, args.count), graft.config.sliding_window
    nats = measure(source, graft, texts)
    share = closed(nats, args.tokens, window)
    of_another = closed(nats, args.tokens, window, "another's memory")
    print(show(table(nats, args.tokens)))
    print(
        f"beyond the window of {window:,} the graft closes {100 * share:.0f} % of the gap to full attention, and "
        f"{100 * of_another:.0f} % with the memory of another text: the difference is what it remembers of this one"
    )
    found = {
        "places": places(args.tokens),
        "window": window,
        "texts": len(texts),
        "nats": nats,
        "closed": round(share, 4),
        "closed_by_another": round(of_another, 4),
    }
    if args.record:
        write_record(args.record, source=args.source, graft=args.graft.as_posix(), **found)
        draw(nats, args.tokens, window, args.record.with_suffix(".png"))
    return found
