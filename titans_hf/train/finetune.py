"""Fine-tune a Titans model on chats, prompts with completions, or plain text, with TRL; as an adapter, with PEFT.

    python scripts/train/finetune.py runs/demo --data chats.jsonl --out runs/chat
    python scripts/train/finetune.py runs/demo --data chats.jsonl --out runs/adapter --lora
    python scripts/train/finetune.py runs/demo --data chats.jsonl --out runs/merged --lora --merge

Every line of the data is a JSON object, all of one kind: {"messages": [{"role": "user", "content": "..."}, ...]},
{"prompt": "...", "completion": "..."} (the loss is on the completion alone) or {"text": "..."}. The folder `--out`
holds the model, or the adapter, and the tokenizer; it is written completely or not at all. Ctrl-C ends the run
after the current step and saves the model so far.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.utils.logging import disable_progress_bar

from .. import TitansConfig
from .outputs import StopOnSignal, check_trackers, whole_folder
from .recipe import TRACKERS

KINDS = ({"messages"}, {"prompt", "completion"}, {"text"})


def read_rows(path: Path) -> list[dict]:
    """The rows of a file, with the fields that training needs; a `ValueError` names the first bad line."""
    if not path.is_file():
        raise ValueError(f"--data: there is no file {path}")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"--data: line {number} of {path} is not JSON: {error}") from error
            rows.append(_checked(row, f"line {number} of {path}"))
    if not rows:
        raise ValueError(f"--data: {path} is empty")
    if len({frozenset(row) for row in rows}) > 1:
        raise ValueError(f"--data: the lines of {path} are of different kinds: keep one kind per file")
    return rows


def _checked(row, where: str) -> dict:
    kind = next((kind for kind in KINDS if isinstance(row, dict) and kind <= set(row)), None)
    if kind is None:
        raise ValueError(f'--data: {where} has neither "messages" nor "prompt" and "completion" nor "text"')
    row = {name: row[name] for name in sorted(kind)}
    if kind == {"messages"}:
        turns = row["messages"]
        if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
            raise ValueError(f'--data: {where}: "messages" must be a list of {{"role": "...", "content": "..."}}')
    elif not all(isinstance(value, str) and value for value in row.values()):
        raise ValueError(f"--data: {where}: {' and '.join(row)} must be text")
    return row


def _is_turn(turn) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(name), str) for name in ("role", "content"))


def load_config(folder: Path) -> TitansConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Titans checkpoint: it has no config.json")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, TitansConfig):
        raise ValueError(f"{folder} is not a Titans checkpoint, but {config.model_type!r}")
    return config


def load_tokenizer(folder: Path, rows: list[dict]) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer: {str(error).splitlines()[0]}") from error
    if "messages" in rows[0] and tokenizer.chat_template is None:
        raise ValueError(f"{folder}: the tokenizer has no chat template, which messages need; give prompts or text")
    return tokenizer


def build_trainer(args: argparse.Namespace, config: TitansConfig, tokenizer, rows: list[dict], folder: Path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    settings = SFTConfig(
        str(folder),
        project="titans-hf",  # for trackio
        run_name=args.out.name,
        num_train_epochs=args.epochs,
        max_steps=args.steps or -1,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=args.learning_rate or (2e-4 if args.lora else 2e-5),
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        max_length=args.max_length,
        packing=args.packing,
        gradient_checkpointing=args.gradient_checkpointing,
        bf16=has_bf16,
        use_cpu=not torch.accelerator.is_available(),
        logging_steps=args.log_every,
        logging_first_step=True,
        save_strategy="no",
        report_to=args.report_to,
        seed=args.seed,
    )
    # Small updates vanish in half precision: weights are trained in float32 and saved in their own dtype.
    dtype = config.dtype if args.lora and config.dtype else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype)
    data = Dataset.from_list(rows)
    return SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, peft_config=adapter(args))


def adapter(args: argparse.Namespace):
    """LoRA on every linear layer, or None."""
    if not args.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")


def save(args: argparse.Namespace, config: TitansConfig, trainer, folder: Path) -> None:
    trainer.model.config.use_cache = True  # Trainer has switched it off
    if args.merge:
        trainer.model = trainer.model.merge_and_unload()
    elif not args.lora:
        trainer.model.to(config.dtype or torch.float32)
    trainer.save_model(str(folder))
    (folder / "training_args.bin").unlink(missing_ok=True)


def start(args: argparse.Namespace) -> None:
    """Check everything, then train and save; a mistake of the user's ends in one line."""
    try:
        if args.merge and not args.lora:
            raise ValueError("--merge goes with --lora: without it there is nothing to merge")
        if args.out.exists():
            raise ValueError(f"--out: {args.out} exists: choose another place")
        check_trackers(args.report_to, "--report-to")
        rows, config = read_rows(args.data), load_config(args.checkpoint)
        tokenizer = load_tokenizer(args.checkpoint, rows)
    except ValueError as error:
        sys.exit(f"error: {error}")
    set_seed(args.seed)
    stop = StopOnSignal()
    with whole_folder(args.out, is_main=os.environ.get("RANK", "0") == "0") as folder:
        trainer = build_trainer(args, config, tokenizer, rows, folder)
        trainer.add_callback(stop)
        trainer.train()
        save(args, config, trainer, folder)
    what = "adapter" if args.lora and not args.merge else "model"
    if stop.stopped:
        reached = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
        print(f"stopped at {reached}; the {what} so far is in {args.out}", file=sys.stderr)
        sys.exit(130)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{len(rows)} rows, loss {losses[0]:.3f} to {losses[-1]:.3f}; the {what} is in {args.out}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="the folder of a Titans model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; it must not exist")
    parser.add_argument("--lora", action="store_true", help="train an adapter on every linear layer")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: 16)")
    parser.add_argument("--merge", action="store_true", help="save the model with its adapter merged in")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--batch", type=int, default=8, help="rows of a device (default: 8)")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, help="default: 2e-5, with --lora 2e-4")
    parser.add_argument("--max-length", type=int, default=2048, help="longer rows are cut (default: 2048)")
    parser.add_argument("--packing", action="store_true", help="rows side by side, each with its own memory")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--report-to", nargs="*", default=[], choices=TRACKERS)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    disable_progress_bar()  # of saving and loading; training has its own
    try:
        start(args)
    except KeyboardInterrupt:
        print("stopped at once; nothing was saved", file=sys.stderr)
        sys.exit(130)
