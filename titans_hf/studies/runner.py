"""Runs of a study: trained and tested in processes of their own, each with a file; one that has its file is kept.

Every model gets the same tuning effort: each learning rate on the first seed, the best by what the task chooses by,
and with that rate the other seeds. A Titans model is also tested with its memory switched off, and in whatever other
ways its study and its task say.
"""

import copy
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
from .tasks import METRICS, TASKS, Task
from .tasks.task import AS_TRAINED, UNLABELLED, Point, Reading, plainly

CURVE = 10  # training steps between two numbers of the curve that a record keeps
PIECE = 4096  # answers whose logits are made together in a test


def task_of(run: Run) -> Task:
    return TASKS[run.task](**json.loads(run.task_settings))


def build_model(run: Run, task: Task) -> PreTrainedModel:
    sizes = {**json.loads(run.sizes), "vocab_size": task.vocabulary}
    model = build(run.family, sizes, sizes.pop("parameters"), run.seed, **run.model_fields())
    if task.decoder is not None:
        model.decoder = task.decoder(sizes["hidden_size"])
    return model


def with_fields(model: PreTrainedModel, fields: dict) -> PreTrainedModel:
    """A model of the same weights under other fields of its configuration."""
    other = type(model)(type(model.config).from_dict({**model.config.to_dict(), **fields}))
    if hasattr(model, "decoder"):
        other.decoder = copy.deepcopy(model.decoder)
    other.load_state_dict(model.state_dict())
    return other.eval()


