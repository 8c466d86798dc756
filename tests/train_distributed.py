"""Train tiny models by `accelerate launch`, first with DDP and then with FSDP2.

The losses of every variant, and its weights, go to FOLDER/ddp and FOLDER/fsdp:
accelerate launch --multi_gpu --num_processes 2 tests/train_distributed.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from support import VARIANTS, random_ids, tiny_model

STEPS, BATCH = 5, 4
MODES = ("ddp", "fsdp")


def make_accelerator(mode: str) -> Accelerator:
    AcceleratorState._reset_state()  # of the mode before; the processes stay joined
    if mode == "ddp":
        return Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate offers FSDP on accelerators only; its code for it runs on CPUs and gloo just as well
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def train(variant: str, accelerator: Accelerator | None = None) -> tuple[list[float], torch.nn.Module]:
    """The losses of the whole batch, step by step, and the model; without an accelerator, in this process alone."""
    model = tiny_model(variant).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [random_ids(1, 13, seed=i)[0] for i in range(STEPS * BATCH)]
    size = BATCH if accelerator is None else BATCH // accelerator.num_processes
    batches = torch.utils.data.DataLoader(rows, batch_size=size)
    if accelerator is not None:
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()[None] if accelerator is None else accelerator.gather(loss.detach()[None])
        losses.append(whole.mean().item())
    return losses, model


def read_different_documents(model: torch.nn.Module, rank: int) -> float:
    """A packed batch whose documents fall into one group of lengths on one rank and into three on the other."""
    lengths = (6, 6) if rank == 0 else (1, 3, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = random_ids(1, 12, seed=rank)
    loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
    loss.backward()
    return loss.item()


def run(mode: str, folder: Path) -> None:
    accelerator = make_accelerator(mode)
    folder.mkdir(exist_ok=True)
    report = {"processes": accelerator.num_processes}
    for variant in VARIANTS:
        losses, model = train(variant, accelerator)
        packed = read_different_documents(model, accelerator.process_index)
        report[variant] = {"losses": losses, "class": type(model).__name__, "packed": packed}
        accelerator.unwrap_model(model).save_pretrained(
            folder / variant,
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
            save_function=accelerator.save,
        )
        accelerator.wait_for_everyone()
        accelerator.free_memory()
    if accelerator.is_main_process:
        (folder / "report.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    for mode in MODES:
        run(mode, Path(sys.argv[1]) / mode)
    torch.distributed.destroy_process_group()
