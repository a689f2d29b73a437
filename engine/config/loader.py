"""Resolve YAML files, flags and `section.key=value` overrides to one validated config.

Later layers take precedence: defaults, each file in `base:`, the file itself, then flags and overrides.
`engine.config.messages` and `engine.config.rules` find the problems; the CLI and the form call `resolve_config`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from engine.base.errors import Problem, UsageError, collect_problems, did_you_mean, nearest
from engine.base.files import (
    config_folder,
    expand_user,
    is_file,
    is_folder,
    own_folder_advice,
    settings_file,
    user_path_problem,
)
from engine.base.trust import foreign_path_reason
from engine.config.conflicts import config_conflicts
from engine.config.data_sections import CSV_SUFFIXES, OTHER_LABELS_ADVICE, DatasetName
from engine.config.effects import NoEffect, keys_without_effect, lr_without_effect, removed_key, typed_without_effect
from engine.config.file_layers import ConfigLayer, Layer, read_file_layers
from engine.config.key_names import key_hint
from engine.config.messages import problem_from_pydantic
from engine.config.notify_section import FILE_PREFIX, URLS_KEY
from engine.config.rules import PACKED_SUFFIX
from engine.config.schema import Config, fields, is_text_field, sections
from engine.config.section import USER_CODE_FILE
from engine.config.settings import read_settings
from engine.config.tasks import TASK_FACTS
from engine.config.training_sections import OptimConfig
from engine.config.user_code import TRUST_ADVICE, user_code_names
from engine.config.yaml_io import parse_yaml, yaml_error


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config.

    `sources` maps each `section.key` to the layer that set it; `typed` has the keys set by a flag or `key=value`.
    `foreign_code` maps the keys of user code that somebody else's file set to the reason, see `CodeTrust.foreign`.
    `missing` are the values that a run needs and the config lacks, if that was allowed. `no_effect` are the keys that
    are set and have no effect.
    """

    config: Config
    sources: dict[str, str]
    typed: frozenset[str]
    foreign_code: Mapping[str, str]
    missing: tuple[Problem, ...] = ()
    no_effect: tuple[NoEffect, ...] = ()


class ConfigError(UsageError):
    """Invalid config. `valid_part` is the config without the invalid values, for further checks."""

    def __init__(self, problems: Sequence[Problem], valid_part: Config) -> None:
        super().__init__(problems)
        self.valid_part = valid_part


FOREIGN_URLS_ADVICE = "set notify.urls on the command line ([] for none), or trust the file with --trust-code"
PRESETS_FOLDER = "presets"
# Of a file of images, by which a path of data means a dataset.
SHARD_SUFFIX = ".tar"
TABLE_SUFFIXES = (".jsonl", ".parquet")
YAML_SUFFIXES = (".yaml", ".yml")
MAX_SHOWN_CHARACTERS = 100
# Keys whose values do not carry over to another optimizer.
OPTIMIZER_SPECIFIC_KEYS = ("lr", "momentum", "nesterov", "betas", "eps", "options")


def presets() -> dict[str, Path]:
    """Map preset names to files: those shipped with gputrain, overridden by those that the user has saved.

    Shipped presets are package data of `engine` in a wheel, and in `configs/` in a checkout. Presets that other users
    can change are not listed.
    """
    package = Path(__file__).parent.parent
    folder = package / "presets" if (package / "presets").is_dir() else package.parent / "configs"
    own: list[Path] = []
    # Nothing is saved in a folder to which this user has no access.
    with suppress(OSError):
        own = [path for path in user_presets_folder().glob("*.yaml") if _preset_problem(path.name) is None]
    files = {path.stem: path for path in (*folder.glob("*.yaml"), *own)}
    return dict(sorted(files.items()))


def user_presets_folder() -> Path:
    """Folder of the user's saved presets: `$XDG_CONFIG_HOME/gputrain/presets`."""
    return config_folder() / PRESETS_FOLDER


def _preset_problem(file_name: str) -> str | None:
    """Return why a saved preset must not be used; None if it may or does not exist."""
    return user_path_problem(config_folder(), f"{PRESETS_FOLDER}/{file_name}")


