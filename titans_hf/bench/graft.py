"""Decoding rate and cache bytes of a graft beside its source, after growing contexts.

    python scripts/bench/graft.py SOURCE runs/graft --record model_cards/records/graft-speed

The graft reads every token of its contexts; the source's keys and values are drawn at random and take as long to attend
to. Both decode the same number of tokens, in turns; medians. Weights do not matter here, so an untuned graft will do.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from .. import TitansCache, TitansConfig
from ..records.files import plots, write_record
from .peers import HubModel, Shape, Titans
from .speed import interleaved, seconds_of


def peer_of(model: PreTrainedModel) -> HubModel:
    """The model behind the interface of the speed benchmark."""
    config = model.config
    kind = Titans if isinstance(config, TitansConfig) else HubModel
    return kind(model, Shape(config.hidden_size, config.num_hidden_layers, config.vocab_size))


def cache_bytes(state) -> int:
    """Bytes of a cache; of keys and values, where it holds nothing else."""
    if isinstance(state, TitansCache):
        return state.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in state.layers)


def measure(models: dict[str, PreTrainedModel], contexts: list[int], steps: int, repeats: int) -> list[dict]:
    """A row for every model and context."""
    torch.manual_seed(0)
    peers = {name: peer_of(model) for name, model in models.items()}
    places = [(name, context) for name in peers for context in sorted(contexts)]
    states = {place: peers[place[0]].begin(place[1], 1) for place in tqdm(places, desc="contexts")}

    def step_seconds(name: str, context: int) -> float:
        peer = peers[name]
        state = peer.fork(states[name, context])
        return seconds_of(peer.decode, state, peer.shape.draw(1, steps)) / steps

    times = interleaved({place: partial(step_seconds, *place) for place in places}, repeats, "decoding")
    return [
        {
            "model": name,
            "context": context,
            "context_was": peers[name].filled,
            "tokens_per_second": round(1 / times[name, context], 2),
            "cache_bytes": cache_bytes(states[name, context]),
        }
        for name, context in places
    ]


def draw(rows: list[dict], path: Path) -> None:
    plt = plots()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5))
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        contexts = [row["context"] for row in own]
        panels[0].plot(contexts, [row["tokens_per_second"] for row in own], "o-", label=name)
        panels[1].plot(contexts, [row["cache_bytes"] / 2**20 for row in own], "o-", label=name)
    for axes, title in zip(panels, ("decoding (tokens/s)", "cache (MiB)"), strict=True):
        axes.set(xscale="log", ylim=0, xlabel="context (tokens)", title=title)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub name of the model that was grafted from")
    parser.add_argument("graft", type=Path, help="folder of the graft, tuned or not")
    parser.add_argument("--gguf-file", metavar="NAME", help="the source's file, if it is GGUF")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    gguf = {} if args.gguf_file is None else {"gguf_file": args.gguf_file}
    models = {
        "source": AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32, **gguf).eval(),
        "graft": AutoModelForCausalLM.from_pretrained(args.graft, dtype=torch.float32).eval(),
    }
    rows = measure(models, args.contexts, args.steps, args.repeats)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.record:
        write_record(args.record, source=args.source, graft=args.graft.as_posix(), threads=args.threads, runs=rows)
        draw(rows, args.record.with_suffix(".png"))
    return rows
