"""The form for a new run without its widgets: a base config, and the values that the user typed over it.

Keys, descriptions and choices come from `engine.config.schema`; `tui.screens.form` shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from engine.config.loader import (
    OPTIMIZER_SPECIFIC_KEYS,
    PRESETS_FOLDER,
    ConfigError,
    resolve_config,
    user_presets_folder,
)
from engine.config.optimizer_options import default_options
from engine.config.rules import ANY_USER_CODE, DEPENDS_ON
from engine.config.schema import UNSTORED_KEYS, Config, as_dict, as_stored, fields
from engine.config.user_code import is_user_code
from engine.config.yaml_io import to_yaml
from engine.optim.lr_schedule import lr_factor, scaled_lr
from engine.runs.folder import sanitize_run_name
from engine.utils.errors import Problem, UsageError
from engine.utils.files import (
    config_folder,
    expand_user,
    make_user_folder,
    read_user_json,
    state_folder,
    write_user_json,
)
from tui.charts.axis import FloatArray
from tui.flags import format_value, run_arguments

FORM_FILE = "form.json"
FORM_FORMAT = 1
# Shown by default, in this order; the other keys are shown on demand.
MAIN_KEYS = (
    *("device.gpus", "device.ranks", "data.workers", "data.dataset", "data.path", "model.name", "model.weights"),
    *("run.epochs", "data.batch_size", "optim.lr", "optim.lr_scaling", "optim.name", "optim.momentum"),
    *("optim.nesterov", "optim.betas", "optim.eps", "optim.options", "optim.weight_decay", "schedule.name"),
    "schedule.warmup_epochs",
    *("schedule.step_size", "schedule.milestones", "schedule.gamma", "schedule.final_lr_ratio"),
    *("schedule.restart_every", "schedule.restart_factor", "schedule.power", "schedule.peak_at"),
    *("schedule.start_factor", "schedule.end_factor", "schedule.patience", "precision.amp", "augment.flip"),
    "run.name",
)
# Keys without effect on a new run.
EXCLUDED_KEYS = {"run.resume"}
# Keys that the next form does not repeat: the name must be unique, and no file may set the others.
TYPED_ONCE_KEYS = {"run.name", *UNSTORED_KEYS}


@dataclass(frozen=True)
class ConfigField:
    """A config key as the form shows it. `choices` are its allowed values if it has a fixed set; `allows_other` means
    that it accepts other values, too."""

    key: str
    description: str
    choices: tuple[str, ...] = ()
    is_boolean: bool = False
    allows_other: bool = False

    @property
    def is_main(self) -> bool:
        return self.key in MAIN_KEYS


def form_fields() -> list[ConfigField]:
    """Return a field per config key: the main keys in form order, then the others in schema order."""
    by_key = {
        key: ConfigField(key, info.description or "", *field_kind(info.annotation))
        for key, info in fields()
        if key not in EXCLUDED_KEYS
    }
    return [by_key[key] for key in MAIN_KEYS] + [info for key, info in by_key.items() if key not in MAIN_KEYS]


def field_kind(annotation: Any) -> tuple[tuple[str, ...], bool, bool]:
    """Return how the form edits a config type: its choices, whether it is bool, and whether it accepts other text."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation))), False, False
    parts = get_args(annotation)
    if bool in parts:
        return ("false", "true"), False, False
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    is_number = any(part in (int, float) or get_args(part)[:1] in ((int,), (float,)) for part in parts)
    if choices and not is_number:
        return tuple(map(str, choices)), False, True
    return (), annotation is bool, False


