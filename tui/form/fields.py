"""The fields of the form, derived from the config schema: sections, labels, choices and help.

A new config key or section needs no change here. `MAIN_KEYS` only selects and orders what the form shows first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rich.text import Text

from engine.base.text import printable
from engine.config.command_line import format_value
from engine.config.optimizer_options import default_options
from engine.config.rules import ANY_USER_CODE, DEPENDS_ON
from engine.config.schema import Config, fields, first_sentence
from engine.config.training_sections import BUILTIN_MODELS
from engine.config.user_code import is_user_code
from engine.jobs.hosts.channel import ANY_HOST
from tui.terminal.palette import ACCENT, BAD, MUTED, STRONG

# The main keys of each section, by config section, in form order; the other sections and keys follow in schema order.
MAIN_KEYS: dict[str, tuple[str, ...]] = {
    "run": ("run.name", "device.gpus", "device.ranks", "run.epochs"),
    "data": ("data.dataset", "data.path", "task.name", "data.batch_size", "data.workers"),
    "model": ("model.name", "model.weights"),
    "optim": (
        *("optim.name", "optim.lr", "optim.lr_scaling", "optim.momentum", "optim.nesterov", "optim.betas"),
        *("optim.eps", "optim.options", "optim.weight_decay"),
    ),
    "schedule": (
        *("schedule.name", "schedule.warmup_epochs", "schedule.step_size", "schedule.milestones", "schedule.gamma"),
        *("schedule.final_lr_ratio", "schedule.restart_every", "schedule.restart_factor", "schedule.power"),
        *("schedule.peak_at", "schedule.start_factor", "schedule.end_factor", "schedule.patience"),
    ),
    "precision": ("precision.amp",),
    "device": ("device.wait", "device.deterministic"),
    "augment": ("augment.flip",),
}
# Keys without effect on a new run.
EXCLUDED_KEYS = {"run.resume"}
BOOLEAN_CHOICES = ("false", "true")
DEFAULT_CHOICE = "default"
PRESET_KEY = "preset"
NO_PRESET = "(none)"
HOST_KEY = "host"
THIS_HOST = "this host"


@dataclass(frozen=True)
class ConfigField:
    """A config key as the form shows it. `choices` are its allowed values if it has a fixed set; `allows_other` means
    that it accepts other values, too."""

    key: str
    label: str
    description: str
    choices: tuple[str, ...] = ()
    allows_other: bool = False
    is_main: bool = False
    default: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether only the choices are allowed."""
        return bool(self.choices) and not self.allows_other

    @cached_property
    def summary(self) -> str:
        """The first sentence of the description."""
        return first_sentence(self.description)


@dataclass(frozen=True)
class FormSection:
    """A group of fields under a title, the main fields first."""

    title: str
    fields: tuple[ConfigField, ...]


def preset_field(presets: tuple[str, ...]) -> ConfigField:
    """Return the field that selects the base of the form."""
    return ConfigField(PRESET_KEY, "preset", "Initial values of all fields; F2 runs a command.", presets, is_main=True)


def host_field(hosts: Sequence[str], engines: Sequence[str]) -> ConfigField:
    """Return the field that says where the run starts: on a host, or as a job of a batch system."""
    texts = ["Where the run starts.", f"As a job: {', '.join(engines)}." * bool(engines)]
    texts += ["any takes the first host with free GPUs, else the shortest queue." * bool(hosts)]
    choices = (THIS_HOST, *[ANY_HOST] * bool(hosts), *hosts, *engines)
    return ConfigField(HOST_KEY, "host", " ".join(filter(None, texts)), choices, is_main=True)


