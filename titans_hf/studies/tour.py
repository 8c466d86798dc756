"""A tour of titans-hf in about four minutes on a CPU, with nothing to download.

Trains a tokenizer and a small Titans on Python's own language reference, saves it and loads it back,
generates text, recalls facts from far beyond the attention window, draws the surprise, and runs lm-eval on held-out
text. Every step can be repeated alone:

    python scripts/demo.py --only remember

Axis letters: N tokens of a text or row.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from .. import TitansCache, TitansForCausalLM
from ..configuration_titans import VARIANTS
from ..records.files import write_record
from ..train.corpus import encode, read_corpus, train_tokenizer
from ..train.facts import Facts, recall, stretches
from ..train.small_model import FACTS, WINDOW, build_model, draw_losses, perplexity, train_model

GAP = 500  # tokens between the facts and the questions, at the test
TASK = "titans_held_out"


@dataclass
class Step:
    """One step of the tour: its result, and the command that repeats it."""

    name: str
    figure: str
    command: str


def train(args: argparse.Namespace) -> Step:
    text, held_out = read_corpus()
    tokenizer = train_tokenizer(text)
    tokens, held_out_tokens = encode(tokenizer, text), encode(tokenizer, held_out)
    model = build_model(args.variant, tokenizer)
    print(f"Titans {args.variant}, {model.num_parameters():,} parameters, attention window {WINDOW}")
    print(f"{len(tokens):,} tokens to train on, {len(held_out_tokens):,} held out")
    before = perplexity(model, held_out_tokens)
    started = time.perf_counter()
    curve = train_model(model, tokens, Facts.of(tokenizer), args.steps)
    rate = sum(point["tokens"] for point in curve) / (time.perf_counter() - started)
    after = perplexity(model, held_out_tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    draw_losses(curve, args.out / "loss.png")
    found = f"held-out perplexity {before:,.0f} -> {after:,.1f}; {args.steps} steps, {rate:,.0f} tokens/s, loss.png"
    return Step("train", found, f"{args.again} --only train --steps {args.steps}")


def load(out: Path) -> tuple[PreTrainedTokenizerBase, TitansForCausalLM]:
    """The saved tokenizer and model, by the Auto classes."""
    return AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out).eval()


def load_again(args: argparse.Namespace) -> Step:
    started = time.perf_counter()
    tokenizer, model = load(args.out)
    seconds = time.perf_counter() - started
    held_out = perplexity(model, encode(tokenizer, read_corpus()[1]))
    figure = f"{type(model).__name__} by AutoModelForCausalLM in {seconds:.1f} s, held-out perplexity {held_out:,.1f}"
    return Step("load", figure, f"{args.again} --only load")


def write(args: argparse.Namespace) -> Step:
    tokenizer, model = load(args.out)
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 120, "do_sample": True, "temperature": 0.7, "top_k": 40}
    started = time.perf_counter()
    ids = model.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    new = ids.shape[1] - inputs.input_ids.shape[1]
    return Step(
        "generate", f"{new} tokens, {new / (time.perf_counter() - started):,.0f}/s", f"{args.again} --only generate"
    )


def remember(args: argparse.Namespace) -> Step:
    """Facts, pages of other text, then the questions, far outside the attention window."""
    tokenizer, model = load(args.out)
    facts, held_out = Facts.of(tokenizer), encode(tokenizer, read_corpus()[1])
    generator = torch.Generator().manual_seed(args.seed)
    ids, asked = facts.rows(stretches(held_out, 32, GAP, generator), FACTS, generator)
    with_memory, without = (recall(model, ids, asked, read_only) for read_only in (False, True))

    text = ids[0, : facts.width(FACTS) + GAP]
    (args.out / "facts.txt").write_text(tokenizer.decode(text), encoding="utf-8")
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(text[None], past_key_values=cache)
    cache.save(args.out / "facts.safetensors", model, {"model": str(args.out.resolve()), "dtype": "float32"})
    show_answers(tokenizer, ids[0], asked[0], model)
    first = tokenizer.decode(ids[0, 1:3])
    print(f"ask it yourself: titans ask --memory {args.out}/facts.safetensors $'\\n{first}' --max-new-tokens 1")
    figure = (
        f"{100 * with_memory:.0f} % of {FACTS} facts recalled {GAP} tokens later (window {WINDOW}); "
        f"memory never written {100 * without:.0f} %, chance {100 * facts.chance:.0f} %"
    )
    return Step("remember", figure, f"{args.again} --only remember")


@torch.no_grad()
def show_answers(tokenizer, ids: torch.Tensor, asked: torch.Tensor, model: TitansForCausalLM) -> None:
    found = model(ids[None], use_cache=False).logits[0].argmax(-1)
    answers = []
    for place in asked.nonzero().flatten().tolist():
        name, wanted, got = (tokenizer.decode(x).strip() for x in (ids[place - 2], ids[place], found[place - 1]))
        answers.append(f"{name} = {got}" + ("" if got == wanted else f" (was {wanted})"))
    print(f"read {FACTS} facts and {GAP} tokens of other text; it answers: " + ", ".join(answers))


def surprise(args: argparse.Namespace) -> Step:
    """The surprise at facts when they are new, and when they return."""
    tokenizer, model = load(args.out)
    facts, held_out = Facts.of(tokenizer), encode(tokenizer, read_corpus()[1])
    generator = torch.Generator().manual_seed(args.seed)
    ids, asked = facts.rows(stretches(held_out, 1, 48, generator), FACTS, generator)
    trace = model.trace_surprise(ids, tokenizer=tokenizer)
    trace.show()
    trace.save_png(args.out / "surprise.png", f"Surprise of a small {args.variant}: facts, other text, facts again")
    trace.save_html(args.out / "surprise.html")
    known = trace.per_token()
    new = known[3 : facts.width(FACTS) : 4].mean().item()
    again = known[asked[0]].mean().item()
    figure = f"{new:.2f} at new facts, {again:.2f} when they return (1: nothing known); surprise.png, surprise.html"
    return Step("surprise", figure, f"{args.again} --only surprise")


def evaluate(args: argparse.Namespace) -> Step:
    """lm-eval's own perplexity of held-out text, as a task of its own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = args.out / "lm_eval"
    write_task(folder, read_corpus()[1])
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(args.out), "max_length": 2048, "device": "cpu"},
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
    results = found["results"][TASK]
    bits, per_byte = (results[f"{name},none"] for name in ("bits_per_byte", "byte_perplexity"))
    command = (
        f"lm_eval --model hf --model_args pretrained={args.out},trust_remote_code=True,max_length=2048 "
        f"--include_path {folder} --tasks {TASK}"
    )
    return Step("evaluate", f"lm-eval: {bits:.3f} bits per byte, byte perplexity {per_byte:.2f}, held out", command)


