"""One training of the DNA study: batches, epochs, the epoch that is best on dev, and its scores on the test split.

Axes: B rows, T letters.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from ..configuration_titans import VARIANTS
from ..dna import dna_tokenizer
from ..dna.data import Examples, Task, checked, read_task
from ..dna.scores import accuracy, mcc
from ..records.files import write_text
from .dna_models import build, parameters

WARMUP = 0.05  # of all steps
LOWEST = 0.1  # of the learning rate, at the end
SORTED_BATCHES = 16  # shuffled rows are sorted by length over so many batches
EVALUATED_TOKENS = 2**15  # at a time


@dataclass(frozen=True)
class Run:
    """One training. Whatever changes its result is in it; where the data lie is not."""

    task: str  # a path in the folder of the data
    model: str
    lr: float
    seed: int
    fold: int | None
    folds: int
    epochs: int
    batch: int
    weight_decay: float
    rows: int | None  # to train on, of those there are
    evaluated: int | None  # rows of dev and of test

    @property
    def name(self) -> str:
        """The name of its file: readable, and another one where anything differs."""
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        fold = "" if self.fold is None else f"fold{self.fold}"
        parts = (self.task.replace("/", "-"), self.model, f"lr{self.lr:g}", f"seed{self.seed}", fold, digest)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Encoded:
    """Rows of token ids without padding, and their classes."""

    ids: list[Tensor]
    labels: list[int]
    padding: int

    @classmethod
    def of(cls, examples: Examples) -> "Encoded":
        tokenizer = dna_tokenizer()
        ids = [torch.tensor(row) for row in tokenizer(examples.sequences).input_ids]
        return cls(ids, examples.labels, tokenizer.pad_token_id)

    def batch(self, rows: list[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Token ids and mask [B, T], padded on the left, and labels [B]. Rows of equal length need no mask."""
        own = [self.ids[i] for i in rows]
        ids = nn.utils.rnn.pad_sequence(own, True, self.padding, padding_side="left")
        lengths = torch.tensor([len(row) for row in own])
        mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
        return ids, None if bool(mask.all()) else mask, torch.tensor([self.labels[i] for i in rows])

    def tokens(self) -> int:
        return sum(map(len, self.ids))


def batches(data: Encoded, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Row numbers in batches of one epoch: in random order, and rows of like length together."""
    order, found = torch.randperm(len(data.labels), generator=generator).tolist(), []
    for start in range(0, len(order), SORTED_BATCHES * size):
        stretch = sorted(order[start : start + SORTED_BATCHES * size], key=lambda i: len(data.ids[i]))
        found += [stretch[i : i + size] for i in range(0, len(stretch), size)]
    for i in torch.randperm(len(found), generator=generator).tolist():
        yield found[i]


@torch.no_grad()
def predictions(model: nn.Module, data: Encoded, **options) -> list[int]:
    """The class of every row, in the order of the rows."""
    model.eval()
    found, order = [0] * len(data.labels), sorted(range(len(data.labels)), key=lambda i: len(data.ids[i]))
    size = max(1, EVALUATED_TOKENS // len(data.ids[order[-1]]))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        ids, mask, _ = data.batch(rows)
        for i, said in zip(rows, model(ids, attention_mask=mask, **options).logits.argmax(-1).tolist()):
            found[i] = said
    model.train()
    return found


def train(run: Run, model: nn.Module, data: Encoded, dev: Encoded, quiet: bool = False) -> tuple[list[dict], dict]:
    """What every epoch came to, and the weights of the one with the highest MCC on dev."""
    steps = run.epochs * math.ceil(len(data.labels) / run.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
    warmup = max(1, round(WARMUP * steps))
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=LOWEST)
    generator, curve, best = torch.Generator().manual_seed(run.seed), [], {}
    with tqdm(total=steps, desc=f"{run.task} {run.model}", disable=quiet, leave=False) as bar:
        for epoch in range(1, run.epochs + 1):
            losses, started, worked = [], time.time(), time.process_time()
            for rows in batches(data, run.batch, generator):
                losses.append(step(model, optimizer, *data.batch(rows)))
                schedule.step()
                bar.update()
            times = {"seconds": time.time() - started, "processor_seconds": time.process_time() - worked}
            said = predictions(model, dev)
            scores = {"mcc": mcc(said, dev.labels), "accuracy": accuracy(said, dev.labels)}
            if not curve or scores["mcc"] > max(one["mcc"] for one in curve):
                best = {name: value.clone() for name, value in model.state_dict().items()}
            curve.append({"epoch": epoch, "loss": sum(losses) / len(losses), **times, **scores})
            bar.set_postfix(loss=f"{curve[-1]['loss']:.3f}", mcc=f"{scores['mcc']:.3f}")
    return curve, best


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, mask: Tensor | None, labels: Tensor) -> float:
    """One step of training; returns the loss."""
    loss = nn.functional.cross_entropy(model(ids, attention_mask=mask).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def some_of(examples: Examples, rows: int | None) -> Examples:
    """So many rows, the same for every run; all of them where there are no more."""
    if rows is None or rows >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    return examples.pick(order[:rows])


def read_run(run: Run, data: Path, longest: int) -> Task:
    """The run's task, with as many rows as it takes."""
    task = read_task(data / run.task, longest, run.fold, run.folds)
    dev, test = (some_of(split, run.evaluated) for split in (task.dev, task.test))
    return checked(Task(some_of(task.train, run.rows), dev, test, task.classes), data / run.task)


def perform(run: Run, out: Path, data: Path, longest: int, quiet: bool = False) -> None:
    """Train and test one run, and write its file."""
    task = read_run(run, data, longest)
    splits = {name: Encoded.of(getattr(task, name)) for name in ("train", "dev", "test")}
    model = build(run.model, task.classes, run.seed).train()
    curve, best = train(run, model, splits["train"], splits["dev"], quiet)
    model.load_state_dict(best)
    test, chosen = splits["test"], max(curve, key=lambda one: one["mcc"])
    said = predictions(model, test)
    measured = {
        "parameters": parameters(model),
        "train_rows": len(task.train),
        "dev_rows": len(task.dev),
        "test_rows": len(task.test),
        "chosen_epoch": chosen["epoch"],
        "dev_mcc": chosen["mcc"],
        "mcc": mcc(said, test.labels),
        "accuracy": accuracy(said, test.labels),
        "commonest": max(map(test.labels.count, set(test.labels))) / len(test.labels),
        "curve": curve,
    }
    read = run.epochs * splits["train"].tokens()
    for name in ("second", "processor_second"):  # of all threads together: other work on the machine does not count
        measured[f"tokens_per_{name}"] = read / sum(one[f"{name}s"] for one in curve)
    if run.model in VARIANTS:
        measured["mcc_off"] = mcc(predictions(model, test, memory_read_only=True), test.labels)
    write_text(out / f"{run.name}.json", json.dumps({**asdict(run), **measured}, indent=1) + "\n")
