"""Multi-query associative recall, in the form of Zoology (Arora et al. 2023): how many pairs does a memory hold?

    python scripts/studies/mqar.py --models lmm,gdn --steps 1000 --record model_cards/records/mqar

A sequence shows pairs of a key and a value, then asks for every key again, at gaps drawn from a power law; the other
places hold random tokens. Models of two layers train on a mixture of small points of the grid, with every learning rate
of `--lr`, and are tested on all points. What is compared is the bytes of state, printed beside each model: a state of
another size holds another number of pairs. Runs are JSON files in `--out`; one that is there is not done again.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, get_wsd_schedule

from ..configuration_titans import VARIANTS, TitansConfig
from ..records.files import plots, write_record, write_text
from .families import FAMILIES, build
from .settings import numbers, read_fields, show

VOCABULARY = 8192
POWER = 0.01  # of the gaps, as Zoology's default
TRAINED = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))  # tokens, pairs
TESTED = (*TRAINED, (512, 64), (512, 128), (1024, 128), (1024, 256))
BATCH_TOKENS = 8192
LEARNED = 0.9  # of the answers of a training batch


@dataclass(frozen=True)
class Run:
    """One training: what is trained, and how."""

    model: str
    hidden_size: int
    steps: int
    lr: float
    seed: int
    fields: str = "{}"  # of the model's configuration, as JSON

    @property
    def name(self) -> str:
        own = "".join(c if c.isalnum() else "_" for c in self.fields.strip("{}"))
        return f"{self.model}-{own}-{self.hidden_size}-{self.steps}-lr{self.lr:g}-seed{self.seed}"

    def build(self) -> PreTrainedModel:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": self.hidden_size, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": max(1, self.hidden_size // 64), "window": 64}
        embedding = VOCABULARY * self.hidden_size
        start = {"embedding_range": self.hidden_size**-0.5, "mixer_scale": TitansConfig.mixer_initializer_scale}
        parameters = embedding + 2 * 12 * self.hidden_size**2
        start = {} if self.model in VARIANTS else start
        return build(self.model, sizes, parameters, self.seed, **start, **json.loads(self.fields))


def sample(rows: int, tokens: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [rows, tokens]; a label is the value at the place where its key is asked, else -100."""
    half = VOCABULARY // 2
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(half, VOCABULARY, (rows, pairs), generator=generator)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    ids[:, : 2 * pairs] = torch.stack((keys, values), dim=2).flatten(1)
    places = (tokens - 2 * pairs) // 2
    if places < pairs:
        raise ValueError(f"{tokens} tokens have no room for {pairs} pairs twice")
    weight = torch.arange(1, places + 1).double() ** (POWER - 1)
    gaps = torch.multinomial(weight.expand(rows, -1), pairs, generator=generator)
    asked = 2 * pairs + 2 * gaps
    labels = torch.full_like(ids, -100)
    ids.scatter_(1, asked, keys)
    labels.scatter_(1, asked, values)
    return ids, labels


