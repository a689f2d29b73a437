"""Words that the shell completes: runs, sweeps, config files, presets, keys, models.

Names of runs import neither torch nor pydantic. A folder that cannot be read has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.config.run_name import name_problem
from tui.form.flags import FLAG_TO_KEY

CONFIG_ENDINGS = (".yaml", ".yml", ".csv")
# zsh evaluates the words that typer prints for it.
UNSAFE_CHARACTERS = frozenset("\\$`\"'")


def complete_runs(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the runs that begin with a text, in their order."""
    from engine.runs.root import LAST_RUN, is_run_folder

    return [*_named_folders(ctx, incomplete, is_run_folder), *_starting([LAST_RUN], incomplete)]


def complete_sweeps(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the sweeps that begin with a text, in their order."""
    from engine.jobs.sweeps.folder import LAST_SWEEP, is_sweep_folder

    return [*_named_folders(ctx, incomplete, is_sweep_folder), *_starting([LAST_SWEEP], incomplete)]


def complete_config(ctx: Any, incomplete: str) -> list[str]:
    """Return the presets, YAML and CSV files, folders and sections that begin with a text; after a section or key as
    `complete_keys`."""
    if "=" in incomplete:
        return complete_keys(ctx, incomplete)
    from engine.config.loader import presets

    return [*_starting(presets(), incomplete), *_config_files(incomplete), *complete_keys(ctx, incomplete)]


def complete_keys(ctx: Any, incomplete: str) -> list[str]:
    """Return `section.` of the sections that begin with a text, after it `section.key=`, after `KEY=` its choices."""
    from engine.config.schema import fields, sections

    key, is_value, value = incomplete.partition("=")
    if is_value:
        return [f"{key}={choice}" for choice in _starting(key_choices(key), value)]
    words = [f"{name}=" for name, _ in fields()] if "." in incomplete else [f"{name}." for name in sections()]
    return _starting(words, incomplete)


def complete_evaluation_keys(ctx: Any, incomplete: str) -> list[str]:
    """Return what `complete_keys` does, of the keys that an evaluation takes."""
    return [word for word in complete_keys(ctx, incomplete) if word.startswith(("data.", "eval."))]


def complete_described(incomplete: str) -> list[str]:
    """Return the config sections and keys that begin with a text."""
    from engine.config.schema import fields, sections

    return _starting([*sections(), *(key for key, _ in fields())], incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Return the names of the known models that begin with a text."""
    from engine.train.models.catalog import cached_model_names

    return _starting(cached_model_names(), incomplete)


def complete_choices(flag: str) -> Callable[[str], list[str]]:
    """Return a function that completes the values of the config flag of this name."""
    return lambda incomplete: _starting(key_choices(FLAG_TO_KEY[flag]), incomplete)


def key_choices(key: str) -> list[str]:
    """Return the values that a config key may have, if they are few or the names of models."""
    if key == FLAG_TO_KEY["model"]:
        return complete_models("")
    from engine.config.schema import fields
    from tui.form.fields import field_kind

    info = dict(fields()).get(key)
    return [] if info is None else [choice for choice in field_kind(info.annotation)[0] if choice]


def complete_paths(incomplete: str) -> list[str]:
    """Return the folders and files whose path begins with a text."""
    return list(_paths(incomplete, lambda _: True))


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _named_folders(ctx: Any, incomplete: str, is_kind: Callable[[Path], bool]) -> list[str]:
    """Return the names of the folders of a kind beside all runs. None has a character that means something to a shell,
    although other users may name folders here."""
    from engine.runs.root import is_listed, runs_root

    try:
        root = runs_root(ctx.params.get("runs_dir"))
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(incomplete) and is_listed(entry.name)]
    except (UsageError, OSError):
        return []
    return [name for name in sorted(names) if name_problem(name) is None and is_kind(root / name)]


def _config_files(incomplete: str) -> Iterator[str]:
    """Yield the YAML and CSV files, and the folders with a slash at their end, whose path begins with a text."""
    return _paths(incomplete, lambda name: name.endswith(CONFIG_ENDINGS))


def _paths(incomplete: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the wanted files, and the folders with a slash at their end, whose path begins with a text. Other users may
    have named them."""
    folder, slash, start = incomplete.rpartition("/")
    try:
        with os.scandir(Path(folder + slash or ".").expanduser()) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name.startswith(start))
    except (OSError, RuntimeError):
        return
    for name, is_folder in found:
        is_safe = name.isprintable() and UNSAFE_CHARACTERS.isdisjoint(name)
        if (start or not name.startswith(".")) and is_safe and (is_folder or is_wanted(name)):
            yield f"{folder}{slash}{name}{'/' if is_folder else ''}"
