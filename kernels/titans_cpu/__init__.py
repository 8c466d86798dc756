"""Decoding steps on a CPU: one token through what lies between two linear layers, in C++ (`operators.cpp`).

`operators` returns them as `torch.ops.titans_cpu`; `problem` says why there are none. They are compiled at the first
use (`build.py`) and compared with plain formulas (`self_check.py`). Modules here import torch only.
"""

import logging
import os
import subprocess
from functools import cache
from typing import Any

import torch

from .build import load
from .self_check import difference

__all__ = ["operators", "problem"]

logger = logging.getLogger(__name__)


@cache
def operators() -> Any:
    """The operators, or None after a line in the log that says why not."""
    found = problem()
    if found is None:
        return torch.ops.titans_cpu
    logger.info("decoding steps are computed by torch, without C++ operators: %s", found)
    return None


@cache
def problem() -> str | None:
    """Why there are no operators on this machine; None if there are."""
    if os.environ.get("TITANS_CPU_OPERATORS") == "0":
        return "TITANS_CPU_OPERATORS=0 switches them off"
    try:
        load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"they cannot be built ({error})"
    if os.environ.get("TITANS_KERNEL_CHECK") == "0":
        return None
    return difference(torch.ops.titans_cpu)
