"""Where a figure comes from: the command, commit, date, versions and machine of the present run."""

import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "lm_eval", "datasets")


def own_commit() -> str | None:
    """The commit of this package's sources; None outside of a repository (an installed wheel)."""
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # a wheel may be installed in another repository
        return None
    return git("describe", "--always", "--dirty", "--exclude", "*")


COMMIT = own_commit()  # at import: the commit may change during a long run


def provenance(device: torch.device | str | None = None, command: str | None = None) -> dict:
    """Command, commit, date, versions and machine of this run. `command` replaces this process's own."""
    return {
        "command": command or own_command(),
        "commit": COMMIT,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"titans_hf": __version__, **{name: _version(name) for name in PACKAGES}},
        "machine": machine(device),
    }


def own_command() -> str:
    """This process's command: `python` and the script's path in the repository, or the program's name."""
    program = Path(sys.argv[0]).resolve()
    is_script = program.suffix == ".py" and program.is_relative_to(ROOT)
    words = ["python", program.relative_to(ROOT).as_posix()] if is_script else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def machine(device: torch.device | str | None = None) -> str:
    """Architecture, threads and, if given, the device, with the model of a GPU."""
    found = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if device is None:
        return found
    device = torch.device(device)
    name = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{found}, {device}{name}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
