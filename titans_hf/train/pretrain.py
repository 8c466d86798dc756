"""Pre-train a Titans model by a recipe, on transformers' Trainer; or teach a graft what its source knows.

    python scripts/train/pretrain.py scripts/recipes/debug-cpu.yaml
    python scripts/train/pretrain.py scripts/recipes/paper-15b.yaml --preset titans-mag-170m --dry-run
    python scripts/train/pretrain.py scripts/recipes/debug-cpu.yaml model.config.variant=mac training.tokens=100000
    accelerate launch --config_file scripts/recipes/accelerate/one-node.yaml \\
        scripts/train/pretrain.py scripts/recipes/paper-15b.yaml

A recipe's `out` gets `model/` with its tokenizer (written completely or not at all), `training.json`, `loss.png`,
`recipe.yaml` and `checkpoints/`. `--resume` continues from the last complete checkpoint, with the same data in the same
order, and ends with the weights of an uninterrupted run. Ctrl-C ends the run after the current step, with a checkpoint.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerState, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from ..records.files import write_record
from ..snapshots import whole_file
from .distil import DistilTrainer, first_place, load_student, load_teacher, merge_lora, overflowed
from .outputs import StopOnSignal, check_trackers, draw_losses, whole_folder
from .plan import Plan, make_plan
from .recipe import Recipe, first_difference, load_recipe
from .stream_trainer import COMPLETE, StreamTrainer, complete_checkpoints, perplexity, step_of, sum_losses
from .token_stream import START, TokenStream, held_out_rows, load_tokenizer, open_documents, open_tokenizer, stack_rows

MAY_CHANGE = (  # between a run and its resumption: what the weights do not depend on
    "out",
    "hardware",
    "training.data_workers",
    "training.log_every",
    "training.save_every",
    "training.keep_checkpoints",
    "training.eval_every",
    "training.report_to",
)


@dataclass
class Run:
    """A checked recipe, its folder, and the rank of this process."""

    recipe: Recipe
    plan: Plan
    out: Path
    rank: int
    checkpoint: Path | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def place(self) -> dict:
        """The position at which this process's stream continues."""
        if self.checkpoint is None:
            return START
        return json.loads((self.checkpoint / f"place-{self.rank}.json").read_text())

    @property
    def is_trained(self) -> bool:
        return self.checkpoint is not None and step_of(self.checkpoint) == self.plan.steps


def begin(recipe: Recipe, plan: Plan, resume: bool) -> Run:
    """The run of a recipe, with the checkpoint to resume from; a `ValueError` if it cannot start."""
    run = Run(recipe, plan, Path(recipe.out), int(os.environ.get("RANK", 0)))
    check_trackers(recipe.training.report_to, "training.report_to")
    saved = run.out / "recipe.yaml"
    if not resume:
        if run.is_main and run.out.exists() and any(run.out.iterdir()):
            raise ValueError(f"{run.out} is not empty: go on with --resume, or set another place with out=...")
        return run
    if not saved.exists():
        raise ValueError(f"there is no run to resume in {run.out}")
    changed = first_difference(load_recipe(saved), recipe, *MAY_CHANGE)
    if changed is not None:
        raise ValueError(f"`{changed}` is not what the run in {run.out} began with: set it back, or begin a new run")
    complete = complete_checkpoints(run.checkpoints)
    if complete:
        run.checkpoint = complete[-1]
        processes = json.loads((run.checkpoint / COMPLETE).read_text())["processes"]
        if processes != plan.batch.processes:
            raise ValueError(f"{run.checkpoint} is of {processes} processes, and these are {plan.batch.processes}")
    return run


