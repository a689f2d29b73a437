"""Errors of user code in one line: the cause, and the line of the user's file that raised it.

`user_code` and the modules that call user code describe its exceptions with `describe_exception`. An exception is
usually raised in torch, so its last frame alone would not show which line of the user's code is wrong.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.base.errors import CodedError

# The packages of gputrain. They are loaded first, so user code cannot import packages of its own with these names.
OWN_PACKAGES = ("engine", "tui")
INSTALLED_PACKAGES = ("site-packages", "dist-packages")
_OWN_FOLDERS = tuple(Path(__file__).resolve().parents[2] / name for name in OWN_PACKAGES)


class UserCodeError(CodedError):
    """User code raised an exception or returned an invalid value while a run used it. The message names the code."""

    code = "user-code-failed"


def code_root(folder: str | None) -> Path:
    """Return the folder that user code is imported from: `run.code`, else the working folder."""
    return Path(folder or Path.cwd()).absolute()


def describe_exception(error: BaseException, folder: str | None = None, packages: Collection[str] = ()) -> str:
    """Describe an exception of user code in one line, with the file and line that raised it.

    `folder` and `packages` are `run.code` and `run.code_packages`. Without a frame in them, the location is the last
    frame outside of gputrain.
    """
    name = type(error).__name__
    # The error of text that user code parses, as ast.literal_eval does, names no file.
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return f"{name}: {error.msg} ({error.filename}, line {error.lineno})"
    full_text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = next((line.strip() for line in full_text.splitlines() if line.strip()), "")
    place = user_location(error, folder, packages)
    if not place:
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not _is_own_file(Path(frame.filename))]
        place = _format_place(outside[-1]) if outside else ""
    if hint := shadowed_package_hint(error, folder):
        # The error itself names a file of gputrain, which says nothing to the user.
        return f"{hint.removeprefix('; ')}{place}"
    return f"{name}: {text}{place}" if text else f"{name}{place}"


def user_location(error: BaseException, folder: str | None, packages: Collection[str] = ()) -> str:
    """Return ` (FILE, line N)` of the innermost frame in user code, an empty string if there is none."""
    root = code_root(folder)
    roots = [root, Path(os.path.realpath(root)), *_package_folders(packages)]
    frames = traceback.extract_tb(error.__traceback__)
    in_user_code = [frame for frame in frames if _is_user_file(Path(frame.filename), roots)]
    return _format_place(in_user_code[-1]) if in_user_code else ""


def _package_folders(packages: Collection[str]) -> Iterator[Path]:
    """Yield the folder of each package that is loaded; that of a module is its file."""
    for module in filter(None, map(sys.modules.get, packages)):
        folders = getattr(module, "__path__", None) or [module.__file__]
        yield from (Path(folder) for folder in folders if folder is not None)


def _format_place(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}, line {frame.lineno})"


def _is_user_file(file: Path, roots: Sequence[Path]) -> bool:
    """Whether a file lies below a root, but in no environment that is installed below it."""
    return not _is_own_file(file) and any(
        file.is_relative_to(root) and not set(INSTALLED_PACKAGES) & set(file.relative_to(root).parts) for root in roots
    )


def _is_own_file(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _OWN_FOLDERS)


def shadowed_package_hint(error: BaseException, folder: str | None) -> str:
    """Return why an import failed if user code has a package with the name of one of gputrain, else an empty string.

    Python imports the package that is loaded, which lacks the names of the user's own.
    """
    name = _missing_from(error).partition(".")[0]
    if name not in OWN_PACKAGES:
        return ""
    root = code_root(folder)
    for path in (root / name, root / f"{name}.py"):
        if path.exists() and not _is_own_file(Path(os.path.realpath(path))):
            return f"; `import {name}` imports gputrain's package of this name; rename {path} and its imports"
    return ""


def _missing_from(error: BaseException) -> str:
    """Return the module that an import or an attribute access did not find, or that lacks the name."""
    if isinstance(error, ImportError):
        return error.name or ""
    owner: Any = error.obj if isinstance(error, AttributeError) else None
    return owner.__name__ if isinstance(owner, ModuleType) else ""
