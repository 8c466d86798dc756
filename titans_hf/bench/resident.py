"""The memory of the present process by Linux's count."""

import ctypes
import re
from pathlib import Path


def resident(which: str = "VmRSS") -> float:
    """MiB resident now, or at the peak so far (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def restart_peak() -> None:
    """Let the peak start again from here."""
    Path("/proc/self/clear_refs").write_text("5")


def hand_back() -> None:
    """Give memory that was freed back to the system: glibc keeps some, at its whim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