def write_task(folder: Path, text: str, length: int = 4000) -> None:
    """A task of lm-eval that reads `text` in documents of about `length` characters."""
    folder.mkdir(parents=True, exist_ok=True)
    documents, held = [], ""
    for paragraph in text.split("\n\n"):
        held += paragraph + "\n\n"
        if len(held) >= length:
            documents.append(held.strip())
            held = ""
    data = folder / "held_out.jsonl"
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name, "aggregation": aggregation, "higher_is_better": False}
            for name, aggregation in (("byte_perplexity", "weighted_perplexity"), ("bits_per_byte", "bits_per_byte"))
        ],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task, indent=1) + "\n")  # JSON is YAML, too


STEPS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "train": train,
    "load": load_again,
    "generate": write,
    "remember": remember,
    "surprise": surprise,
    "evaluate": evaluate,
}


def show(steps: list[Step], seconds: float) -> None:
    table = Table("step", title=f"titans-hf in {seconds / 60:.1f} minutes", show_lines=True)
    for heading in ("figure", "the same again"):
        table.add_column(heading, overflow="fold")
    for step in steps:
        table.add_row(step.name, step.figure, step.command)
    Console().print(table)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="mag")
    parser.add_argument("--steps", type=int, default=450, help="steps to train for (default: 450)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where to save (default: runs/demo)")
    parser.add_argument("--only", choices=list(STEPS), help="repeat one step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="A function definition")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps must be positive")
    if args.only not in (None, "train") and not (args.out / "config.json").is_file():
        parser.error(f"there is no model in {args.out}: train one first (--only train)")
    args.again = f"python scripts/demo.py --variant {args.variant} --out {args.out}"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    disable_progress_bar()  # of saving and loading; training has its own
    started, steps = time.perf_counter(), []
    for name, run in STEPS.items():
        if args.only in (None, name):
            Console().rule(name)
            set_seed(args.seed)
            steps.append(run(args))
    show(steps, time.perf_counter() - started)
    if args.only is None:
        write_record(args.out / "tour", minutes=(time.perf_counter() - started) / 60, steps=[asdict(s) for s in steps])
