"""What a trained memory does: are its keys different, does it answer differently, is it less surprised the second time?

    python scripts/studies/probe.py runs/small/lmm/model --text book.txt --record model_cards/records/probe-lmm
    titans probe runs/demo --text book.txt

The text is read twice, one pass after the other, so that a memory can show what it kept. Per layer, over all heads:

- key overlap: the mean inner product of two different keys of the text, which are unit vectors; and the share of their
  variance that lies in one direction. A memory cannot tell alike keys apart.
- common answer: the share of the memory's answers, to all keys of the text, that is one vector. 1 is a running mean.
- surprise: the memory's loss over the loss of an empty one, on the first and on the second pass. Below 1 it predicts.
- dead heads: those whose answers have all but vanished beside the values they were given.

And the worth of the memory by place in the text: nats per token with the memory never written, minus those with it.

Axis letters: L layers, H heads, T tokens, D head width.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .. import TitansCache
from ..memory_layer import NeuralMemory
from ..memory_ops import recall
from ..records.files import plots, write_record
from .places import places, token_losses

DEAD = 1e-4  # of the size of the values: smaller answers than this come from a head that is dead


@dataclass
class LayerProbe:
    """What the memory of one layer does; means over its heads."""

    key_overlap: float
    key_direction: float  # the share of the keys' variance in their largest direction
    common_answer: float
    surprise_first: float
    surprise_second: float
    theta: float
    eta: float
    alpha: float
    dead_heads: int


@dataclass
class Probe:
    """What the memories of a model do with a text of `tokens` tokens that is read twice."""

    tokens: int
    layers: list[LayerProbe]
    places: list[tuple[int, int]]
    loss: list[float]  # nats per token at the places of the first pass
    loss_off: list[float]  # the same with the memory never written
    surprise: list[float]  # per token of both passes, mean over layers

    @property
    def worth(self) -> list[float]:
        return [off - on for on, off in zip(self.loss, self.loss_off, strict=True)]

    @property
    def second_over_first(self) -> float:
        """The surprise on the second pass over that on the first; below a half the memory has kept the text."""
        first, second = (sum(getattr(layer, name) for layer in self.layers) for name in FIRST_AND_SECOND)
        return second / first


FIRST_AND_SECOND = ("surprise_first", "surprise_second")


def probe(model: PreTrainedModel, ids: Tensor) -> Probe:
    """Probe a Titans model with one text, [T]."""
    ids = ids.flatten().to(model.device)
    tokens = len(ids)
    if tokens < 16:
        raise ValueError(f"the text has {tokens} tokens: probe with 16 or more")
    trace = model.trace_surprise(torch.cat((ids, ids)))
    keys, values, carries = _read(model, ids)
    relative = trace.relative()  # [L, H, 2 T]
    layers = []
    for i, (k, v, carry) in enumerate(zip(keys, values, carries, strict=True)):
        answers = recall(carry.state.current()[0], k[None])[0].transpose(0, 1)  # [H, T, D]
        gates = (getattr(trace, name)[i].mean().item() for name in ("theta", "eta", "alpha"))
        overlap, direction = key_likeness(k.transpose(0, 1))
        layers.append(
            LayerProbe(
                overlap,
                direction,
                common_share(answers),
                *(_median_of_heads(part) for part in relative[i].split(tokens, dim=-1)),
                *gates,
                dead_heads(answers, v.transpose(0, 1)),
            )
        )
    on, off = (token_losses(model, ids, memory_read_only=read_only) for read_only in (False, True))
    stretches = places(tokens)
    losses = [[x[start:end].mean().item() for start, end in stretches] for x in (on, off)]
    return Probe(tokens, layers, stretches, *losses, trace.per_token().tolist())


def key_likeness(k: Tensor) -> tuple[float, float]:
    """Of keys [H, T, D] of length 1: the mean inner product of two, and the share of their largest direction."""
    T = k.shape[1]
    overlap = (k.sum(1).square().sum(-1) - T) / (T * (T - 1))
    variance = k.mT @ k / T
    return overlap.mean().item(), torch.linalg.eigvalsh(variance)[:, -1].mean().item()


def common_share(answers: Tensor) -> float:
    """The share of answers [H, T, D] that is one vector for all tokens."""
    mean = answers.mean(1).square().sum(-1)
    return (mean / answers.square().sum(-1).mean(1).clamp(min=torch.finfo(mean.dtype).tiny)).mean().item()


def dead_heads(answers: Tensor, values: Tensor) -> int:
    """How many heads answer next to nothing, in units of their values."""
    size, expected = (x.square().mean((1, 2)).sqrt() for x in (answers, values))
    return int((size <= DEAD * expected).sum())


def _median_of_heads(relative: Tensor) -> float:
    """The mean over tokens of the median over heads, [H, T]: a single diverged head does not change it much."""
    return relative.median(dim=0).values.mean().item()


def _read(model: PreTrainedModel, ids: Tensor):
    """Keys and values [T, H, D] of every layer, and what its memory carries after the text."""
    memories = [layer.memory for layer in model.base_model.layers if layer.memory is not None]
    cache = TitansCache(model.config, rewind=False)
    with torch.no_grad(), _written(memories) as records:
        model.base_model(ids[None], past_key_values=cache, use_cache=True)
    keys, values = ([torch.cat(parts) for parts in xs] for xs in zip(*(zip(*parts) for parts in records)))
    return keys, values, [layer.carry.own for layer in cache.layers if layer.carry.own is not None]


@contextmanager
def _written(memories: list[NeuralMemory]) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """A list per memory that gets, inside the context, the keys and values [n, H, D] of every call."""
    records: list[list[tuple[Tensor, Tensor]]] = [[] for _ in memories]

    def hook(parts):
        def record(memory, args: tuple, options: dict, output: tuple) -> None:
            if "chunk_size" not in options:  # else the call for the persistent tokens, which are not part of the text
                parts.append((output[2].k[0].float(), output[2].v[0].float()))

        return record

    hooks = [memory.register_forward_hook(hook(parts), with_kwargs=True) for memory, parts in zip(memories, records)]
    try:
        yield records
    finally:
        for one in hooks:
            one.remove()


COLUMNS = {
    "key_overlap": "key overlap",
    "key_direction": "one direction",
    "common_answer": "common answer",
    "surprise_first": "surprise",
    "surprise_second": "second pass",
    "theta": "theta",
    "eta": "eta",
    "alpha": "alpha",
    "dead_heads": "dead heads",
}


def in_words(found: Probe) -> str:
    """The figures as a table, one line per layer, and one per place in the text."""
    lines = ["layer" + "".join(f"{name:>15}" for name in COLUMNS.values())]
    for i, layer in enumerate(found.layers):
        values = (getattr(layer, name) for name in COLUMNS)
        lines.append(f"{i:<5}" + "".join(f"{x:>15}" if isinstance(x, int) else f"{x:>15.4f}" for x in values))
    lines += ["", f"{'tokens':<13}{'nats':>8}{'off':>8}{'worth':>8}"]
    for (start, end), on, off, worth in zip(found.places, found.loss, found.loss_off, found.worth, strict=True):
        lines.append(f"{f'{start}-{end}':<13}{on:>8.3f}{off:>8.3f}{worth:>8.3f}")
    lines += ["", f"surprise on the second pass over that on the first: {found.second_over_first:.3f}"]
    return "\n".join(lines)


def draw(found: Probe, path: Path) -> None:
    """Surprise over both passes, and the worth of the memory by place."""
    plt = plots()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(2, 1))
    surprise = torch.tensor(found.surprise)
    window = max(1, found.tokens // 50)
    left.plot(surprise, color="tab:blue", alpha=0.25, linewidth=0.5)
    left.plot(range(window - 1, len(surprise)), surprise.unfold(0, window, 1).mean(1), color="tab:blue")
    left.axvline(found.tokens, color="tab:red", linestyle="--", linewidth=0.8, label="the same text again")
    left.axhline(1, color="black", linestyle=":", linewidth=0.8, label="an empty memory")
    left.set(xlabel="tokens read", ylabel="relative surprise", ylim=(0, 1.5), title="surprise of the memory")
    left.legend()
    ends = [end for _, end in found.places]
    right.plot(ends, found.loss, "o-", label="memory on")
    right.plot(ends, found.loss_off, "o-", color="tab:gray", label="never written")
    right.set(xscale="log", xlabel="place in the text", ylabel="nats per token", title="loss by place")
    right.set_xticks(ends, map(str, ends))
    right.set_xticks([], minor=True)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def first_tokens(path: Path, tokenizer, tokens: int) -> Tensor:
    ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids[:tokens]
    return torch.tensor(ids)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a Titans model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a text file; its first tokens are read")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    found = probe(model, first_tokens(args.text, AutoTokenizer.from_pretrained(args.model), args.tokens))
    print(in_words(found))
    if args.record:
        content = asdict(found) | {"worth": found.worth, "second_over_first": found.second_over_first}
        write_record(args.record, model=args.model.as_posix(), text=args.text.name, **content)
        draw(found, args.record.with_suffix(".png"))
