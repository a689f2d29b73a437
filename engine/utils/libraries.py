"""Import an optional library that may be missing or broken, such as timm."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from engine.utils.errors import UsageError, not_installed

# What to use in place of a module that is broken.
ALTERNATIVES = {"timm": ", or use a model of torchvision", "timm.optim": ", or use an optimizer of torch"}


def import_library(module: str, key: str) -> Any:
    """Import a module of a library, and return it. What the import prints goes to stderr.

    Raises UsageError for `key` if the library is not installed, or if its import fails in any way."""
    library = module.partition(".")[0]
    if library not in sys.modules and find_spec(library) is None:
        raise UsageError.one(key, not_installed(library), code="not-installed")
    try:
        # stdout is for data, such as JSON.
        with redirect_stdout(sys.stderr):
            return import_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{_with_version(library)} cannot be imported: {_first_line(error)}"
        advice = f"repair it with `pip install --force-reinstall {library}`{ALTERNATIVES.get(module, '')}"
        raise UsageError.one(key, reason, advice, code="library-failed") from error


def _with_version(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return library


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
