"""A small Table 1: four Titans variants and a Llama, trained and measured alike, from scratch to records.

    python scripts/train/small_table.py --data DATA
    python scripts/train/small_table.py --data DATA --only mac,lmm

DATA holds the text to train on (see small_text.py) and the benchmarks' files in `lm_eval/`. Every model has 3.4 million
parameters and reads the same 1.2 million tokens in the same order, from the same seed. Titans models are also measured
on WikiText and LAMBADA with the memory never written, and with the memory reset at each segment. Training a model and
measuring it takes twelve to twenty-five minutes each on a CPU core. Complete steps are skipped, but a model that was
trained again is measured again. Records go to `model_cards/records`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(os.path.relpath(Path(__file__).parents[2] / "scripts"))  # as a user types it
RUNS = Path("runs/small")
CONTROLS = ("off", "reset")
CONTROL_TASKS = "wikitext,lambada_openai"


@dataclass
class Small:
    """A model: its name on the Hub, its recipe and what differs from it."""

    name: str
    recipe: str
    settings: tuple[str, ...] = ()

    @property
    def has_memory(self) -> bool:
        return self.recipe == "small-titans"


MODELS = {
    "mac": Small("titans-mac-3m", "small-titans", ("model.config.variant=mac",)),
    "mag": Small("titans-mag-3m", "small-titans"),
    "mal": Small("titans-mal-3m", "small-titans", ("model.config.variant=mal",)),
    "lmm": Small("titans-lmm-3m", "small-titans", ("model.config.variant=lmm", "model.config.intermediate_size=832")),
    "llama": Small("llama-3m", "small-llama"),
}


def run(*command: object) -> None:
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    done = subprocess.run([sys.executable, *words])
    if done.returncode:
        sys.exit(done.returncode)


def train(key: str) -> None:
    model, out = MODELS[key], RUNS / key
    if not (out / "model").exists():
        resume = ["--resume"] if (out / "recipe.yaml").exists() else []
        run(
            SCRIPTS / "train/pretrain.py",
            SCRIPTS / f"recipes/{model.recipe}.yaml",
            *model.settings,
            f"out={out}",
            *resume,
        )


def forget_others(folder: Path, training: Path) -> None:
    """Remove results that belong to an earlier training."""
    known = folder / "training.json"
    if known.exists() and known.read_bytes() != training.read_bytes():
        for record in folder.glob("table1*.json"):
            record.unlink()


def measure(key: str, data: Path, records: Path) -> None:
    """Table 1, and the controls, into the model's folder of records."""
    model, folder = MODELS[key], records / MODELS[key].name
    folder.mkdir(parents=True, exist_ok=True)
    forget_others(folder, RUNS / key / "training.json")
    for path in (RUNS / "about.json", RUNS / key / "training.json", RUNS / key / "model" / "config.json"):
        shutil.copy(path, folder)
    suite = ["-m", "titans_hf.cli", "eval", RUNS / key / "model", "--suite", "table1", "--data-dir", data / "lm_eval"]
    suite += ["--batch-size", 16, "--name", model.name]
    if not (folder / "table1.json").exists():
        run(*suite, "--out", folder / "table1.json")
    for control in CONTROLS if model.has_memory else ():
        out = folder / f"table1-{control}.json"
        if not out.exists():
            run(*suite, "--tasks", CONTROL_TASKS, "--memory", control, "--out", out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/ and lm_eval/")
    parser.add_argument("--only", default=",".join(MODELS), metavar="A,B", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--records", type=Path, default=Path("model_cards/records"))
    args = parser.parse_args(argv)
    keys = args.only.split(",")
    unknown = [key for key in keys if key not in MODELS]
    if unknown:
        parser.error(f"--only: there is no model {unknown[0]!r}; choose from {', '.join(MODELS)}")
    if not (args.data / "lm_eval").is_dir():
        parser.error(f"--data: {args.data / 'lm_eval'} is not there")
    if not (RUNS / "about.json").exists():
        run(SCRIPTS / "train/small_text.py", "--data", args.data, "--out", RUNS)
    for key in keys:
        train(key)
    for key in keys:
        measure(key, args.data, args.records)
