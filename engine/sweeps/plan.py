"""Validate a sweep against the config schema and this host before anything starts, and resolve what its trials share.

`gputrain sweep` calls `plan_sweep` with the typed settings. Every end of a range and every choice is resolved exactly
as the command of a trial resolves it.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.command.spec import Command
from engine.config.code_trust import CodeTrust
from engine.config.effects import deciding_keys
from engine.config.loader import ConfigError, resolve_config
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.gpus.device_preview import preview_devices
from engine.gpus.selection import NotFreeError
from engine.launch.batch_size import BATCH_SIZE_KEY
from engine.launch.preflight import find_problems
from engine.launch.request import RunRequest
from engine.models.catalog import check_model_name
from engine.models.weights_file import weights_problems
from engine.optim.timm_optimizers import timm_optimizer_problems
from engine.sweeps.settings import SweepSettings, check_numbers
from engine.sweeps.space import Choices, Space, Value, grid_size, overrides_of, value_text
from engine.utils.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.utils.host import available_cores

# Combinations of ends and choices that are validated together; each takes 3 ms.
MAX_COMBINATIONS = 256


@dataclass(frozen=True)
class SweepPlan:
    """A validated sweep.

    `config` is the config of trial 0, without a name. `preset` holds the values of trial 0 that lie in their space, and
    `outside` the searched keys whose value does not. `warnings` name the keys that have no effect in any trial.
    `command` is that of a script with its placeholders, None for trainings: such a sweep has no preset.
    """

    settings: SweepSettings
    config: Config
    preset: Mapping[str, Value]
    outside: tuple[str, ...]
    warnings: tuple[Problem, ...] = ()
    command: Command | None = None

    @property
    def config_yaml(self) -> str:
        """Content of the `config.yaml` that all trials start from."""
        return to_yaml(as_stored(self.config))


def plan_sweep(settings: SweepSettings, runs_dir: Path, *, trust: CodeTrust, trust_code: bool = False) -> SweepPlan:
    """Validate the settings and choose the devices of the trials. Raises UsageError with every problem."""
    problems, warnings = check_numbers(settings), list[Problem]()
    spaces: dict[str, Space] = {}
    with collect_problems(problems):
        spaces = settings.spaces()
    try:
        resolved = resolve_config(settings.config, overrides_of(settings.fixed), trust_code=trust_code)
        config = without_name(resolved.config)
        trust = replace(trust, foreign=resolved.foreign_code)
        # A searched key may give it an effect.
        warnings += [part.warning for part in resolved.no_effect if not spaces.keys() & deciding_keys(part.key)]
    except ConfigError as error:
        problems += error.problems
        config = without_name(error.valid_part)
    known = {problem.location for problem in problems}
    found, unused = _check_values(settings, config, spaces, known, trust_code=trust_code)
    problems += found
    warnings += unused
    device: dict[str, str] = {}
    if not problems:
        device = device_overrides(config, settings.parallel)
        with collect_problems(problems):
            for share in divide_gpus(device["device.gpus"], settings.parallel):
                found = _host_problems(config, device | {"device.gpus": share}, runs_dir, trust)
                problems += [problem for problem in found if problem not in problems]
    raise_if_any(problems)
    if BATCH_SIZE_KEY in spaces:
        # Else the run could reduce the size of the first trial, and the results would list another one.
        config = config.with_values(data={"batch_size": config.data.batch_size})
    preset = preset_values(config, spaces, trust_code=trust_code)
    outside = tuple(key for key in spaces if key not in preset)
    if settings.sampler == "grid":
        settings = replace(settings, trials=min(settings.trials, grid_size(spaces, preset)))
    return SweepPlan(replace(settings, device=device), config, preset, outside, tuple(warnings))


def without_name(config: Config) -> Config:
    """Return the config without what names or continues one run."""
    return config.with_values(run={"name": None, "resume": False, "requeue": False})


def _check_values(
    settings: SweepSettings, config: Config, spaces: Mapping[str, Space], known: set[str], *, trust_code: bool
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of every end and choice, alone and, if there are few, together with those of other keys.

    Also return why searched keys have no effect, unless another searched key can give them one."""
    problems: dict[str, Problem] = {}
    warnings: dict[str, Problem] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(as_stored(config)))

        def check(values: Mapping[str, Value]) -> None:
            try:
                overrides = overrides_of(settings.trial_values(values))
                changed = resolve_config(str(file), overrides, trust_code=trust_code)
                if len(values) == 1:
                    key = next(iter(values))
                    _check_names(changed.config, key)
                    if not spaces.keys() & deciding_keys(key):
                        warnings.update({part.key: part.warning for part in changed.no_effect if part.key == key})
                    if key == "optim.name" and "optim.lr" not in spaces:
                        lrs = (part for part in changed.no_effect if part.key == "optim.lr")
                        warnings.update({f"lr of {changed.config.optim.name}": part.warning for part in lrs})
            except UsageError as error:
                shown = ", ".join(overrides_of(values))
                for problem in error.problems:
                    others = "" if problem.location in values and len(values) == 1 else f" (with {shown})"
                    text = replace(problem, reason=problem.reason + others, source="")
                    if problem.location not in known:
                        problems.setdefault(str(problem) if len(values) == 1 else problem.location, text)

        for key, space in spaces.items():
            for value in space.probes():
                check({key: value})
        if not problems:
            for values in _combinations(spaces):
                check(values)
    return list(problems.values()), list(warnings.values())