@dataclass
class Form:
    """The values of the form. `base` is a preset or a file; `overrides` maps changed keys to their text."""

    base: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)

    def base_config(self) -> Config:
        """Return the base without the overrides. Invalid or missing keys, such as `data.path`, keep their default.
        Raises UsageError if the base cannot be read."""
        try:
            return resolve_config(self.base).config
        except ConfigError as error:
            return error.valid_part

    def config(self) -> Config:
        """Return the resolved config. Raises UsageError for its invalid values. Does not check the host."""
        return resolve_config(self.base, flags={key: (key, text) for key, text in self.overrides.items()}).config

    def values(self) -> dict[str, str]:
        """Return the text of each field: the override if there is one, else the value of the base."""
        try:
            values = as_dict(self.base_config())
        except UsageError:
            values = as_dict(Config())
        texts = {
            f"{section}.{name}": format_value(value) for section, part in values.items() for name, value in part.items()
        }
        return texts | self.overrides

    def set_value(self, key: str, text: str) -> None:
        """Override a key, or drop its override if the text equals the value of the base."""
        self.overrides.pop(key, None)
        if key == "optim.name":
            # A new optimizer invalidates parameters of the previous one, as in `engine.config.loader`.
            for parameter in OPTIMIZER_SPECIFIC_KEYS:
                self.overrides.pop(f"optim.{parameter}", None)
        if self.values().get(key) != text:
            self.overrides[key] = text

    def arguments(self) -> list[str]:
        """Return the `gputrain` arguments that start this run. Raises UsageError if the config is invalid."""
        return run_arguments(self.base, self.base_config(), self.config())

    def save_preset(self, name: str) -> Path:
        """Write the config to `name`, a path or a name in the user's presets folder, and return the path.

        Raises UsageError if the config is invalid, or the file exists or cannot be written.
        """
        config = self.config()
        changed = as_stored(
            config.model_copy(update={"run": config.run.model_copy(update={"name": None})}), only_changed=True
        )
        is_path = "/" in name or name.endswith((".yaml", ".yml"))
        path = expand_user(name) if is_path else user_presets_folder() / f"{sanitize_run_name(name)}.yaml"
        try:
            if is_path:
                path.parent.mkdir(parents=True, exist_ok=True)
            else:
                make_user_folder(config_folder(), PRESETS_FOLDER)
            with path.open("x", encoding="utf-8") as file:
                file.write(to_yaml(changed) if changed else "")
        except FileExistsError as error:
            raise UsageError.one(str(path), "already exists; choose another name") from error
        except OSError as error:
            raise UsageError.one(str(path), f"cannot be written: {error.strerror}") from error
        return path


def optimizer_placeholders(values: dict[str, str]) -> dict[str, str]:
    """Return the defaults of the selected optimizer, which empty `optim` fields stand for."""
    defaults = default_options(values["optim.name"])
    return {f"optim.{key}": format_value(value) for key, value in defaults.items()}


def is_relevant(key: str, values: dict[str, str]) -> bool:
    """Whether a key has an effect in combination with these values."""
    controlling_key, enabling_values = DEPENDS_ON.get(key, ("", set()))
    value = values.get(controlling_key)
    return not controlling_key or value in enabling_values or (ANY_USER_CODE in enabling_values and is_user_code(value))


def form_problems(form: Form) -> list[Problem]:
    """Return the problems of the form's values, without the checks of this host."""
    try:
        form.config()
    except UsageError as error:
        return error.problems
    return []


def valid_config(form: Form) -> Config | None:
    """Return the config of the form, without the values that are invalid; None if its base cannot be read."""
    try:
        return form.config()
    except ConfigError as error:
        return error.valid_part
    except UsageError:
        return None


def lr_curve(config: Config, ranks: int, steps_per_epoch: int, max_points: int) -> tuple[FloatArray, FloatArray]:
    """Return epochs and learning rates of the schedule, sampled at up to `max_points` steps."""
    import numpy as np

    steps = steps_per_epoch * config.run.epochs
    peak_lr = scaled_lr(config.optim, ranks)
    sampled_steps = np.unique(np.linspace(1, steps, min(steps, max_points)).round().astype(int))
    rates = [
        peak_lr * lr_factor(config.schedule, step, steps_per_epoch, config.run.epochs)
        for step in sampled_steps.tolist()
    ]
    return sampled_steps / steps_per_epoch, np.array(rates, np.float64)


def load_last_form() -> Form:
    """Return the last submitted form; the `digits` preset if there is none or its base cannot be read."""
    stored = read_user_json(state_folder(), FORM_FILE) or {}
    typed = stored.get("typed")
    if stored.get("format") != FORM_FORMAT or not isinstance(typed, dict):
        return Form("digits")
    known_keys = {info.key for info in form_fields()} - TYPED_ONCE_KEYS
    base = stored.get("base")
    form = Form(
        base if isinstance(base, str) else None,
        {key: text for key, text in typed.items() if key in known_keys and isinstance(text, str)},
    )
    try:
        form.base_config()
    except UsageError:
        # The preset was deleted.
        return Form("digits")
    return form


def save_last_form(form: Form) -> None:
    """Store the form for the next new run, without the `TYPED_ONCE_KEYS`."""
    typed = {key: text for key, text in form.overrides.items() if key not in TYPED_ONCE_KEYS}
    try:
        write_user_json(state_folder(), FORM_FILE, {"format": FORM_FORMAT, "base": form.base, "typed": typed})
    except OSError:
        # Not worth an error: the next form only starts from an older state.
        return


def form_from_run(run_config: Path) -> Form:
    """Return a form with the config of an existing run and an unused run name."""
    folder = run_config.parent
    return Form(
        str(run_config),
        {"run.name": next(name for name in _numbered_names(folder.name) if not (folder.parent / name).exists())},
    )


def _numbered_names(name: str) -> Iterator[str]:
    stem, dash, number = name.rpartition("-")
    start = int(number) + 1 if dash and number.isdigit() else 2
    stem = stem if dash and number.isdigit() else name
    while True:
        yield f"{stem}-{start}"
        start += 1
