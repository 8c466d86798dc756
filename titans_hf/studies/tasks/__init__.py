"""Tasks that a study trains and tests models on: sequences with labels, from a generator."""

from .groups import groups
from .mad import mad
from .mqar import mqar
from .task import Task

TASKS = {"mqar": mqar, "groups": groups, "mad": mad}

__all__ = ["TASKS", "Task"]