def training_arguments(run: Run) -> TrainingArguments:
    t = run.recipe.training
    return TrainingArguments(
        str(run.checkpoints),
        project="titans-hf",  # for trackio
        run_name=run.out.name,
        max_steps=run.plan.steps,
        per_device_train_batch_size=t.rows_per_device,
        per_device_eval_batch_size=t.rows_per_device,
        gradient_accumulation_steps=run.plan.batch.accumulation,
        learning_rate=t.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(t.warmup * run.plan.steps),
        weight_decay=t.weight_decay,
        adam_beta1=t.beta1,
        adam_beta2=t.beta2,
        max_grad_norm=t.clip,
        bf16=t.precision == "bf16",
        gradient_checkpointing=t.gradient_checkpointing,
        dataloader_num_workers=t.data_workers,
        logging_steps=t.log_every,
        logging_nan_inf_filter=False,
        save_steps=t.save_every,
        save_total_limit=t.keep_checkpoints,
        eval_strategy="steps" if t.eval_every else "no",
        eval_steps=t.eval_every or None,
        report_to=t.report_to,
        seed=run.recipe.seed,
        remove_unused_columns=False,
        ignore_data_skip=True,  # the stream starts at its own position
        ddp_find_unused_parameters=False,
        use_cpu=not torch.accelerator.is_available(),
    )


def open_data(run: Run) -> tuple[PreTrainedTokenizerBase, list[dict]]:
    """The tokenizer, as the run began with it, and the rows to evaluate on."""
    recipe, data, held_out, saved = run.recipe, run.recipe.data, run.recipe.held_out, run.out / "tokenizer"
    vocab_size = recipe.configuration().vocab_size
    if saved.exists():
        tokenizer = load_tokenizer(saved, vocab_size)
    else:
        tokenizer = open_tokenizer(recipe.tokenizer, data, held_out.one_in, vocab_size)
    return tokenizer, held_out_rows(open_documents(data), tokenizer, data, held_out.one_in, held_out.rows)


