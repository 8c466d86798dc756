"""Compiles `operators.cpp` at the first use and loads it; the library stays in torch's folder of extensions.

Not `torch.utils.cpp_extension.load`: that needs ninja and setuptools, and a process that is killed while it builds
leaves a lock for which all later ones wait. Here a finished library is moved to its place at once.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("operators.cpp")
INSTRUCTIONS = {  # of a processor, by what torch calls it
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
SECONDS = 300  # for the compiler; it takes about ten


def load() -> None:
    """Register the operators as `torch.ops.titans_cpu`, and compile them where no earlier process has.

    An `OSError`, a `RuntimeError` or a `subprocess.SubprocessError` says why that fails.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"they are built on Linux, not on {sys.platform}")
    torch.ops.load_library(str(library()))


def library() -> Path:
    """The compiled library for this torch, this processor and this source."""
    key = hashlib.sha256(repr((SOURCE.read_bytes(), torch.__version__, command())).encode()).hexdigest()[:16]
    place = folder() / f"operators-{key}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as aside:
            built = Path(aside, place.name)
            _run([*command(), str(SOURCE), "-o", str(built), *_linked()])
            built.replace(place)
    return place


def folder() -> Path:
    """Where libraries are kept: beside torch's own extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / "titans_cpu"


def command() -> list[str]:
    """The compiler and its options."""
    home = Path(torch.__file__).parent / "include"
    include = [f"-I{home}", f"-I{home / 'torch' / 'csrc' / 'api' / 'include'}"]
    options = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=fast", "-fPIC", "-shared", "-w"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    return [*compiler, *options, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), []), *include]


def _linked() -> list[str]:
    home = Path(torch.__file__).parent / "lib"
    return [f"-L{home}", "-lc10", "-ltorch_cpu"]


def _run(compiling: list[str]) -> None:
    done = subprocess.run(compiling, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{compiling[0]} failed: {done.stderr.strip()[:500]}")
