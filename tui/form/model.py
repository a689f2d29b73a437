"""What has been chosen in the form of a run: a base, and what is typed over it. Everything that a field knows comes
from the config's schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from engine.config.loader import OPTIMIZER_SPECIFIC_KEYS, ConfigError, resolve_config, user_presets_folder
from engine.config.optimizer_options import default_options
from engine.config.rules import ANY_USER_CODE, DEPENDS_ON
from engine.config.schema import Config, as_dict, fields
from engine.config.user_code import is_user_code
from engine.config.yaml_io import to_yaml
from engine.optim.lr_schedule import lr_factor, scaled_lr
from engine.runs.folder import sanitize_run_name
from engine.utils.errors import Problem, UsageError
from engine.utils.files import expand_user, read_json, state_folder, write_json
from tui.charts.axis import FloatArray
from tui.flags import format_value, run_arguments

FORM_FORMAT = 1
# Shown from the start, in this order; the rest on demand.
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
# `run` decides these itself, or they make no sense for a run that begins.
EXCLUDED_KEYS = {"run.resume"}


@dataclass(frozen=True)
class ConfigField:
    """One key of the config. `choices` are the words that it may be, where those are few; an `allows_other` one takes
    others too."""

    key: str
    description: str
    choices: tuple[str, ...] = ()
    is_boolean: bool = False
    allows_other: bool = False

    @property
    def is_main(self) -> bool:
        return self.key in MAIN_KEYS


def form_fields() -> list[ConfigField]:
    """The main ones in their order, then the others in the schema's."""
    found = {
        key: ConfigField(key, info.description or "", *field_kind(info.annotation))
        for key, info in fields()
        if key not in EXCLUDED_KEYS
    }
    return [found[key] for key in MAIN_KEYS] + [one for key, one in found.items() if key not in MAIN_KEYS]


def field_kind(annotation: Any) -> tuple[tuple[str, ...], bool, bool]:
    """The choices of a key, whether it is a switch, and whether it takes more than its choices."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation))), False, False
    parts = get_args(annotation)
    if bool in parts:
        return ("false", "true"), False, False
    words = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    number = any(part in (int, float) or get_args(part)[:1] in ((int,), (float,)) for part in parts)
    if words and not number:
        return tuple(map(str, words)), False, True
    return (), annotation is bool, False


@dataclass
class Form:
    """`base` is a preset or a file; `overrides` holds what stands in the fields that were touched."""

    base: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)

    def base_config(self) -> Config:
        """The base by itself, which may want for something, such as where the data lies. Raises UsageError where it
        cannot be read at all."""
        try:
            return resolve_config(self.base).config
        except ConfigError as error:
            return error.valid_part

    def config(self) -> Config:
        """Raises UsageError with every problem that can be seen without a look at the machine."""
        return resolve_config(self.base, flags={key: (key, text) for key, text in self.overrides.items()}).config

    def values(self) -> dict[str, str]:
        """What each field shows: what was typed, else what the base says."""
        try:
            values = as_dict(self.base_config())
        except UsageError:
            values = as_dict(Config())
        shown = {
            f"{section}.{name}": format_value(value) for section, part in values.items() for name, value in part.items()
        }
        return shown | self.overrides

    def set_value(self, key: str, text: str) -> None:
        """Keep what was typed, unless it is what the base says."""
        self.overrides.pop(key, None)
        if key == "optim.name":
            # As in a layer over others, see `engine.config.loader`.
            for parameter in OPTIMIZER_SPECIFIC_KEYS:
                self.overrides.pop(f"optim.{parameter}", None)
        if self.values().get(key) != text:
            self.overrides[key] = text

    def arguments(self) -> list[str]:
        """Those of `gputrain` that start this run. Raises UsageError."""
        return run_arguments(self.base, self.base_config(), self.config())

    def save_preset(self, name: str) -> Path:
        """A name goes to the user's presets, a path where it says. Raises UsageError."""
        config = self.config()
        kept = as_dict(
            config.model_copy(update={"run": config.run.model_copy(update={"name": None})}), only_changed=True
        )
        is_path = "/" in name or name.endswith((".yaml", ".yml"))
        path = expand_user(name) if is_path else user_presets_folder() / f"{sanitize_run_name(name)}.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(to_yaml(kept) if kept else "")
        except FileExistsError as error:
            raise UsageError.one(str(path), "exists; give another name") from error
        except OSError as error:
            raise UsageError.one(str(path), f"cannot be written: {error.strerror}") from error
        return path


def optimizer_placeholders(values: dict[str, str]) -> dict[str, str]:
    """What fields that are left empty stand for beside these values."""
    own = default_options(values["optim.name"])
    return {f"optim.{key}": format_value(value) for key, value in own.items()}


def is_relevant(key: str, values: dict[str, str]) -> bool:
    """Whether a key has an effect beside these values."""
    other, words = DEPENDS_ON.get(key, ("", set()))
    value = values.get(other)
    return not other or value in words or (ANY_USER_CODE in words and is_user_code(value))


def form_problems(form: Form) -> list[Problem]:
    try:
        form.config()
    except UsageError as error:
        return error.problems
    return []


def lr_curve(config: Config, ranks: int, steps_per_epoch: int, max_points: int) -> tuple[FloatArray, FloatArray]:
    """Epochs and the learning rate that training has there, at no more steps than there are points."""
    import numpy as np

    steps = steps_per_epoch * config.run.epochs
    highest = scaled_lr(config.optim, ranks)
    chosen = np.unique(np.linspace(1, steps, min(steps, max_points)).round().astype(int))
    rates = [highest * lr_factor(config.schedule, step, steps_per_epoch, config.run.epochs) for step in chosen.tolist()]
    return chosen / steps_per_epoch, np.array(rates, np.float64)


def load_last_form() -> Form:
    """The choices of the last run that was started from the form; the preset of the digits before the first."""
    stored = read_json(state_folder() / "form.json") or {}
    typed = stored.get("typed")
    if stored.get("format") != FORM_FORMAT or not isinstance(typed, dict):
        return Form("digits")
    known = {one.key for one in form_fields()}
    base = stored.get("base")
    form = Form(
        base if isinstance(base, str) else None,
        {key: text for key, text in typed.items() if key in known and isinstance(text, str)},
    )
    try:
        form.base_config()
    except UsageError:
        # Its preset is gone.
        return Form("digits")
    return form


def save_last_form(form: Form) -> None:
    """Keep the choices for next time, but for the name, which another run will not have."""
    path = state_folder() / "form.json"
    typed = {key: text for key, text in form.overrides.items() if key != "run.name"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORM_FORMAT, "base": form.base, "typed": typed})
    except OSError:
        # It costs the user some typing next time.
        return


def form_from_run(run_config: Path) -> Form:
    """A run like this one, under a name that is not taken."""
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
