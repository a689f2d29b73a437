"""The form for a new run without its widgets: a base config, and the values that the user typed over it.

`tui.form.fields` describes the fields, and `tui.screens.form` shows them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Annotated

from engine.base import codec
from engine.base.codec import ENTRIES, FileRecord, find_user_record, write_user_record
from engine.base.errors import Problem, UsageError
from engine.base.files import state_folder
from engine.config.command_line import format_value
from engine.config.loader import (
    OPTIMIZER_SPECIFIC_KEYS,
    ConfigError,
    ResolvedConfig,
    resolve_config,
)
from engine.config.notify_section import URLS_KEY
from engine.config.run_name import run_stem, stem_of_numbered
from engine.config.schema import UNSTORED_KEYS, Config, as_dict
from engine.runs.root import runs_root
from tui.form.fields import form_fields, required_keys
from tui.form.flags import run_arguments

FORM_FILE = "form.json"
# Keys that the next form does not repeat: the name must be unique, and no file may set the others.
TYPED_ONCE_KEYS = {"run.name", *UNSTORED_KEYS}


class StoredForm(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The form of the last run that began: its base, None if there is none, and the keys that were typed, as text."""

    base: str | None = None
    typed: Annotated[dict[str, str], ENTRIES] = codec.field(default_factory=dict)


@dataclass
class Form:
    """The values of the form. `base` is a preset or a file; `overrides` maps changed keys to their text."""

    base: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    _before_reset: Form | None = field(default=None, compare=False, repr=False)

    @classmethod
    def new(cls) -> Form:
        """Return the form that nothing was typed into."""
        return cls("digits")

    @cached_property
    def base_config(self) -> Config:
        """The base without the overrides, read once. Invalid or missing keys, such as `data.path`, keep their default.
        Raises UsageError if the base cannot be read."""
        try:
            return resolve_config(self.base).config
        except ConfigError as error:
            return error.valid_part

    def config(self) -> Config:
        """Return the resolved config. Raises UsageError for its invalid values. Does not check the host."""
        return self._resolve().config

    def warnings(self) -> list[Problem]:
        """Return what the values give reason to warn of, such as keys without effect; none if some are invalid."""
        try:
            return [warning for _, warning in self._resolve().no_effect]
        except UsageError:
            return []

    def _resolve(self) -> ResolvedConfig:
        return resolve_config(self.base, flags={key: (key, text) for key, text in self.overrides.items()})

    @cached_property
    def base_values(self) -> dict[str, str]:
        """Text of each field in the base, read once."""
        try:
            values = as_dict(self.base_config)
        except UsageError:
            values = as_dict(Config())
        return {
            f"{section}.{name}": format_value(value) for section, part in values.items() for name, value in part.items()
        }

    def values(self) -> dict[str, str]:
        """Return the text of each field: the override if there is one, else the value of the base."""
        values = dict(self.base_values)
        if "optim.name" in self.overrides:
            # As in `engine.config.loader`, another optimizer does not keep the parameters of the base's.
            values |= dict.fromkeys((f"optim.{parameter}" for parameter in OPTIMIZER_SPECIFIC_KEYS), "")
        return values | self.overrides

    def with_base(self, base: str | None) -> Form:
        """Return a form with another base that keeps the overrides, except those that equal the new base."""
        form = Form(base)
        # The optimizer first, because it drops its parameters.
        for key, text in sorted(self.overrides.items(), key=lambda item: item[0] != "optim.name"):
            form.set_value(key, text)
        return form

    @property
    def is_reset(self) -> bool:
        """Whether the form was reset, and nothing was typed since."""
        return self._before_reset is not None and not self.overrides

    def reset(self, *, to_new: bool) -> Form:
        """Return a form without overrides, with `to_new` the one of `new`; if this one was reset and not changed since,
        the form before that."""
        if self._before_reset is not None and self.is_reset:
            return self._before_reset
        return Form(Form.new().base if to_new else self.base, _before_reset=self)

    def copy(self) -> Form:
        """Return a copy that another thread can read."""
        return Form(self.base, dict(self.overrides))

    def set_value(self, key: str, text: str) -> None:
        """Override a key. A text that equals the value of the base, or is empty and must not be, drops the override."""
        self.overrides.pop(key, None)
        if key == "optim.name":
            # Those typed for the previous optimizer do not apply to the new one either.
            for parameter in OPTIMIZER_SPECIFIC_KEYS:
                self.overrides.pop(f"optim.{parameter}", None)
        if self.values().get(key) != text and (text.strip() or key not in required_keys()):
            self.overrides[key] = text

    def arguments_for(self, config: Config, runs_dir: Path) -> list[str]:
        """Return the `gputrain` arguments that start a run with `config`, the resolved config of this form."""
        arguments = run_arguments(self.base, self.base_config, config)
        try:
            is_default = runs_dir.absolute() == runs_root()
        except UsageError:
            is_default = False
        return arguments if is_default else [*arguments, "--runs-dir", str(runs_dir)]


def validate_form(form: Form) -> tuple[Config | None, list[Problem]]:
    """Return the config of the form without the values that are invalid, None if its base cannot be read, and the
    problems, without the checks of this host."""
    try:
        return form.config(), []
    except ConfigError as error:
        return error.valid_part, error.problems
    except UsageError as error:
        return None, error.problems


def next_run_name(form: Form, config: Config, runs_dir: Path) -> str:
    """Return the name that a run without `run.name` gets if it starts next."""
    return _free_name(run_stem(form.base, config, form.overrides), runs_dir, first=1)


def load_last_form() -> Form:
    """Return the form of the last run that began, without values that are refused by now; a new one if there is none or
    its base cannot be read."""
    stored = find_user_record(state_folder(), FORM_FILE, StoredForm)
    if stored is None:
        return Form.new()
    known_keys = {info.key for info in form_fields()} - TYPED_ONCE_KEYS
    form = Form(stored.base, {key: text for key, text in stored.typed.items() if key in known_keys})
    config, problems = validate_form(form)
    for problem in problems:
        form.overrides.pop(problem.location, None)
    # Without a config, the preset was deleted.
    return Form.new() if config is None else form


def save_last_form(form: Form) -> None:
    """Store the form for the next new run, without the `TYPED_ONCE_KEYS`."""
    typed = {key: text for key, text in form.overrides.items() if key not in TYPED_ONCE_KEYS}
    # What is no reference may be a URL with a password or a token.
    if URLS_KEY in typed and any(problem.location == URLS_KEY for problem in validate_form(form)[1]):
        del typed[URLS_KEY]
    try:
        write_user_record(state_folder(), FORM_FILE, StoredForm(base=form.base, typed=typed))
    except OSError:
        # Not worth an error: the next form only starts from an older state.
        return


def form_from_run(run_config: Path) -> Form:
    """Return a form with the config of an existing run and an unused run name."""
    folder = run_config.parent
    stem = stem_of_numbered(folder.name)
    number = int(folder.name.removeprefix(f"{stem}-")) if folder.name != stem else 1
    return Form(str(run_config), {"run.name": _free_name(stem, folder.parent, first=number + 1)})


def _free_name(stem: str, folder: Path, *, first: int) -> str:
    """Return the stem with the next number, `first` or later, that no run in the folder has."""
    names = (f"{stem}-{number}" for number in count(first))
    return next(name for name in names if not os.path.lexists(folder / name))
