"""One training of one forecaster, tested on all windows; and the errors of any forecaster on a split.

Axis letters: W windows, B of them side by side, C channels, L look-back, F forecast steps.
"""

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from .. import TitansForTimeSeriesPrediction
from ..records.files import write_text
from .series_data import Series, read_series
from .series_models import Forecaster, build

DROPPED_BATCH = 128  # older code left out the last incomplete batch of the test, and this is PatchTST's size of one
TESTED = 256  # windows side by side
read_once = cache(read_series)


@dataclass(frozen=True)
class Run:
    """One training of one model. Whatever changes its result is in it, except for where the file lies."""

    data: str
    horizon: int
    model: str
    fields: str  # of the model's configuration, as JSON
    look_back: int
    epochs: int
    patience: int
    batch: int
    stride: int
    lr: float
    weight_decay: float
    seed: int
    csv: str
    irregular: bool = False

    @property
    def facts(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "csv"}

    @property
    def name(self) -> str:
        """The name of its file: readable, and another one where anything differs."""
        digest = sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.data}-{self.horizon}-{self.model}-lr{self.lr:g}-seed{self.seed}-{digest}"


@dataclass
class Errors:
    """Squared and absolute errors of every window [W], summed over its observed targets, and their number."""

    squared: Tensor
    absolute: Tensor
    count: Tensor

    def mean(self, windows: int | None = None) -> dict[str, float]:
        """MSE and MAE over the first so many windows, by default all."""
        count = self.count[:windows].sum()
        if not count:
            return {"mse": math.nan, "mae": math.nan}
        sums = {"mse": self.squared, "mae": self.absolute}
        return {name: (of[:windows].sum() / count).item() for name, of in sums.items()}

    def without_last_batch(self) -> dict[str, float]:
        """The same without the last incomplete batch, as older code had it."""
        return self.mean(len(self.count) // DROPPED_BATCH * DROPPED_BATCH)


def split_window(windows: Tensor, look_back: int) -> tuple[Tensor, Tensor]:
    """Look-back [B, L, C] and targets [B, F, C] of windows [B, C, L + F]."""
    return windows[..., :look_back].transpose(1, 2), windows[..., look_back:].transpose(1, 2)


def mean_squared(forecast: Tensor, targets: Tensor) -> Tensor:
    wanted = ~targets.isnan()
    return (forecast - targets.nan_to_num(0.0)).mul(wanted).square().sum() / wanted.sum().clamp(min=1)


@torch.no_grad()
def errors(forecast: Callable[[Tensor], Tensor], windows: Tensor, look_back: int, name: str | None = None) -> Errors:
    """The errors of a forecaster on windows [W, C, L + F]; with a name, a progress bar."""
    found = []
    for part in tqdm(windows.split(TESTED), desc=name, disable=name is None, leave=False):
        values, targets = split_window(part, look_back)
        wanted = ~targets.isnan()
        error = ((forecast(values) - targets.nan_to_num(0.0)) * wanted).flatten(1).double()
        found.append((error.square().sum(1), error.abs().sum(1), wanted.flatten(1).sum(1)))
    return Errors(*(torch.cat(column) for column in zip(*found)))


def train(run: Run, series: Series, progress: Callable[[str], None]) -> tuple[nn.Module, dict]:
    """The model with the weights of its best epoch by validation, and what the training was like."""
    model = build(run.model, run.fields, run.look_back, run.horizon, len(series.channels), run.seed)
    windows = series.windows("train", run.look_back, run.horizon)
    held_out = series.windows("val", run.look_back, run.horizon)[:: run.stride]
    chosen = torch.arange(0, len(windows), run.stride)
    steps = -(-len(chosen) // run.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 2, steps * run.epochs)
    generator, started = torch.Generator().manual_seed(run.seed), time.time()
    best, kept, curve, training = math.inf, None, [], []
    for epoch in range(run.epochs):
        model.train()
        total = 0.0
        for step, picked in enumerate(chosen[torch.randperm(len(chosen), generator=generator)].split(run.batch)):
            values, targets = split_window(windows[picked], run.look_back)
            loss = mean_squared(model(values), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item()
            if step % 50 == 0:
                progress(f"epoch {epoch + 1}/{run.epochs} step {step}/{steps} loss {loss.item():.3f}")
        training.append(total / steps)
        curve.append(errors(model.eval(), held_out, run.look_back).mean()["mse"])
        if curve[-1] < best:
            best, kept = curve[-1], copy.deepcopy(model.state_dict())
        elif epoch - curve.index(best) >= run.patience:
            break
    if kept is None:
        raise ValueError(f"`lr` {run.lr} is too high: {run.name} has no finite validation error")
    model.load_state_dict(kept)
    measured = {"parameters": sum(p.numel() for p in model.parameters()), "seconds": round(time.time() - started, 1)}
    measured |= {
        "training_windows": len(chosen),
        "training_mse": training,
        "validation": best,
        "validation_curve": curve,
    }
    return model.eval(), measured


def example(model: nn.Module, windows: Tensor, look_back: int) -> dict[str, list[float]]:
    """The last channel in the middle of a split: look-back, targets and forecast."""
    values, targets = split_window(windows[len(windows) // 2][None], look_back)
    with torch.no_grad():
        found = {"past": values, "future": targets, "forecast": model(values)}
    return {name: [round(x, 4) for x in value[0, :, -1].tolist()] for name, value in found.items()}


def perform(run: Run, out: Path) -> None:
    """Train and test one run, and write its file. A Titans model is kept beside it."""
    series, progress = read_once(Path(run.csv), run.irregular), out / f"{run.name}.progress"
    tests = series.windows("test", run.look_back, run.horizon)
    model, measured = train(run, series, lambda text: progress.write_text(text + "\n"))
    tested = errors(model, tests, run.look_back)
    measured |= {**tested.mean(), "dropping": tested.without_last_batch(), "test_windows": len(tests)}
    measured |= {"channels": series.channels, "example": example(model, tests, run.look_back)}
    if run.model == "titans":
        model.model.save_pretrained(out / run.name)
    write_text(out / f"{run.name}.json", json.dumps({**run.facts, **measured}, indent=1) + "\n")
    progress.unlink(missing_ok=True)


def evaluate(
    model: TitansForTimeSeriesPrediction, path: Path, split: str = "test", irregular: bool = False, memory: str = "on"
) -> dict:
    """The errors of a saved forecaster on the scaled series of a CSV file; "off" never writes into its memory."""
    config, series = model.config, read_series(path, irregular)
    if len(series.channels) != config.num_input_channels:
        raise ValueError(
            f"{path} has {len(series.channels)} channels, and the model's `num_input_channels` is "
            f"{config.num_input_channels}: pass a file like the one that it was trained on"
        )
    windows = series.windows(split, config.context_length, config.prediction_length)
    forecast = Forecaster(model, memory_read_only=memory == "off")
    found = errors(lambda x: forecast(x.to(model.device)).cpu(), windows, config.context_length, series.name)
    facts = {"data": series.name, "sha256": sha256(path.read_bytes()).hexdigest(), "split": split, "memory": memory}
    facts |= {"look_back": config.context_length, "horizon": config.prediction_length}
    facts |= {"windows": len(windows), "channels": len(series.channels)}
    return {**facts, **found.mean(), "dropping": found.without_last_batch()}
