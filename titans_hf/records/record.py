"""What every record under model_cards/records/ says about where it comes from."""

import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers

from .provenance import own_commit

COMMIT = own_commit()  # asked when a run begins: a long one may end on another


ROOT = Path(__file__).parents[2]


def _script() -> str:
    """The program that runs, by its place in the repository."""
    program = Path(sys.argv[0]).resolve()
    return str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name


def provenance() -> dict:
    """Command, commit, date, versions and machine of the present run."""
    return {
        "command": "python " + " ".join([_script(), *sys.argv[1:]]),
        "commit": COMMIT,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def write_record(path: Path, **content) -> Path:
    """Write the present run's provenance and content as `<path>.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(".json")
    path.write_text(json.dumps({**provenance(), **content}, indent=1) + "\n")
    return path


def plots():
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
