"""User code, named by an import path: `mycode.nets:build` is `build` in the module `mycode.nets`.

`engine.jobs.launch.preflight` checks it before a run; models, datasets, losses and transforms load it in the ranks.
`engine.config.code_trust` judges beforehand who named the code and whose file it is.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

from engine.base.answers import Answer
from engine.base.codec import Record
from engine.base.errors import (
    CodedError,
    Problem,
    UsageError,
    collect_problems,
    did_you_mean,
)
from engine.base.exits import exit_status
from engine.base.files import settings_file
from engine.base.helper_process import HelperExitedError, HelperTimeoutError, ParentPipe, start_helper
from engine.base.text import list_names
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.config.section import USER_CODE_PATTERN
from engine.config.training_sections import TIMM_PREFIX
from engine.config.user_errors import (
    code_root,
    describe_exception,
    shadowed_package_hint,
    user_location,
)

T = TypeVar("T")

_IMPORT_TIMEOUT_SECONDS = 120.0
RUN_USER_CODE_ADVICE = "run the code on its own to see why"
TRUST_ADVICE = "read the code, then repeat the command with --trust-code"


@dataclass(frozen=True)
class UserModule:
    """Where the module of a user code name lies.

    `root` is the folder that it is imported from, None for a module of an installed package in `run.code_packages`.
    `files` are the `__init__.py` files of its packages and its own `.py` file, in the order of import, links resolved.
    """

    name: str
    root: Path | None
    files: tuple[Path, ...] = ()


def is_user_code(name: str | None) -> bool:
    """Whether a value has the form `module:name`."""
    return name is not None and re.fullmatch(USER_CODE_PATTERN, name) is not None


def is_user_optimizer(name: str) -> bool:
    """Whether `optim.name` is user code: an optimizer of timm, timm:NAME, has the same form."""
    return is_user_code(name) and not name.startswith(TIMM_PREFIX)


def user_code_names(config: Config) -> dict[str, tuple[str, ...]]:
    """Map each key that names user code to the names."""
    names: dict[str, str | None] = {
        "data.dataset": config.data.dataset,
        "model.name": config.model.name,
        "loss.name": config.loss.name,
        "augment.transform": config.augment.transform,
        "optim.name": config.optim.name if is_user_optimizer(config.optim.name) else None,
        "schedule.name": config.schedule.name,
    }
    found = {key: (name,) for key, name in names.items() if name is not None and is_user_code(name)}
    metrics = tuple(filter(is_user_code, config.eval.metrics))
    return found | ({"eval.metrics": metrics} if metrics else {})


def find_user_module(key: str, name: str, folder: str | None, packages: Collection[str] = ()) -> UserModule:
    """Find the module of a user code name, without running any of it.

    It is a `.py` file below the folder, else a module of an installed package that `packages` lists. Raises UsageError
    for `key` if it is neither, or belongs to the standard library.
    """
    root, module = code_root(folder), name.partition(":")[0]
    package = module.partition(".")[0]
    # `sys.stdlib_module_names` lacks the package `test`.
    if package in sys.stdlib_module_names or package == "test":
        raise UsageError.one(
            key,
            f"{name} names a module of Python's standard library; user code is a .py file of your own",
            "rename the file if it is yours",
            code="standard-library",
        )
    if (files := _find_files(key, name, root)) is not None:
        return UserModule(module, root, files)
    if package in packages:
        return UserModule(module, None)
    if not root.is_dir():
        raise UsageError.one(key, f"{name}: the folder {root} does not exist (run.code)", code="not-found")
    raise UsageError.one(key, f"{name}: {_describe_missing(module, root)}", code="not-found")


def _find_files(key: str, name: str, root: Path) -> tuple[Path, ...] | None:
    """Return the files that an import of the module runs; None if the folder does not contain it.

    Raises UsageError for files that are not Python source below the folder.
    """
    module, files, folder = name.partition(":")[0], list[Path](), root
    importlib.invalidate_caches()
    real_root = Path(os.path.realpath(root))
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        # Not sys.path, and not import_module, which runs the packages on the way.
        spec = PathFinder.find_spec(".".join(parts[:count]), [str(folder)])
        if spec is None:
            return None
        folder = folder / part
        # A folder without `__init__.py` runs nothing.
        if spec.origin is None and spec.submodule_search_locations is not None and count < len(parts):
            continue
        file = Path(os.path.realpath(spec.origin or folder))
        if file.suffix != ".py":
            raise UsageError.one(
                key, f"{name}: {file} is not a .py file; user code is Python source", code="wrong-format"
            )
        if not file.is_relative_to(real_root):
            raise UsageError.one(
                key,
                f"{name}: {folder} links to {file}, outside of {real_root}; set run.code to that file's folder",
                code="is-link",
            )
        files.append(file)
    return tuple(files)


def _describe_missing(module: str, root: Path) -> str:
    """Describe which part of a module the folder lacks, with the names that it contains."""
    folder, parts = root, module.split(".")
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    is_module = (folder / f"{parts[0]}.py").is_file()
    missing = ".".join([*folder.relative_to(root).parts, *(parts if is_module else parts[:1])])
    names = sorted(path.stem for path in folder.glob("*") if path.suffix == ".py" or (path / "__init__.py").is_file())
    hint = did_you_mean(parts[0], names) or (f"; it contains {', '.join(names[:10])}" if names else "")
    package = module.partition(".")[0]
    if folder == root and PathFinder.find_spec(package) is not None:
        # Only commands that train take config keys.
        hint = (
            f"; allow the installed package {package} in all commands with the line "
            f"`run: {{code_packages: [{package}]}}` in {settings_file()}, or with run.code_packages={package} each "
            "time that you train or resume"
        )
    return f"no module {missing} in {root}{hint} (run.code sets the folder)"


def load_user_code(key: str, name: str, folder: str | None, packages: Collection[str] = ()) -> Any:
    """Import the callable `name` from `folder`, from the working folder, or from an installed package in `packages`.

    Raises UsageError for `key` if the module is not user code, the import fails or the object is not a callable of the
    user's own.
    """
    location = find_user_module(key, name, folder, packages)
    module, _, attribute = name.partition(":")
    if location.root is not None and str(location.root) not in sys.path:
        sys.path.insert(0, str(location.root))
    try:
        target: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Importing user code runs it: any exception is possible, and sys.exit().
        raise UsageError.one(
            key,
            f"{name}: {module} cannot be imported: {describe_exception(error, folder, packages)}",
            code="user-code-failed",
        ) from error
    loaded_from = getattr(target, "__file__", None) or "another place"
    if location.files and Path(os.path.realpath(loaded_from)) not in location.files:
        raise UsageError.one(
            key,
            f"{name}: a module of this name is already loaded from {loaded_from}; rename {location.files[-1]}",
            code="ambiguous-name",
        )
    for attribute_name in attribute.split("."):
        if not hasattr(target, attribute_name):
            public = [candidate for candidate in dir(target) if not candidate.startswith("_")]
            raise UsageError.one(
                key, f"{name}: {module} has no {attribute}{did_you_mean(attribute_name, public)}", code="not-found"
            )
        target = getattr(target, attribute_name)
    if not callable(target):
        raise UsageError.one(
            key, f"{name} must be a function or a class, not {describe_value(target)}", code="invalid-value"
        )
    return target


@contextmanager
def user_failures(key: str, what: str, folder: str | None, packages: Collection[str] = ()) -> Iterator[None]:
    """Raise what user code raises in the block as a UsageError for `key`: `what` and the exception in one line.

    Errors that gputrain has found in the code keep their words. `folder` and `packages` are those of the code."""
    try:
        yield
    except UsageError:
        raise
    except CodedError as error:
        raise UsageError.one(key, str(error), code=error.code) from error
    except Exception as error:
        reason = describe_exception(error, folder, packages)
        raise UsageError.one(key, f"{what}: {reason}", code="user-code-failed") from error


def load_user_function(key: str, name: str, run: RunConfig) -> Any:
    """Load a transform, loss, schedule or metric: a function, or a class, which is created without arguments.

    Raises UsageError as `load_user_code`, and if the class cannot be created.
    """
    target = load_user_code(key, name, run.code, run.code_packages)
    if not isinstance(target, type):
        return target
    what = f"{name} cannot be created without arguments (give them defaults, or name an instance)"
    with user_failures(key, what, run.code, run.code_packages):
        instance = target()
    # A metric may have update() and compute() in its place.
    if not callable(instance) and not hasattr(instance, "compute"):
        raise UsageError.one(key, f"{name} has no __call__; define it, or name a function", code="invalid-value")
    return instance


def locate_in_user_code(error: BaseException, config: Config) -> str:
    """Return ` (FILE, line N)` of the user code in which an exception was raised, an empty string if in none."""
    if not user_code_names(config):
        return ""
    place = user_location(error, config.run.code, config.run.code_packages)
    return place + shadowed_package_hint(error, config.run.code)


def describe_value(value: Any) -> str:
    """Describe a value that user code returned, such as "a dict" or "an ndarray of float32, 3 x 32 x 32"."""
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeio" or name == "ndarray" else "a"
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return f"{article} {name}"
    shape = f", {' x '.join(str(length) for length in value.shape)}" if len(value.shape) else ""
    return f"{article} {name} of {str(value.dtype).removeprefix('torch.')}{shape}"


def as_number(value: Any) -> float | None:
    """Return a number that user code returned, such as a tensor of one element, as a float; None for anything else."""
    # float("0.5") is 0.5, but text is no metric.
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


class UserCodeRequest(Record, frozen=True):
    """Request to the helper process: import the user code with these config keys and names."""

    names: tuple[tuple[str, str], ...]
    folder: str | None
    packages: tuple[str, ...]


def ask_user_code(
    helper: str,
    request: object,
    kind: type[Answer[T]],
    timeout_s: float,
    *,
    key: str,
    name: str,
    verb: str,
    result: str,
) -> T:
    """Return the answer of a helper process that runs the user code `name`, the value of a key.

    `verb` is what the process does with it and `result` what then has happened, in the past tense. Raises UsageError,
    also if the process hangs or exits.
    """
    try:
        with start_helper(helper, keep_stderr=False) as process:
            process.send(request)
            answer = process.receive(kind, timeout_s)
    except HelperTimeoutError as error:
        raise UsageError.one(
            key, f"{name} has not {result} after {timeout_s:.0f} s", RUN_USER_CODE_ADVICE, code="timed-out"
        ) from error
    except HelperExitedError as error:
        raise UsageError.one(
            key,
            f"the process that {verb} {name} {exit_status(error.exit_code or 0)}",
            RUN_USER_CODE_ADVICE,
            code="user-code-failed",
        ) from error
    return answer.get()


def check_user_code(config: Config) -> list[Problem]:
    """Return the problems of importing the user code in a config.

    The import runs in a helper process because user code can import torch, print, or exit.
    """
    named = [(key, name) for key, names in user_code_names(config).items() for name in names]
    with collect_problems(problems := list[Problem]()):
        if named:
            ask_user_code(
                "engine.config.user_code",
                UserCodeRequest(tuple(named), config.run.code, config.run.code_packages),
                Answer[bool],
                _IMPORT_TIMEOUT_SECONDS,
                key=named[0][0],
                name=list_names([name for _, name in named]),
                verb="imported",
                result="been imported",
            )
    return problems


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process of `check_user_code`: send the problems of all names."""
    # Leave no __pycache__ in the user's folder.
    sys.dont_write_bytecode = True
    request, problems = parent.receive(UserCodeRequest), list[Problem]()
    for key, name in request.names:
        with collect_problems(problems):
            load_user_code(key, name, request.folder, request.packages)
    parent.send(Answer(value=True, problems=tuple(problems)))
