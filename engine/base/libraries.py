"""Optional libraries that may be missing or broken, such as torch and timm: their versions, what they list, and their
import."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeVar

from engine.base.answers import Answer
from engine.base.codec import FileRecord, find_user_record, write_user_record
from engine.base.errors import EXTRAS, Problem, UsageError, not_installed
from engine.base.files import cache_folder
from engine.base.helper_process import HelperError, ask_helper

Listing = TypeVar("Listing", bound=FileRecord)

# What to use in place of a module that is broken.
ALTERNATIVES = {"timm": ", or use a model of torchvision", "timm.optim": ", or use an optimizer of torch"}


def installed_version(library: str) -> str | None:
    """Return the version of a library without importing it, None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def missing_libraries(extra: str) -> list[str]:
    """Return the libraries of an extra of gputrain that are not installed."""
    return [library for library, name in EXTRAS.items() if name == extra and find_spec(library) is None]


def training_problem(location: str = "", advice: str = "") -> Problem | None:
    """Return why this installation does not train and runs no trained model: the first library that is missing of the
    extra `train`. `location` is the command that needs it, and `advice` what else to do."""
    missing = missing_libraries("train")
    return Problem(location, not_installed(missing[0]), advice, code="not-installed") if missing else None


def check_training(location: str, advice: str = "") -> None:
    """Raise UsageError for the command `location` if this installation does not train."""
    if (problem := training_problem(location, advice)) is not None:
        raise UsageError([problem])


def listing_name(what: str, library: str) -> str:
    """Return the name of the file in the user's cache that has what the installed version of a library lists."""
    return f"{what}-{library}-{installed_version(library)}.json"


def cached_listing(
    what: str, library: str, key: str, kind: type[Listing], helper: str, request: object = None
) -> Listing:
    """Return what a library lists, such as its models, from the user's cache, else from the helper process `helper`.

    The process imports the library. Raises UsageError for `key` if the library is not installed or that fails."""
    if installed_version(library) is None:
        raise UsageError.one(key, not_installed(library), code="not-installed")
    name = listing_name(what, library)
    if (cached := find_user_record(cache_folder(), name, kind)) is not None:
        return cached
    try:
        answer: Answer[Listing] = ask_helper(helper, Answer[kind], request)  # type: ignore[valid-type]
    except HelperError as error:
        reason = f"the {what} of {library} cannot be listed: {error}"
        raise UsageError.one(key, reason, code="library-failed") from error
    listing = answer.get()
    # Without a cache, the next call starts the process again.
    with suppress(OSError):
        write_user_record(cache_folder(), name, listing)
    return listing


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
        named = " ".join(filter(None, (library, installed_version(library))))
        reason = f"{named} cannot be imported: {_first_line(error)}"
        advice = f"repair it with `pip install --force-reinstall {library}`{ALTERNATIVES.get(module, '')}"
        raise UsageError.one(key, reason, advice, code="library-failed") from error


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
