"""Code of the user's own, named by an import path: `mycode.nets:build` is `build` in the module `mycode.nets`."""

from __future__ import annotations

import importlib
import re
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from engine.problems import UsageError
from engine.sections import OWN


def is_own(name: str | None) -> bool:
    return name is not None and re.fullmatch(OWN, name) is not None


def load_own(key: str, name: str, folder: str | None) -> Any:
    """What `name` stands for, imported from `folder` or the folder of this process. Raises UsageError for `key`."""
    where = str(Path(folder or Path.cwd()))
    if where not in sys.path:
        sys.path.insert(0, where)
    module, _, attribute = name.partition(":")
    try:
        return reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:
        # A module of someone's own can fail in any way.
        raise UsageError.one(key, f"{name} cannot be imported from {where}: {type(error).__name__}: {error}") from error
