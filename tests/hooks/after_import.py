"""Import hook that calls a function with a module when it has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Finder(PathFinder):
    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    # It stays in place: who asks only whether the module exists, before the import, gets its spec here too.
    def find_spec(  # type: ignore[override]
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
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
