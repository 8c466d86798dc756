"""transformers' Trainer on an endless stream of rows: checkpoints with their position in it, and the perplexity."""

import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from ..snapshots import whole_file
from .outputs import leave_signals_to_the_parent
from .token_stream import START, stack_rows

COMPLETE = "complete.json"  # written last: a checkpoint without it is incomplete


class StreamTrainer(Trainer):
    """A Trainer that tracks its position in the stream. Each process reads its own documents."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.place = START
        self.add_callback(Completion(self))

    def get_train_dataloader(self) -> DataLoader:
        """Without accelerate, which would let one process read for all, or all processes read everything."""
        return DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=stack_rows,
            num_workers=self.args.dataloader_num_workers,
            worker_init_fn=leave_signals_to_the_parent,
            pin_memory=self.args.device.type == "cuda",
        )

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in batches:
            self.place = batch.pop("place")
        return batches, items

    def get_decay_parameter_names(self, model) -> list[str]:
        """Matrices alone: decay would pull norms, biases and the memory's start towards zero, and switch them off."""
        return [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]


class Completion(TrainerCallback):
    """Adds every process's position in the stream to a checkpoint, then the mark that it is complete."""

    def __init__(self, trainer: StreamTrainer):
        self.trainer = trainer

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / f"place-{args.process_index}.json").write_text(json.dumps(self.trainer.place))
        self.trainer.accelerator.wait_for_everyone()
        if args.should_save:
            with whole_file(folder / COMPLETE) as file:
                file.write_text(json.dumps({"processes": args.world_size}))


def sum_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Per row, [B, 2]: the sum of its tokens' losses, and their number."""
    labels = labels[:, 1:]
    losses = nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, reduction="none")
    return torch.stack((losses.sum(1), (labels != -100).sum(1)), dim=1)


def perplexity(prediction) -> dict[str, float]:
    total, count = prediction.predictions.astype("float64").sum(0)
    return {"perplexity": math.exp(total / count)}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[-1])


def complete_checkpoints(folder: Path) -> list[Path]:
    return sorted((mark.parent for mark in folder.glob(f"checkpoint-*/{COMPLETE}")), key=step_of)
