"""Import hook that calls a function with a module when it has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            self.function(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def call_after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function` with the module `name` as soon as this process has imported it."""
    sys.meta_path.insert(0, Finder(name, function))