def find_config(name: str) -> Path:
    """Return the file for a path or a preset name. Raises UsageError if there is none.

    A file in the working folder precedes the preset of its name, unless other users can change that file.
    """
    path, available = expand_user(name), presets()
    if is_file(path) and (name not in available or _is_own(path)):
        if path.suffix == SHARD_SUFFIX:
            raise UsageError.one(name, "is a dataset, not a config", code="wrong-format")
        if path.suffix in TABLE_SUFFIXES:
            raise UsageError.one(name, "is a table, not a config", OTHER_LABELS_ADVICE, code="wrong-format")
        return path
    if name in available:
        return available[name]
    saved = f"{name}.yaml"
    if name == path.name and is_file(user_presets_folder() / saved) and (problem := _preset_problem(saved)) is not None:
        raise UsageError.one(
            name,
            f"the preset is not used, because {problem}",
            own_folder_advice("XDG_CONFIG_HOME"),
            code="foreign-writable",
        )
    with suppress(OSError):
        if path.exists():
            what = "a folder" if path.is_dir() else "no regular file"
            raise UsageError.one(name, f"is {what}; use a YAML file or a preset name", code="not-a-file")
    hint = _similar_file(path) or did_you_mean(path.stem, available)
    raise UsageError.one(name, f"no such file or preset; presets: {', '.join(available)}{hint}", code="not-found")


def _read_base(name: str) -> list[Layer]:
    """Return the layers of a CONFIG argument: a YAML file, a preset, or the path of a dataset.

    Raises UsageError if it is none of them."""
    path = expand_user(name)
    is_data = path.suffix.lower() in (SHARD_SUFFIX, PACKED_SUFFIX, *CSV_SUFFIXES) or is_folder(path)
    if name not in presets() and is_data:
        if all(is_file(path / file) for file in ("config.yaml", "events.jsonl")):
            reason = f"is the folder of a run; use {path / 'config.yaml'}, or `gputrain resume {shlex.quote(name)}`"
            raise UsageError.one(name, reason, code="not-a-file")
        return [Layer(name, {"data": {"path": name}})]
    return read_file_layers(find_config(name), presets())


def _similar_file(path: Path) -> str:
    """Return a hint at a YAML file with a similar name in the folder of a missing file, or an empty string."""
    with suppress(OSError):
        files = {file.stem: file for file in sorted(path.parent.glob("*.y*ml")) if file.suffix in YAML_SUFFIXES}
        if (stem := nearest(path.stem, files)) is not None:
            return f"; did you mean {files[stem]}?"
    return ""


def _is_own(path: Path) -> bool:
    try:
        return foreign_path_reason(path) is None
    except OSError:
        return False


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `section.key=value`. Raises UsageError."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if "." not in key or not separator:
        if key in sections():
            raise UsageError.one(key, f"is a section, not a key{key_hint(key)}", code="unknown-key")
        raise UsageError.one(key, f"must have the form section.key=value{key_hint(key)}", code="unknown-key")
    return key, parse_value(key, value)


def parse_value(key: str, text: str) -> Any:
    """Parse the value of a key: verbatim if the key holds text, as YAML otherwise.

    Raises UsageError if the text is not valid YAML.
    """
    field = dict(fields()).get(key)
    if field is not None and is_text_field(field):
        return None if text in ("null", "") else text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        # A URL that was typed by mistake is not shown: it may contain a password or a token.
        start = text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
        shown = "the value" if key == URLS_KEY else f"the value {start!r}"
        raise yaml_error(key, error, shown) from error


