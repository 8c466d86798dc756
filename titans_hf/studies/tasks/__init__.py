"""Tasks that a study trains and tests models on: sequences with labels, from a generator or from text."""

from .groups import groups
from .mad import mad
from .mqar import mqar
from .needles import needles
from .task import METRICS, Task
from .text import text

TASKS = {"mqar": mqar, "groups": groups, "mad": mad, "text": text, "needles": needles}

__all__ = ["METRICS", "TASKS", "Task"]
