"""Resident memory of this process, from Linux's /proc. (psutil reads the present value, not a peak that restarts.)"""

import ctypes
import re
from pathlib import Path


def resident(which: str = "VmRSS") -> float:
    """MiB resident now, or at the peak so far (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def restart_peak() -> None:
    """Reset the peak to the present value."""
    Path("/proc/self/clear_refs").write_text("5")


def hand_back() -> None:
    """Return freed memory to the system, some of which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
