"""User code, named by an import path: `mycode.nets:build` is `build` in the module `mycode.nets`.

`engine.launch.preflight` checks it before a run; models, datasets, losses and transforms load it in the ranks.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.config.section import USER_CODE_PATTERN
from engine.utils.errors import Problem, UsageError, did_you_mean
from engine.utils.exits import exit_status
from engine.utils.helper_process import HelperExitedError, HelperTimeoutError, ParentPipe, start_helper

_IMPORT_TIMEOUT_SECONDS = 120.0
RUN_USER_CODE_ADVICE = "run the code on its own to see why"


def is_user_code(name: str | None) -> bool:
    """Whether a value has the form `module:name`."""
    return name is not None and re.fullmatch(USER_CODE_PATTERN, name) is not None


def user_code_names(config: Config) -> dict[str, str]:
    """Map each key that names user code to the name."""
    names: dict[str, str | None] = {
        "data.dataset": config.data.dataset,
        "model.name": config.model.name,
        "loss.name": config.loss.name,
        "augment.transform": config.augment.transform,
    }
    return {key: name for key, name in names.items() if name is not None and is_user_code(name)}


def load_user_code(key: str, name: str, folder: str | None) -> Any:
    """Import the callable `name` from `folder`, or from the working directory.

    Raises UsageError for `key` if the import fails or the object is not callable.
    """
    root = Path(folder or Path.cwd())
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Importing user code runs it: any exception is possible, and sys.exit().
        raise UsageError.one(key, f"{name}: {_import_failure(error, module, root)}") from error
    for attribute_name in attribute.split("."):
        if not hasattr(target, attribute_name):
            public = [candidate for candidate in dir(target) if not candidate.startswith("_")]
            raise UsageError.one(key, f"{name}: {module} has no {attribute}{did_you_mean(attribute_name, public)}")
        target = getattr(target, attribute_name)
    if not callable(target):
        raise UsageError.one(key, f"{name} must be a function or a class, not {type(target).__name__}")
    return target


def _import_failure(error: BaseException, module: str, folder: Path) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module}.".startswith(f"{missing}."):
        return f"{module} cannot be imported: {describe_exception(error, folder)}"
    if not folder.is_dir():
        return f"the folder {folder} does not exist (run.code)"
    parent, _, module_name = missing.rpartition(".")
    parent_folder = folder.joinpath(*parent.split(".")) if parent else folder
    names = sorted(
        path.stem for path in parent_folder.glob("*") if path.suffix == ".py" or (path / "__init__.py").is_file()
    )
    hint = did_you_mean(module_name, names) or (f"; it contains {', '.join(names[:10])}" if names else "")
    return f"no module {missing} in {folder}{hint} (run.code sets the folder)"


def describe_exception(error: BaseException, folder: Path | str | None = None) -> str:
    """Describe an exception of user code in one line, with the file and line that raised it.

    The location is the last frame in `folder`, or else the last frame outside of gputrain.
    """
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{name}: {error.msg} ({error.filename}, line {error.lineno})"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = traceback.extract_tb(error.__traceback__)
    in_folder = [frame for frame in frames if folder is not None and Path(frame.filename).is_relative_to(folder)]
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent.parent)]
    raised_at = (in_folder or outside)[-1:]
    place = f" ({raised_at[0].filename}, line {raised_at[0].lineno})" if raised_at else ""
    return f"{name}: {text}{place}" if text else f"{name}{place}"


def describe_value(value: Any) -> str:
    """Describe a value that user code returned, such as "a dict" or "an ndarray of float32, 3 x 32 x 32"."""
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeio" or name == "ndarray" else "a"
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return f"{article} {name}"
    shape = f", {' x '.join(str(length) for length in value.shape)}" if len(value.shape) else ""
    return f"{article} {name} of {str(value.dtype).removeprefix('torch.')}{shape}"


def check_user_code(config: Config) -> list[Problem]:
    """Return the problems of importing the user code in a config.

    The import runs in a helper process because user code can import torch, print, or exit.
    """
    names = user_code_names(config)
    if not names:
        return []
    deadline = time.monotonic() + _IMPORT_TIMEOUT_SECONDS
    problems: list[Problem] = []
    with start_helper("engine.config.user_code", keep_stderr=False) as helper:
        helper.send({"names": names, "folder": config.run.code})
        for key, name in names.items():
            try:
                problems += [Problem(key, message) for message in helper.receive(deadline - time.monotonic())]
            except HelperTimeoutError:
                reason = f"{name} is still being imported after {_IMPORT_TIMEOUT_SECONDS:.0f} s"
                return [*problems, Problem(key, reason, "move work out of the module's top level")]
            except HelperExitedError as error:
                reason = f"the process that imported {name} {exit_status(error.exit_code or 0)}"
                return [*problems, Problem(key, reason, RUN_USER_CODE_ADVICE)]
    return problems


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process of `check_user_code`: send the problems of each name."""
    # Leave no __pycache__ in the user's folder.
    sys.dont_write_bytecode = True
    request = parent.receive()
    for key, name in request["names"].items():
        messages: list[str] = []
        try:
            load_user_code(key, name, request["folder"])
        except UsageError as error:
            messages = [problem.message for problem in error.problems]
        parent.send(messages)
