"""Runs of a study: trained and tested in processes of their own, each with a file; one that has its file is kept.

Every model gets the same tuning effort: each learning rate on the first seed, the best by held-out accuracy on the
points that were trained, and with that rate the other seeds.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, get_wsd_schedule

from ..configuration_titans import VARIANTS
from ..records.files import write_text
from .families import build, state_bytes
from .study import Run, Study, runs_of
from .tasks import TASKS, Task
from .tasks.task import UNLABELLED

LEARNED = 0.9  # of the answers of a training batch
CURVE = 10  # training steps between two numbers of the curve that a record keeps
TESTED_ROWS = 64


def task_of(run: Run) -> Task:
    return TASKS[run.task](**json.loads(run.task_settings))


def build_model(run: Run, task: Task) -> PreTrainedModel:
    sizes = {**json.loads(run.sizes), "vocab_size": task.vocabulary}
    model = build(run.family, sizes, sizes.pop("parameters"), run.seed, **run.model_fields())
    if task.decoder is not None:
        model.decoder = task.decoder(sizes["hidden_size"])
    return model


def answers(model: PreTrainedModel, ids: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The logits where something is asked, and what is wanted there; no others are computed."""
    hidden = model.base_model(ids, use_cache=False, **options).last_hidden_state
    asked = labels != UNLABELLED
    if hasattr(model, "decoder"):
        logits = model.decoder(hidden)
        return logits[asked[:, : logits.shape[1]]].float(), labels[asked]
    return model.lm_head(hidden[asked]).float(), labels[asked]


def train(run: Run, task: Task, progress: Callable[[str], None]) -> tuple[PreTrainedModel, dict]:
    model, generator = build_model(run, task).train(), torch.Generator().manual_seed(run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=run.weight_decay)
    warmup = max(1, run.steps // 10)
    schedule = get_wsd_schedule(optimizer, warmup, run.steps - warmup, num_stable_steps=0, min_lr_ratio=0.05)
    started, curve, largest, learned = time.time(), [], 0.0, None
    for step in range(run.steps):
        point = task.trained[step % len(task.trained)]
        logits, wanted = answers(model, *task.batch(run.batch_tokens, generator, point))
        F.cross_entropy(logits, wanted).backward()
        largest = max(largest, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append((logits.argmax(-1) == wanted).float().mean().item())
        if learned is None and len(curve) >= 2 * len(task.trained) and min(curve[-len(task.trained) :]) >= LEARNED:
            learned = step + 1
        if step % CURVE == CURVE - 1:
            progress(f"{step + 1}/{run.steps} {curve[-1]:.3f}")
    measured = {"parameters": model.num_parameters(), "seconds": round(time.time() - started, 1)}
    measured |= {"largest_gradient": largest, "steps_to_learn": learned, "curve": curve[::CURVE]}
    return model.eval(), measured


@torch.no_grad()
def accuracy(model: PreTrainedModel, task: Task, point: dict, seed: int, batch_tokens: int, **options) -> float:
    """The share of right answers on fresh sequences."""
    generator, hits, asked, rows = torch.Generator().manual_seed(seed), 0, 0, 0
    while rows < TESTED_ROWS:
        ids, labels = task.batch(batch_tokens, generator, point)
        logits, wanted = answers(model, ids, labels, **options)
        hits += (logits.argmax(-1) == wanted).sum().item()
        asked += len(wanted)
        rows += len(ids)
    return hits / asked


def perform(run: Run, out: Path) -> None:
    """Train and test one run, and write its file."""
    progress, task = out / f"{run.name}.progress", task_of(run)
    model, measured = train(run, task, progress.write_text)
    validation = [accuracy(model, task, point, 20_000, run.batch_tokens) for point in task.trained]
    measured |= {"state_bytes": state_bytes(model), "chance": task.chance, "validation": mean(validation)}
    tests = list(task.tested.items())
    options = {"accuracy": {}, **({"memory_off": {"memory_read_only": True}} if run.family in VARIANTS else {})}
    for name, option in options.items():
        measured[name] = {
            point: accuracy(model, task, arguments, 10_000 + i, run.batch_tokens, **option)
            for i, (point, arguments) in enumerate(tests)
        }
    write_text(out / f"{run.name}.json", json.dumps({**asdict(run), **measured}, indent=1) + "\n")
    progress.unlink(missing_ok=True)


def perform_all(runs: list[Run], out: Path, jobs: int, perform: Callable = perform) -> list[dict]:
    """All runs, those that have no file in `jobs` processes of one thread; their records in the order of `runs`.

    With 0 jobs this process does them one by one.
    """
    left = [run for run in runs if not (out / f"{run.name}.json").exists()]
    if left:
        out.mkdir(parents=True, exist_ok=True)
        if jobs == 0:
            for run in left:
                perform(run, out)
        else:
            start = {"mp_context": get_context("spawn"), "initializer": torch.set_num_threads, "initargs": (1,)}
            with ProcessPoolExecutor(jobs, **start) as pool:
                waiting = [pool.submit(perform, run, out) for run in left]
                for done in tqdm(as_completed(waiting), desc="runs", total=len(waiting)):
                    done.result()
    return [json.loads((out / f"{run.name}.json").read_text()) for run in runs]


def measure(study: Study, out: Path, jobs: int) -> list[dict]:
    """The records of every setting and model with its best learning rate, seed by seed; and of the rates tried."""
    grid = [run for lr in study.training.lr for run in runs_of(study, lr, study.seeds[0])]
    best: dict[tuple[str, str], tuple[Run, dict]] = {}
    for run, record in zip(grid, perform_all(grid, out, jobs), strict=True):
        place = run.setting, run.model
        if place not in best or record["validation"] > best[place][1]["validation"]:
            best[place] = run, record
    seeded = [
        replace(run, lr=best[run.setting, run.model][0].lr)
        for seed in study.seeds
        for run in runs_of(study, study.training.lr[0], seed)
    ]
    return perform_all(seeded, out, jobs)


def expected_seconds(study: Study, out: Path, jobs: int) -> float:
    """How long the runs that have no file will take: some training steps of every setting and model are timed."""
    rates, (first, *others) = study.training.lr, study.seeds
    planned = [[run] for lr in rates for run in runs_of(study, lr, first)]
    for seed in others:  # with one of the rates, not known yet
        planned += map(list, zip(*(runs_of(study, lr, seed) for lr in rates), strict=True))
    left = [runs[0] for runs in planned if not any((out / f"{run.name}.json").exists() for run in runs)]
    step = {(run.setting, run.model): run for run in left}
    step = {place: seconds_per_step(run) for place, run in step.items()}
    return sum(step[run.setting, run.model] * run.steps for run in left) / max(1, jobs)


def seconds_per_step(run: Run) -> float:
    task, generator = task_of(run), torch.Generator().manual_seed(0)
    model = build_model(run, task)
    times = []
    for point in (task.trained[0], *task.trained):
        started = time.perf_counter()
        logits, wanted = answers(model, *task.batch(run.batch_tokens, generator, point))
        F.cross_entropy(logits, wanted).backward()
        times.append(time.perf_counter() - started)
    return mean(times[1:])  # the first one warms up
