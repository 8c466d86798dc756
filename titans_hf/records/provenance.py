"""Where a figure comes from: the command, commit, date, versions and machine of the present run."""

import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "lm_eval", "datasets")


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
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # a wheel may lie inside a stranger's repository
        return None
    return git("describe", "--always", "--dirty", "--exclude", "*")