def answers(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logits where a key is asked, and the values wanted there; no others are computed."""
    hidden = model.base_model(ids, use_cache=False).last_hidden_state
    asked = labels >= 0
    return model.lm_head(hidden[asked]).float(), labels[asked]


def train(run: Run, progress: Path) -> tuple[PreTrainedModel, dict]:
    model, generator = run.build().train(), torch.Generator().manual_seed(run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, run.steps // 10)
    schedule = get_wsd_schedule(optimizer, warmup, run.steps - warmup, num_stable_steps=0, min_lr_ratio=0.05)
    started, curve, largest, learned = time.time(), [], 0.0, None
    for step in range(run.steps):
        tokens, pairs = TRAINED[step % len(TRAINED)]
        logits, wanted = answers(model, *sample(BATCH_TOKENS // tokens, tokens, pairs, generator))
        F.cross_entropy(logits, wanted).backward()
        largest = max(largest, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append((logits.argmax(-1) == wanted).float().mean().item())
        if learned is None and len(curve) >= 2 * len(TRAINED) and min(curve[-len(TRAINED) :]) >= LEARNED:
            learned = step + 1
        if step % 10 == 9:
            progress.write_text(f"{step + 1}/{run.steps} {curve[-1]:.3f}")
    measured = {"parameters": model.num_parameters(), "seconds": round(time.time() - started, 1)}
    return model.eval(), {**measured, "largest_gradient": largest, "steps_to_learn": learned, "curve": curve[::10]}


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokens: int, pairs: int, rows: int = 64) -> float:
    generator, hits, asked = torch.Generator().manual_seed(10_000 + tokens + pairs), 0, 0
    for _ in range(max(1, rows * tokens // BATCH_TOKENS)):
        logits, wanted = answers(model, *sample(min(rows, BATCH_TOKENS // tokens), tokens, pairs, generator))
        hits += (logits.argmax(-1) == wanted).sum().item()
        asked += len(wanted)
    return hits / asked


def state_bytes(model: PreTrainedModel) -> int | None:
    """Bytes that the model carries per sequence beside windows and convolutions, in float32; None for attention."""
    config = model.config
    if config.model_type == "titans":
        start = model.base_model.layers[0].mixer.memory.start
        copies = 2 if config.memory_momentum else 1
        return 4 * copies * config.num_hidden_layers * sum(W.numel() for W in start.weights)
    if config.model_type == "qwen3_next":
        heads, key, value = (
            getattr(config, f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        return 4 * config.num_hidden_layers * heads * key * value
    if config.model_type == "mamba2":
        return 4 * config.num_hidden_layers * config.num_heads * config.head_dim * config.state_size
    return None


def perform(run: Run, out: Path) -> None:
    """Train and test one run, and write its file; a process of its own calls this."""
    torch.set_num_threads(1)
    progress = out / f"{run.name}.progress"
    model, measured = train(run, progress)
    found = {f"{tokens}/{pairs}": accuracy(model, tokens, pairs) for tokens, pairs in TESTED}
    content = {**asdict(run), **measured, "state_bytes": state_bytes(model), "accuracy": found}
    write_text(out / f"{run.name}.json", json.dumps(content, indent=1) + "\n")
    progress.unlink(missing_ok=True)


def study(args: argparse.Namespace) -> list[dict]:
    """The record of every run."""
    runs = [
        Run(model, args.hidden_size, args.steps, lr, seed, args.fields.get(model, "{}"))
        for seed in args.seeds
        for model in args.models
        for lr in args.lr
    ]
    left = [run for run in runs if not (args.out / f"{run.name}.json").exists()]
    args.out.mkdir(parents=True, exist_ok=True)
    if left:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(perform, run, args.out) for run in left]
            for done in tqdm(waiting, desc="runs"):
                done.result()
    return [json.loads((args.out / f"{run.name}.json").read_text()) for run in runs]


def best(records: list[dict]) -> list[dict]:
    """Per model and seed the run of the learning rate with the best mean accuracy on the points that were trained."""

    def trained(record: dict) -> float:
        return sum(record["accuracy"][f"{tokens}/{pairs}"] for tokens, pairs in TRAINED)

    found: dict[tuple, dict] = {}
    for record in records:
        key = record["model"], record["fields"], record["seed"]
        found[key] = max(found.get(key, record), record, key=trained)
    return list(found.values())


def row(record: dict) -> dict:
    points = {point: f"{100 * hit:.1f}" for point, hit in record["accuracy"].items()}
    names = ("model", "lr", "seed", "parameters", "state_bytes", "steps_to_learn")
    return {
        **{name: record[name] for name in names},
        **points,
        "largest gradient": round(record["largest_gradient"], 2),
    }


def draw(records: list[dict], path: Path) -> None:
    """Accuracy over training, and on every point of the grid."""
    plt = plots()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    for record in records:
        label = (
            f"{record['model']}, {record['state_bytes'] / 1024:.0f} KiB" if record["state_bytes"] else record["model"]
        )
        curve = torch.tensor(record["curve"])
        left.plot(torch.arange(len(curve)) * 10, 100 * curve, linewidth=1, label=label)
        right.plot(list(record["accuracy"]), [100 * hit for hit in record["accuracy"].values()], "o-", label=label)
    left.set(xlabel="training step", ylabel="right answers (%)", title="while training on a mixture")
    right.set(xlabel="tokens / pairs", ylabel="right answers (%)", title="on fresh sequences", ylim=(0, 102))
    right.tick_params(axis="x", rotation=45)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lmm,gdn", help=f"some of {', '.join(FAMILIES)}")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=numbers, default=[3e-3, 1e-2], metavar="A,B", help="learning rates")
    parser.add_argument("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0], metavar="A,B")
    parser.add_argument("--set", action="append", default=[], metavar="MODEL.FIELD=VALUE", help="of a configuration")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/mqar"))
    parser.add_argument("--record", type=Path, help="write <record>.json and <record>.png")
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    args.fields = read_fields(parser, args)
    records = study(args)
    chosen = best(records)
    print(show([row(record) for record in chosen]))
    if args.record:
        write_record(args.record, trained=TRAINED, learned=LEARNED, best=chosen, runs=records)
        draw(chosen, args.record.with_suffix(".png"))
    return chosen