def resolve_config(
    file: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, str | bool | tuple[str, ...]]] | None = None,
    *,
    trust_code: bool = False,
    allow_missing: bool = False,
    unused: Mapping[str, str] = MappingProxyType({}),
) -> ResolvedConfig:
    """Merge all layers and validate the result. `flags` maps `section.key` to (flag as typed, its value).

    `unused` maps the keys that the command does not use to the reason: they keep their defaults, and those that are
    typed have no effect.

    With `allow_missing`, a value that a run needs and that no layer sets is no problem, see `ResolvedConfig.missing`.
    Without `trust_code`, user code and notification URLs that somebody else's file names are a problem. Raises
    ConfigError with all problems, whose `valid_part` names no such code and URL, and UsageError if a file cannot be
    read.
    """
    packages = read_settings().run.code_packages
    layers = [Layer(str(settings_file()), {"run": {"code_packages": packages}})] if packages else []
    layers += _read_base(file) if file is not None else []
    file_layers = [layer.values for layer in layers]
    typed: dict[str, tuple[str, Any]] = {}
    problems: list[Problem] = []
    for key, (flag, flag_value) in (flags or {}).items():
        with collect_problems(problems):
            typed[key] = (flag, parse_value(key, flag_value) if isinstance(flag_value, str) else flag_value)
    for text in overrides:
        with collect_problems(problems):
            key, value = parse_override(text)
            if key in typed and typed[key][1] != value:
                by = "" if key == URLS_KEY else f" by {typed[key][0]} and {text}"
                problems.append(Problem(key, f"is set to different values{by}; keep one", code="conflict"))
            typed[key] = (text, value)
    # The optimizer first: a change of it drops the optimizer keys of earlier layers, but not of this command line.
    values = {key: value for key, (_, value) in typed.items()}
    typed = {key: source_and_value for key, source_and_value in typed.items() if key not in unused}
    for key, (source, value) in sorted(typed.items(), key=lambda item: item[0] != "optim.name"):
        layers.append(Layer(source, _by_section({key: value})))

    merged: ConfigLayer = {}
    sources: dict[str, str] = {}
    foreign: dict[str, str] = {}
    dropped_lr: Any = None
    for source, layer, reason, _ in layers:
        for section, keys in layer.items():
            if not isinstance(keys, dict):
                keys = {}
            if section == "optim":
                for name, value in _drop_optimizer_keys(merged.get("optim", {}), keys).items():
                    sources.pop(f"optim.{name}", None)
                    dropped_lr = value if name == "lr" else dropped_lr
            keys = {name: value for name, value in keys.items() if f"{section}.{name}" not in unused}
            merged.setdefault(section, {}).update(keys)
            for name in keys:
                key = f"{section}.{name}"
                sources[key] = source
                foreign.pop(key, None)
                if reason is not None:
                    foreign[key] = f"{source}, which sets {key}, {reason}"
    _infer_dataset(merged, sources)
    _choose_default_lr(merged)
    try:
        config = validate_config(merged, {key: source for key, source in sources.items() if key not in typed})
    except ConfigError as error:
        config, problems = error.valid_part, [*problems, *error.problems]
    names = user_code_names(config)
    foreign_code = {key: reason for key, reason in foreign.items() if names and key in (*names, "run.code")}
    if not trust_code:
        refused: dict[str, str | None] = {key: ", ".join(names[key]) for key in foreign_code if key in names}
        refused = refused or dict.fromkeys(foreign_code, config.run.code)
        problems += [
            Problem(key, f"{name} is not imported: {foreign_code[key]}", TRUST_ADVICE, code="untrusted-code")
            for key, name in refused.items()
        ]
        if URLS_KEY in foreign and config.notify.urls:
            problems.append(
                Problem(URLS_KEY, f"is not used: {foreign[URLS_KEY]}", FOREIGN_URLS_ADVICE, code="untrusted-code")
            )
    missing = tuple(problem for problem in problems if problem.is_missing and allow_missing)
    if len(missing) < len(problems):
        untrusted = {*foreign_code, *foreign.keys() & {URLS_KEY}}
        defaults = {key: field.default for key, field in fields() if key in untrusted}
        raise ConfigError(problems, config.with_values(**_by_section(defaults)))
    no_effect = typed_without_effect(values, unused)
    if dropped_lr not in (None, config.optim.lr) and "optim.lr" not in sources:
        no_effect.append(lr_without_effect(config, dropped_lr))
    no_effect += [removed_key(key, value) for layer in layers for key, value in layer.removed.items()]
    sources = {key: sources.get(key, "default") for key, _ in fields()}
    no_effect += keys_without_effect(config, [*file_layers, _by_section(dict.fromkeys(typed))])
    return ResolvedConfig(config, sources, frozenset(typed), foreign_code, missing, tuple(no_effect))


def _infer_dataset(merged: ConfigLayer, sources: dict[str, str]) -> None:
    """Set the dataset that the file or folder of `data.path` is, unless a layer sets `data.dataset`."""
    data = merged.get("data", {})
    if data.get("dataset") is None and isinstance(path := data.get("path"), str):
        data["dataset"], sources["data.dataset"] = dataset_of(path), sources["data.path"]


def _choose_default_lr(merged: ConfigLayer) -> None:
    """Set `optim.lr` to the default of the task for sgd, if it has one and no layer sets it."""
    optim, task = merged.get("optim", {}), str(merged.get("task", {}).get("name")).casefold()
    lr = next((facts.sgd_lr for name, facts in TASK_FACTS.items() if name == task), None)
    if lr is not None and optim.get("lr") is None and str(optim.get("name", "sgd")).casefold() == "sgd":
        merged["optim"] = {**optim, "lr": lr}


