"""Act when a module has been imported, without importing it."""

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module of that name: now if it is there, else as soon as it is."""
    if name in sys.modules:
        act(import_module(name))  # which waits for a thread that is still at it
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(MetaPathFinder):
    """Finds one module where the others find it, with a loader that acts."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]):
        self.name, self.act, self.asking = name, act, threading.local()

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname != self.name or getattr(self.asking, "others", False):
            return None
        self.asking.others = True
        try:
            spec = find_spec(fullname)
        finally:
            self.asking.others = False
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, _ActingLoader):
            spec.loader = _ActingLoader(spec.loader, self.act)
        return spec


class _ActingLoader(Loader):
    """A loader that acts on the module once it is loaded."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]):
        self.loader, self.act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.act(module)

    def __getattr__(self, name: str):
        return getattr(self.loader, name)
