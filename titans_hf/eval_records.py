"""The record of an evaluation: a JSON file that says what was measured, and everything needed to measure it again.

format, version     "titans evaluation", 1
suite               what was run: "table1", "table2" or "babilong"
command, date       how and when
commit              of titans-hf, with "-dirty" where files were changed; null outside of its repository
versions            of titans_hf, torch, transformers, lm_eval and datasets
machine             architecture and threads, and the device
seeds               python, numpy, torch, fewshot: lm-eval's
seconds             of the evaluation, without loading
model               name, variant (of a baseline its model type), parameters, dtype, memory ("on"; "off", never written;
                    "reset", put back at each segment; "none", of a baseline)
settings            limit (documents a task; null is all), batch_size, max_length, num_fewshot, bootstrap_iters;
                    of table2 and babilong also their lengths, and the limit is that of each; of a baseline also
                    inputs_cut, how many inputs lost their beginning to its max_length
data                by task: source ("files", "hub", or "noise", which needs neither), the dataset, lm-eval's version of
                    the task, documents scored, the benchmark's total, and the files' SHA-256
metrics             by column of the paper's tables (see `paper/`): value and stderr in the unit of the paper, unit,
                    task and metric of lm-eval. A value that is not finite is null, and so is a stderr that lm-eval
                    does not have
"""

import json
import math
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .snapshots import whole_file

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "titans evaluation", 1
PACKAGES = ("torch", "transformers", "lm_eval", "datasets")
NUMBER, TEXT, COUNT, NOTHING = (int, float), (str,), (int,), type(None)
FIELDS = {
    "format": TEXT,
    "version": COUNT,
    "suite": TEXT,
    "command": TEXT,
    "date": TEXT,
    "commit": (str, NOTHING),
    "versions": dict.fromkeys(("titans_hf", *PACKAGES), TEXT),
    "machine": TEXT,
    "seeds": dict.fromkeys(("python", "numpy", "torch", "fewshot"), COUNT),
    "seconds": NUMBER,
    "model": {"name": TEXT, "variant": TEXT, "parameters": COUNT, "dtype": TEXT, "memory": TEXT},
    "settings": {
        "limit": (int, NOTHING),
        "batch_size": COUNT,
        "max_length": COUNT,
        "num_fewshot": COUNT,
        "bootstrap_iters": COUNT,
    },
    "data": {
        "*": {
            "source": TEXT,
            "dataset": TEXT,
            "task_version": (str, int, float, NOTHING),
            "documents": COUNT,
            "total": COUNT,
            "files": {"*": TEXT},
        }
    },
    "metrics": {
        "*": {
            "value": (int, float, NOTHING),
            "stderr": (int, float, NOTHING),
            "unit": TEXT,
            "task": (str, NOTHING),
            "metric": (str, NOTHING),
        }
    },
}


def check_record(record: object, where: str = "the record") -> dict:
    """The record, if it is one of this version; a ValueError names the field that is wrong."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{where} is not the record of a `titans eval`")
    if record.get("version") != VERSION:
        raise ValueError(
            f"{where} is of version {record.get('version')!r}; this titans-hf reads version {VERSION}: evaluate again"
        )
    _check(record, FIELDS, where, "")
    return record


def _check(found: object, wanted: dict | tuple, where: str, field: str) -> None:
    if isinstance(wanted, tuple):
        if not isinstance(found, wanted) or isinstance(found, bool):
            names = " or ".join("null" if kind is NOTHING else kind.__name__ for kind in wanted)
            raise ValueError(f"{where}: {field} is {found!r}, where {names} is wanted")
        return
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {field} is {found!r}, where a mapping is wanted")
    names = found if "*" in wanted else wanted
    for name in names:
        inner = f"{field}.{name}" if field else name
        if name not in found:
            raise ValueError(f"{where} lacks {inner}")
        _check(found[name], wanted.get("*", wanted.get(name)), where, inner)


def provenance(device: "torch.device | str" = "cpu", command: str | None = None) -> dict:
    """Where the present run comes from. The command is this process's, unless it is given."""
    import torch

    return {
        "command": command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": own_commit(),
        "versions": {"titans_hf": __version__, **{name: _version(name) for name in PACKAGES}},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {device_name(torch.device(device))}",
    }


def device_name(device: "torch.device") -> str:
    """The device, and of a GPU what it is."""
    import torch

    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def own_commit() -> str | None:
    """The commit of this package's sources; None where they are not those of a repository (an installed wheel)."""
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # a wheel may lie inside a stranger's repository
        return None
    return git("describe", "--always", "--dirty", "--exclude", "*")


def without_nan(record: dict) -> dict:
    """The record as strict JSON has it: figures that are not finite become null."""
    return json.loads(json.dumps(record), parse_constant=lambda _: None)


def write_record(path: Path, record: dict) -> None:
    """Write a record, whole or not at all."""
    text = json.dumps(check_record(without_nan(record)), indent=1, allow_nan=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_record(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a record: {error}") from error
    return check_record(found, str(path))


def stderr_of_mean(errors: list[float | None]) -> float | None:
    """The standard error of a mean of independent figures; None where one of theirs is not known."""
    if not errors or any(error is None for error in errors):
        return None
    return math.sqrt(sum(error**2 for error in errors if error is not None)) / len(errors)
