"""Tasks that a study trains and tests models on: sequences with labels, from a generator."""

from .groups import groups
from .mqar import mqar
from .task import Task

TASKS = {"mqar": mqar, "groups": groups}

__all__ = ["TASKS", "Task"]
