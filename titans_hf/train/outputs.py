"""What training scripts share: folders written completely or not at all, a clean stop on signals, a loss curve."""

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import torch
from torch import distributed
from transformers import TrainerCallback


@contextmanager
def whole_folder(path: Path, is_main: bool = True) -> Iterator[Path]:
    """A temporary folder to write into. It gets its name at the end; the main process renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    if is_main:
        rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    try:
        yield unfinished
        if is_main:
            unfinished.rename(path)
    finally:
        if is_main:
            rmtree(unfinished, ignore_errors=True)


def check_trackers(names: list[str], field: str) -> None:
    """Refuse a tracker that is not installed before anything is started."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"`{field}` names {name}, which is not installed: pip install {name}")


class StopOnSignal(TrainerCallback):
    """Ctrl-C, or SIGTERM from a scheduler, ends the run after the current step; a second one ends it at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.asked, self.stopped, self.before = False, False, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args, state, control, **kwargs):
        asked = torch.tensor(int(self.asked), device=args.device)
        if args.world_size > 1:  # all processes stop after the same step
            distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
        if asked and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True
        return control


def leave_signals_to_the_parent(worker: int) -> None:
    """For data workers: Ctrl-C reaches them too, but the run needs them until the step ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def draw_losses(history: list[dict], tokens_per_step: int, path: Path) -> bool:
    """The loss of training and of held-out text against tokens; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 3.6))
    axes = figure.subplots()
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o--")):
        points = [(entry["step"] * tokens_per_step, entry[name]) for entry in history if name in entry]
        if points:
            axes.plot(*zip(*points), style, label=label, markersize=4)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True