def form_sections() -> list[FormSection]:
    """Return a section per config section with a field per key. A main key may be in another section than its own."""
    placed = {key: section for section, keys in MAIN_KEYS.items() for key in keys}
    by_key = {
        key: ConfigField(
            key,
            info.title or key.partition(".")[2].replace("_", " "),
            info.description or "",
            *field_kind(info.annotation),
            is_main=key in placed,
            default="" if info.default in (None, (), {}) else format_value(info.get_default()),
        )
        for key, info in fields()
        if key not in EXCLUDED_KEYS
    }
    sections = []
    names = dict.fromkeys([*MAIN_KEYS, *Config.model_fields])
    for name in names:
        main = [by_key[key] for key in MAIN_KEYS.get(name, ())]
        rest = [info for key, info in by_key.items() if key not in placed and key.startswith(f"{name}.")]
        title = Config.model_fields[name].title or name.capitalize()
        sections.append(FormSection(title, (*main, *rest)))
    return sections


def form_fields() -> list[ConfigField]:
    """Return all fields in form order."""
    return [info for section in form_sections() for info in section.fields]


@lru_cache
def required_keys() -> frozenset[str]:
    """Return the keys that must have a value: null is none of theirs."""
    return frozenset(key for key, info in fields() if NoneType not in get_args(info.annotation))


def field_kind(annotation: Any) -> tuple[tuple[str, ...], bool]:
    """Return the choices of a config type, and whether it accepts other text. An empty choice stands for None."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    others = [part for part in parts if part not in (bool, NoneType) and get_origin(part) is not Literal]
    if any(part in (int, float) or get_args(part)[:1] in ((int,), (float,)) for part in others):
        return (), False
    if bool in parts:
        choices = BOOLEAN_CHOICES
    empty = ("",) if choices and not others and NoneType in parts else ()
    return (*empty, *map(str, choices)), bool(choices and others)


def is_relevant(key: str, values: Mapping[str, str]) -> bool:
    """Whether a key has an effect in combination with these values."""
    controlling_key, enabling_values = DEPENDS_ON.get(key, ("", set()))
    value = values.get(controlling_key, "")
    if not controlling_key or value.casefold() in enabling_values:
        return True
    # What an optimizer of timm or of the user accepts is known only once it is imported.
    return is_user_code(value) and (ANY_USER_CODE in enabling_values or controlling_key == "optim.name")


def optimizer_placeholders(optimizer: str) -> dict[str, str]:
    """Return the defaults of an optimizer, which empty `optim` fields stand for."""
    return {f"optim.{key}": format_value(value) for key, value in default_options(optimizer).items()}


def help_text(info: ConfigField, error: str = "") -> Text:
    """Describe a field: its error if any, key, first sentence, default, the rest of the description, choices."""
    text = Text()
    if error:
        text.append(f"✗ {printable(error)}  ", BAD)
    text.append(info.label, STRONG)
    if info.key not in (PRESET_KEY, HOST_KEY):
        text.append(f"  {info.key}", ACCENT)
    text.append(f"  {info.summary}")
    if info.default and "efault:" not in info.description:
        text.append(f"  Default: {info.default}.", MUTED)
    # A small terminal has two lines, and cuts the rest off.
    text.append(info.description.removeprefix(info.summary).rstrip())
    if info.choices and not all(choice in info.description for choice in info.choices):
        text.append(f"  Choices: {', '.join(info.choices)}.", MUTED)
    return text


@dataclass(frozen=True)
class Completion:
    """A value that a field accepts, with facts about it."""

    value: str
    detail: str = ""

    @property
    def label(self) -> str:
        return self.value or DEFAULT_CHOICE


def completions(info: ConfigField, text: str) -> list[Completion]:
    """Return the values that contain `text`, those that begin with it first; all values for an empty text."""
    if info.key == "model.name":
        known = [Completion(name) for name in BUILTIN_MODELS]
    elif info.key == "model.weights":
        known = [Completion("", "random initialization"), Completion("pretrained", "weights of the library")]
    else:
        known = [Completion(name) for name in info.choices]
    word = text.strip().lower()
    found = [completion for completion in known if word in completion.value.lower()]
    return sorted(found, key=lambda completion: not completion.value.lower().startswith(word))