def prepare_folder(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the recipe and the tokenizer, for other processes and for `--resume`; remove incomplete checkpoints."""
    run.out.mkdir(parents=True, exist_ok=True)
    for folder in run.checkpoints.glob("checkpoint-*"):
        if not (folder / COMPLETE).exists():
            rmtree(folder)
    with whole_file(run.out / "recipe.yaml") as file:
        file.write_text(run.recipe.to_yaml())
    if not (run.out / "tokenizer").exists():
        with whole_folder(run.out / "tokenizer") as folder:
            tokenizer.save_pretrained(folder)


def build_trainer(
    run: Run, arguments: TrainingArguments, tokenizer: PreTrainedTokenizerBase, evaluation: list[dict]
) -> StreamTrainer:
    recipe, data = run.recipe, run.recipe.data
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    documents = split_dataset_by_node(open_documents(data), run.rank, run.plan.batch.processes)
    set_seed(recipe.seed)
    kind = StreamTrainer
    if recipe.distil is not None:
        kind = partial(DistilTrainer, teacher=load_teacher(recipe), section=recipe.distil)
        model = load_student(recipe, run.checkpoint if run.is_trained else None)
        evaluation = overflowed(evaluation, first_place(recipe.distil, model.config))
    elif run.is_trained:
        model = AutoModelForCausalLM.from_pretrained(run.checkpoint, dtype=torch.float32)
    elif recipe.model.checkpoint is not None:
        model = AutoModelForCausalLM.from_pretrained(recipe.model.checkpoint, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(recipe.configuration(**tokens), dtype=torch.float32)
    return kind(
        model,
        arguments,
        train_dataset=TokenStream(documents, tokenizer, data, recipe.held_out.one_in, run.place),
        eval_dataset=evaluation,
        data_collator=stack_rows,
        processing_class=tokenizer,
        preprocess_logits_for_metrics=sum_losses,
        compute_metrics=perplexity,
    )


def train(run: Run, trainer: StreamTrainer) -> None:
    """Train to the last step; a signal ends the script here."""
    if run.is_trained:  # Trainer would take one step more
        trainer.state = TrainerState.load_from_json(str(run.checkpoint / "trainer_state.json"))
        return
    stop = StopOnSignal()
    trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    if stop.stopped:
        if run.is_main:
            reached = f"step {trainer.state.global_step} of {run.plan.steps}"
            print(f"stopped at {reached}; go on with --resume", file=sys.stderr)
        sys.exit(130)


def write_training_record(run: Run, trainer: StreamTrainer, held_out_perplexity: float) -> None:
    """What the model's card says of its training."""
    write_record(
        run.out / "training",
        recipe=run.recipe.model_dump(),
        parameters=run.plan.sizes.parameters,
        steps=trainer.state.global_step,
        tokens=trainer.state.global_step * run.plan.batch.tokens,
        seconds=sum(entry.get("train_runtime", 0) for entry in trainer.state.log_history),
        held_out_perplexity=held_out_perplexity,
        log=training_log(trainer.state.log_history),
    )


def training_log(history: list[dict]) -> dict[str, list]:
    """The steps that were logged, their losses, and the gradients' norms before they were clipped, if they were."""
    logged = [entry for entry in history if "loss" in entry]
    log = {"step": [entry["step"] for entry in logged]}
    for name in ("loss", "grad_norm"):
        log[name] = [round(entry[name], 4) if entry.get(name) is not None else None for entry in logged]
    return log


def finish(run: Run, trainer: StreamTrainer) -> None:
    """Evaluate, save the model and draw the losses."""
    found = [e for e in trainer.state.log_history if "eval_perplexity" in e and e["step"] == trainer.state.global_step]
    metrics = found[-1] if found else trainer.evaluate()
    trainer.model.config.use_cache = True  # Trainer has switched it off
    if run.recipe.distil is not None and run.recipe.distil.lora_rank:
        merge_lora(trainer.model)
    with whole_folder(run.out / "model", run.is_main) as folder:
        trainer.save_model(str(folder))
        if run.is_main:
            (folder / "training_args.bin").unlink()
    if run.is_main:
        write_training_record(run, trainer, metrics["eval_perplexity"])
        drawn = draw_losses(trainer.state.log_history, run.plan.batch.tokens, run.out / "loss.png")
        print(f"held-out perplexity {metrics['eval_perplexity']:.2f}; the model is in {run.out / 'model'}")
        print(f"losses: {run.out / 'loss.png'}" if drawn else "no loss.png: matplotlib is not installed")


def start(args: argparse.Namespace) -> None:
    """Check everything, then train; a mistake of the user's ends in one line."""
    try:
        recipe = load_recipe(args.recipe, args.settings)
        plan = make_plan(recipe, recipe.hardware.gpus if args.dry_run else int(os.environ.get("WORLD_SIZE", 1)))
        if args.dry_run:
            print(plan)
            return
        run = begin(recipe, plan, args.resume)
        if (run.out / "model").exists():
            print(f"nothing is left to do: {run.out / 'model'} is complete")
            return
        arguments = training_arguments(run)
        with arguments.main_process_first(local=False):
            if run.is_main:
                print(plan, flush=True)
            tokenizer, evaluation = open_data(run)
            if run.is_main:
                prepare_folder(run, tokenizer)
        trainer = build_trainer(run, arguments, tokenizer, evaluation)
    except ValueError as error:
        sys.exit(f"error: {error}")
    train(run, trainer)
    finish(run, trainer)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a YAML file such as scripts/recipes/debug-cpu.yaml")
    parser.add_argument("settings", nargs="*", metavar="section.field=value", help="fields that differ from the recipe")
    parser.add_argument("--preset", help="short for model.preset=...")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in `out`")
    parser.add_argument("--dry-run", action="store_true", help="print the plan on the recipe's `hardware` and exit")
    args = parser.parse_intermixed_args(argv)
    if args.preset:
        args.settings.append(f"model.preset={args.preset}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the script has messages of its own
    disable_progress_bar()  # of saving and loading; training has its own
    try:
        start(args)
    except KeyboardInterrupt:
        print("stopped at once; --resume goes on from the last complete checkpoint, if there is one", file=sys.stderr)
        sys.exit(130)