def answers(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logits where something is asked, and what is wanted there; no others are computed."""
    asked = labels != UNLABELLED
    if hasattr(model, "decoder"):
        logits = model.decoder(hidden)
        return logits[asked[:, : logits.shape[1]]].float(), labels[asked]
    return model.lm_head(hidden[asked]).float(), labels[asked]


def train(
    model: PreTrainedModel, task: Task, run: Run, progress: Callable[[str], None], lr: float, steps: int, first: int = 0
) -> dict:
    """Train a model from the step of number `first` on, and return what was measured."""
    model.train()
    generator = torch.Generator().manual_seed(run.seed + first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=run.weight_decay)
    warmup = max(1, round(run.warmup * steps))
    schedule = get_wsd_schedule(optimizer, warmup, steps - warmup, num_stable_steps=0, min_lr_ratio=run.last_lr)
    started, curve, largest, tokens, learned = time.time(), [], 0.0, 0, None
    for step in range(steps):
        ids, labels = task.training_batch(first + step, run.batch_tokens, generator)
        logits, wanted = answers(model, plainly(model, ids, labels), labels)
        F.cross_entropy(logits, wanted).backward()
        largest = max(largest, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += ids.numel()
        curve.append(task.metric.score(logits.detach(), wanted).mean().item())
        if learned is None and has_learned(task, curve):
            learned = step + 1
        if step % CURVE == CURVE - 1:
            progress(f"{step + 1}/{steps} {curve[-1]:.3f}")
    model.eval()
    seconds = time.time() - started
    measured = {"seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds)}
    return measured | {"largest_gradient": largest, "steps_to_learn": learned, "curve": curve[::CURVE]}


def has_learned(task: Task, curve: list[float]) -> bool:
    """Whether the last batches of all points were answered well."""
    points = len(task.trained)
    return task.metric.learned is not None and len(curve) >= 2 * points and min(curve[-points:]) >= task.metric.learned


@torch.no_grad()
def scores(model: PreTrainedModel, task: Task, ids: Tensor, labels: Tensor, reading: Reading) -> Tensor:
    """The score of every answer, [R, T], NaN where nothing was asked."""
    hidden, asked = reading(model, ids, labels), labels != UNLABELLED
    found = torch.full(labels.shape, torch.nan)
    if hasattr(model, "decoder"):
        found[asked] = task.metric.score(*answers(model, hidden, labels))
        return found
    parts = zip(hidden[asked].split(PIECE), labels[asked].split(PIECE))
    found[asked] = torch.cat([task.metric.score(model.lm_head(part).float(), wanted) for part, wanted in parts])
    return found


def tested(
    model: PreTrainedModel, task: Task, run: Run, points: dict[str, tuple[Point, int]], reading: Reading
) -> dict[str, float]:
    """The values of every test, by name; a test is a point and the seed of its sequences."""
    found = {}
    for name, (point, seed) in points.items():
        batches = task.test_batches(point, run.batch_tokens, seed)
        found |= task.values(name, [scores(model, task, *batch, reading) for batch in batches])
    return found


def validation(model: PreTrainedModel, task: Task, run: Run) -> float:
    """The value that learning rates are compared by."""
    points = task.trained if task.chosen_by is None else task.chosen_by
    found = [tested(model, task, run, {"": (point, 20_000)}, plainly) for point in points]
    return mean(map(task.overall, found))


def readings_of(run: Run, task: Task) -> dict[str, tuple[dict, Reading]]:
    """How a trained model is tested: by name, fields that are changed before, and how it reads."""
    if run.family not in VARIANTS:
        return {AS_TRAINED: ({}, plainly)}
    others = {in_words(fields): (fields, plainly) for fields in json.loads(run.read_with)}
    return {name: ({}, reading) for name, reading in task.readings().items()} | others


def stages_of(run: Run) -> list[dict]:
    """The second stages, each from the weights that training leaves: fields that change, and `steps` and `lr`."""
    return json.loads(run.then) if run.family in VARIANTS else []


def in_words(fields: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def perform(run: Run, out: Path) -> None:
    """Train and test one run, and write its file."""
    progress, task = out / f"{run.name}.progress", task_of(run)
    model = build_model(run, task)
    measured = train(model, task, run, progress.write_text, run.lr, run.steps)
    measured |= {"parameters": model.num_parameters(), "state_bytes": state_bytes(model), "chance": task.chance}
    measured |= {"metric": task.metric.name, "compared_by": task.compared_by, "about": task.about}
    measured["validation"] = validation(model, task, run)
    points = {name: (point, 10_000 + i) for i, (name, point) in enumerate(task.tested.items())}
    measured["tested"] = {
        name: tested(with_fields(model, fields) if fields else model, task, run, points, reading)
        for name, (fields, reading) in readings_of(run, task).items()
    }
    for stage in stages_of(run):
        other, own = go_on(model, task, run, stage, progress.write_text)
        name = f"{in_words(stage['fields'])}, {stage['steps']} steps more".removeprefix(", ")
        measured["tested"][name] = tested(other, task, run, points, plainly)
        measured.setdefault("stages", {})[name] = own
    found = next(iter(measured["tested"].values()))
    measured["shown"] = list(found if task.shown is None else task.shown)
    measured["overall"] = {name: task.overall(values) for name, values in measured["tested"].items()}
    write_text(out / f"{run.name}.json", json.dumps({**asdict(run), **measured}, indent=1) + "\n")
    progress.unlink(missing_ok=True)


def go_on(model: PreTrainedModel, task: Task, run: Run, stage: dict, progress: Callable) -> tuple:
    """The model of a second stage, and what was measured in it."""
    other = with_fields(model, stage["fields"])
    return other, train(other, task, run, progress, stage["lr"] or run.lr, stage["steps"], first=run.steps)


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


def tuned(study: Study, out: Path, jobs: int) -> list[dict]:
    """The records that learning rates are chosen by: every one of them, on the first seed."""
    return perform_all([run for lr in study.training.lr for run in runs_of(study, lr, study.seeds[0])], out, jobs)


def measure(study: Study, out: Path, jobs: int) -> list[dict]:
    """The records of every setting and model with its best learning rate, seed by seed."""
    best: dict[tuple[str, str], dict] = {}
    for record in tuned(study, out, jobs):
        found = best.setdefault((record["setting"], record["model"]), record)
        values = [record["validation"], found["validation"]]
        if values[0] != values[1] and METRICS[record["metric"]].best(values) == values[0]:
            best[record["setting"], record["model"]] = record
    seeded = [
        replace(run, lr=best[run.setting, run.model]["lr"])
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
    each = {(run.setting, run.model): run for run in left}
    each = {place: seconds_of(run) for place, run in each.items()}
    return sum(each[run.setting, run.model] for run in left) / max(1, jobs)


def seconds_of(run: Run) -> float:
    """About how long a run will take; refuses fields that do not fit its model, and text that does not suffice."""
    task, stages = task_of(run), stages_of(run)
    model, readings = build_model(run, task), readings_of(run, task)
    for fields in (*(fields for fields, _ in readings.values()), *(stage["fields"] for stage in stages)):
        with_fields(model, fields)
    further = max((stage["steps"] for stage in stages), default=0)
    task.training_batch(run.steps + further - 1, run.batch_tokens, torch.Generator().manual_seed(0))
    step, token = time_of(model, task, run)
    steps = run.steps + sum(stage["steps"] for stage in stages)
    read = sum(map(task.test_tokens, task.tested.values())) * (len(readings) + len(stages))
    read += sum(map(task.test_tokens, task.trained if task.chosen_by is None else task.chosen_by))
    return steps * step + read * token


def time_of(model: PreTrainedModel, task: Task, run: Run) -> tuple[float, float]:
    """Seconds of a training step, and of a token that is read in a test."""
    steps, tokens, generator = [], [], torch.Generator().manual_seed(0)
    for step in (0, *range(len(task.trained))):
        started = time.perf_counter()
        ids, labels = task.training_batch(step, run.batch_tokens, generator)
        logits, wanted = answers(model, plainly(model, ids, labels), labels)
        F.cross_entropy(logits, wanted).backward()
        steps.append(time.perf_counter() - started)
        started = time.perf_counter()
        scores(model, task, ids, labels, plainly)
        tokens.append((time.perf_counter() - started) / ids.numel())
    return mean(steps[1:]), mean(tokens[1:])  # the first one warms up