def dataset_of(path: str) -> DatasetName:
    """Return the dataset that a file or folder is."""
    if Path(path).suffix.lower() in CSV_SUFFIXES:
        return "csv"
    return "webdataset" if Path(path).suffix == SHARD_SUFFIX or _has_shards(expand_user(path)) else "folder"


def _has_shards(folder: Path) -> bool:
    """Whether a folder has tar shards and no subfolders, which would be classes."""
    with suppress(OSError, ValueError):
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        has_shards = any(entry.name.endswith(SHARD_SUFFIX) for entry in entries)
        return has_shards and not any(entry.is_dir() for entry in entries)
    return False


def _by_section(values: Mapping[str, Any]) -> ConfigLayer:
    """Return values by `section.key` as a layer."""
    layer: ConfigLayer = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        layer.setdefault(section, {})[name] = value
    return layer


def _drop_optimizer_keys(merged: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Drop optimizer-specific keys of earlier layers if this layer changes the optimizer. Return what was dropped."""
    before = merged.get("name", OptimConfig.model_fields["name"].default)
    # Names match in any case, see `Section`.
    if str(before).casefold() == str(layer.get("name", before)).casefold():
        return {}
    return {key: merged.pop(key) for key in OPTIMIZER_SPECIFIC_KEYS if key in merged}


def validate_config(values: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Config:
    """Validate merged values. `files` maps a key to the file that sets it.

    Raises ConfigError with all problems, each with its key and the allowed values.
    """
    try:
        config = _validate_sections(values)
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        # Of the errors of a union's members, the first is reported.
        for detail in sorted(error.errors(), key=lambda detail: detail["type"] != USER_CODE_FILE):
            problem = problem_from_pydantic(detail, files or {})
            problems.setdefault(problem.location, problem)
        valid_part = _config_without(values, problems.keys())
        conflicts = [
            conflict
            for conflict in config_conflicts(valid_part)
            if problems.keys().isdisjoint((conflict.location, *conflict.others))
        ]
        raise ConfigError([*problems.values(), *conflicts], with_absolute_paths(valid_part)) from error
    if conflicts := list(config_conflicts(config)):
        raise ConfigError(conflicts, with_absolute_paths(config))
    return with_absolute_paths(config)


def _validate_sections(values: Mapping[str, Any]) -> Config:
    """Validate values by section. Raises ValidationError.

    To build the validators of all sections takes 0.1 s, and a command line sets keys of few."""
    models = sections()
    if values.keys() <= models.keys():
        with suppress(ValidationError):
            parts: dict[str, Any] = {name: models[name].model_validate(keys) for name, keys in values.items()}
            return Config.model_construct(**parts)
    # Its error has all problems.
    return Config.model_validate(values)


def _config_without(values: Mapping[str, Any], invalid_paths: Collection[str]) -> Config:
    """Validate the values without these sections and keys. Keys that YAML does not parse as text are dropped."""
    kept = {
        section: {
            key: value
            for key, value in keys.items()
            if isinstance(key, str) and f"{section}.{key}" not in invalid_paths
        }
        for section, keys in values.items()
        if isinstance(section, str) and section not in invalid_paths and isinstance(keys, Mapping)
    }
    return Config.model_validate(kept)


def with_absolute_paths(config: Config) -> Config:
    """Make the config's paths absolute, so that the run can be resumed from another folder."""

    def absolute(path: str) -> str:
        return str(expand_user(path).absolute())

    data_paths = {"path": config.data.default_path, "val_path": config.data.val_path}
    update: ConfigLayer = {"data": {key: absolute(path) for key, path in data_paths.items() if path is not None}}
    if config.model.weights not in (None, "pretrained"):
        update["model"] = {"weights": absolute(config.model.weights)}
    if config.notify.urls:
        urls = (
            FILE_PREFIX + absolute(url.removeprefix(FILE_PREFIX)) if url.startswith(FILE_PREFIX) else url
            for url in config.notify.urls
        )
        update["notify"] = {"urls": tuple(urls)}
    if config.run.code is not None or user_code_names(config):
        update["run"] = {"code": absolute(config.run.code or ".")}
    return config.with_values(**update)