def _check_names(config: Config, key: str) -> None:
    """Check what the schema leaves to the installed libraries. Raises UsageError."""
    problems: list[Problem] = []
    if key.startswith("model."):
        with collect_problems(problems):
            check_model_name(config.model)
        problems += weights_problems(config)
    elif key == "optim.name":
        problems += timm_optimizer_problems(config.optim)
    raise_if_any(problems)


def _combinations(spaces: Mapping[str, Space]) -> Iterable[dict[str, Value]]:
    """Yield the combinations of all ends and choices, if there are at most `MAX_COMBINATIONS`."""
    probes = {key: space.probes() for key, space in spaces.items()}
    if len(probes) > 1 and math.prod(map(len, probes.values())) <= MAX_COMBINATIONS:
        for combination in itertools.product(*probes.values()):
            yield dict(zip(probes, combination, strict=True))


def preset_values(config: Config, spaces: Mapping[str, Space], *, trust_code: bool = False) -> dict[str, Value]:
    """Return the config's own value of each searched key, without those that lie outside of their space."""
    stored, values = as_stored(config), dict[str, Value]()
    for key, space in spaces.items():
        own = _value_of(stored, key)
        if isinstance(space, Choices):
            same = [choice for choice in space.values if _choice_value(key, choice, trust_code=trust_code) == own]
            if same:
                values[key] = same[0]
        elif space.contains(own):
            values[key] = own
    return values


def _choice_value(key: str, choice: str, *, trust_code: bool) -> Any:
    """Return the config value that a choice of a key stands for."""
    try:
        config = resolve_config(None, overrides_of({key: choice}), trust_code=trust_code).config
    except ConfigError as error:
        # The defaults may lack a key that this value needs.
        config = error.valid_part
    return _value_of(as_stored(config), key)


def _value_of(stored: Mapping[str, Mapping[str, Any]], key: str) -> Any:
    section, _, name = key.partition(".")
    return stored.get(section, {}).get(name)


def device_overrides(config: Config, parallel: int) -> dict[str, str]:
    """Return the overrides of section `device` for the trials.

    Without a choice of the user, a trial takes one free GPU and waits for it; listed GPUs are divided among the trials
    that run at the same time, see `divide_gpus`. On the CPU, they divide the cores.
    """
    device = config.device
    gpus = device.gpus
    if gpus == "auto":
        gpus = "free:1" if host_has_gpus() else "cpu"
    if gpus != "cpu":
        return {"device.gpus": gpus, "device.wait": "true"}
    threads = device.threads or max(1, available_cores() // (parallel * device.ranks))
    return {"device.gpus": "cpu", "device.threads": value_text(threads)}


def divide_gpus(gpus: str, parallel: int) -> list[str]:
    """Return a value of `device.gpus` for each of the trials that run at the same time: parts of listed GPUs, such as
    `0,1`, else one value that all have. Raises UsageError if there are fewer GPUs than trials."""
    listed = [part.strip() for part in gpus.split(",")]
    if len(listed) == 1 or parallel == 1:
        return [gpus]
    if parallel > len(listed):
        reason = f"{parallel} trials at the same time need as many GPUs; --gpus {gpus} names {len(listed)}"
        raise UsageError.one("--parallel", reason, code="out-of-range")
    each = len(listed) // parallel
    return [",".join(listed[start : start + each]) for start in range(0, each * parallel, each)]


def host_has_gpus() -> bool:
    """Whether this host has GPUs to train on, free or not."""
    try:
        return bool(preview_devices("free:1"))
    except NotFreeError as error:
        return error.problems[0].code != "driver-unavailable"
    except UsageError:
        return False


def _host_problems(config: Config, device: Mapping[str, str], runs_dir: Path, trust: CodeTrust) -> list[Problem]:
    """Return why trial 0 could not start on this host: data, model, devices."""
    config = config.with_values(device={"gpus": device["device.gpus"], "wait": "device.wait" in device})
    return find_problems(RunRequest(config, runs_dir, "sweep", code_trust=trust))
