"""Base class of the config sections, and the field types that they share."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from engine.config.run_name import name_problem, normalize_name
from engine.config.tasks import CLASS_METRICS

MAX_OPTION_VALUES = 10_000
USER_CODE_FILE = "user_code_file"
"""Type of the error of pydantic for user code that is named by a path."""


def _as_text(value: object) -> object:
    """Convert numbers to text: YAML parses a name such as 2024 as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_gpu_selection(value: object) -> object:
    """Normalize `[0, 2]`, `0`, `"0,2"` and `"[0, 2]"` to comma-separated text."""
    if isinstance(value, str):
        value = value.strip("[] ").split(",")
    if isinstance(value, list | tuple) and all(isinstance(part, str | int) for part in value):
        return ",".join(str(part).strip() for part in value)
    return _as_text(value)


def _empty_if_none(value: object) -> object:
    """Return `{}` for None, and keys as text: YAML parses the module name 0 as a number."""
    if isinstance(value, dict):
        return {_as_text(key): part for key, part in value.items()}
    return {} if value is None else value


def has_too_many_values(value: object) -> bool:
    """Whether a nested value has more than `MAX_OPTION_VALUES`: a few lines of YAML aliases expand to any number."""
    count, waiting = 0, [value]
    while waiting and count <= MAX_OPTION_VALUES:
        part = waiting.pop()
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple | set) else ()
        count += len(parts)
        waiting += parts
    return count > MAX_OPTION_VALUES


def _limit_values(options: dict[str, Any]) -> dict[str, Any]:
    if has_too_many_values(options):
        raise PydanticCustomError("too_many_values", f"must have at most {MAX_OPTION_VALUES:,} values")
    return options


def as_list(value: object) -> object:
    """Parse `torchvision,timm` and None to a list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
    return () if value is None else value


def _as_name_prefixes(value: object) -> object:
    """Parse `layer1,layer2` and `[layer1, layer2]` to a tuple of parameter name prefixes."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str) and value not in ("none", "backbone"):
        value = as_list(value)
    return tuple(map(_as_text, value)) if isinstance(value, list) else value


def _as_import_path(value: object) -> object:
    """Convert the path of a file, such as `nets/small.py:Net`, to its import path, `nets.small:Net`.

    Raises PydanticCustomError for a file that cannot be imported from the working folder by this path.
    """
    match = re.fullmatch(r"(.+)\.py:([A-Za-z_][\w.]*)", value) if isinstance(value, str) else None
    if match is None:
        return value
    path, name = PurePath(match[1]), match[2]
    if all(part.isidentifier() for part in path.parts):
        return f"{'.'.join(path.parts)}:{name}"
    advice = f"use {path.name}:{name} with run.code={shlex.quote(str(path.parent))}"
    if not path.name.isidentifier():
        advice = f"rename {path.name}.py, which cannot be imported"
    # Braces in a template would be placeholders.
    raise PydanticCustomError(USER_CODE_FILE, "{reason}", {"reason": f"user code is module:name; {advice}"})


Text = Annotated[str, BeforeValidator(_as_text)]
GpuSelection = Annotated[str, BeforeValidator(_as_gpu_selection)]
Floats = Annotated[tuple[float, ...], Strict(False)]
FloatPair = Annotated[tuple[float, float], Strict(False)]
# An empty key in YAML or an empty field in the form means `{}`.
Options = Annotated[dict[str, Any], BeforeValidator(_empty_if_none), AfterValidator(_limit_values)]
Factors = Annotated[dict[str, float], BeforeValidator(_empty_if_none)]
# User code: a module and a callable in it.
USER_CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
UserCodePath = Annotated[str, BeforeValidator(_as_import_path), Field(pattern=USER_CODE_PATTERN)]
MetricName = Annotated[
    str, BeforeValidator(_as_import_path), Field(pattern=f"{USER_CODE_PATTERN}|^({'|'.join(CLASS_METRICS)})$")
]
ModelName = Annotated[str, BeforeValidator(_as_text), BeforeValidator(_as_import_path)]
PackageNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...], BeforeValidator(as_list), Strict(False)
]


def _as_run_name(name: str) -> str:
    """Return the normalized name of a run. Raises PydanticCustomError."""
    name = normalize_name(name)
    if (problem := name_problem(name)) is not None:
        # Braces in a template would be placeholders.
        raise PydanticCustomError("run_name", "{problem}", {"problem": problem})
    return name


def as_text_list(value: object) -> object:
    """Parse `160@1,192@13`, `[160@1, 192@13]` and None to a list of text: YAML parses the run name 2024 as a number."""
    value = as_list(_as_text(value))
    return list(map(_as_text, value)) if isinstance(value, list | tuple) else value


def _check_sizes(sizes: tuple[str, ...]) -> tuple[str, ...]:
    """Raise PydanticCustomError unless each entry is a size and an epoch, such as 160@1."""
    for size in sizes:
        if re.fullmatch(r"[1-9]\d{0,4}@[1-9]\d{0,8}", size, re.ASCII) is None:
            raise PydanticCustomError("size_schedule", "must list sizes as SIZE@EPOCH, such as [160@1, 192@13]")
    return sizes


SizeSchedule = Annotated[tuple[str, ...], BeforeValidator(as_text_list), AfterValidator(_check_sizes), Strict(False)]
ColumnNames = Annotated[tuple[str, ...], BeforeValidator(as_text_list), Strict(False)]
RunName = Annotated[Text, AfterValidator(_as_run_name)]


class Section(BaseModel):
    """Base of the config sections: frozen, strictly typed, without unknown keys. Choices match in any case."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _match_choices(cls, values: Any) -> Any:
        """Replace a choice in another case, such as `o1` of `O1` or `AdamW` of `adamw`, by the choice."""
        if not isinstance(values, dict):
            return values
        choices = _choices_by_key(cls)
        return {
            key: choices.get(key, {}).get(value.casefold(), value) if isinstance(value, str) else value
            for key, value in values.items()
        }


@cache
def _choices_by_key(section: type[Section]) -> dict[str, dict[str, str]]:
    """Map each key with a fixed set of text values to these values, by their folded form."""
    found = {}
    for key, field in section.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        values = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        found[key] = {value.casefold(): value for value in values if isinstance(value, str)}
    return found
