"""Triton kernels for the neural memory (Section 3 of the paper).

`scan_chunks` and `extend_chunk` have the names and signatures of the functions in `titans_hf.memory_ops` that they
speed up; those functions define what they compute. `refusal` says why a shape has no kernels, and `passes` compares the
kernels with the torch form at their first use. Modules here import torch and triton only; the kernels themselves are
imported at the first launch.
"""

import triton  # noqa: F401  fails here, with a clear message, where Triton is not installed

from .extend import extend_chunk
from .scan import scan_chunks
from .self_check import passes
from .served import refusal, refuse

__all__ = ["extend_chunk", "passes", "refusal", "refuse", "scan_chunks"]
