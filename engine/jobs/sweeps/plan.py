"""Validate a sweep against the config schema and this host before anything starts, and resolve what its trials share.

`gputrain sweep` calls `plan_sweep` with the typed settings. Every end of a range and every choice is resolved exactly
as the command of a trial resolves it. Values for the placeholders in a command, `{lr}`, make the command of each trial
of a script.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.base import codec
from engine.base.errors import Problem, UsageError, collect_problems, did_you_mean, raise_if_any
from engine.base.host import available_cores
from engine.base.redaction import redact_argv
from engine.config.code_trust import CodeTrust
from engine.config.loader import ConfigError, parse_value, resolve_config
from engine.config.monitor import monitored_name, task_scores
from engine.config.schema import Config, as_stored
from engine.config.tasks import TASK_FACTS
from engine.config.user_code import is_user_code
from engine.config.yaml_io import to_yaml
from engine.gpus.device_preview import check_devices_exist, preview_devices
from engine.gpus.selection import NotFreeError
from engine.jobs.command.devices import PLACEHOLDERS, fill, find_placeholders
from engine.jobs.command.spec import Program
from engine.jobs.launch.command_checks import find_command_problems
from engine.jobs.launch.preflight import find_problems
from engine.jobs.launch.request import RunRequest
from engine.jobs.launch.submission import check_job_config
from engine.jobs.sweeps.settings import METRICS_OF_MONITORS, MONITORED, DeviceKey, SweepSettings
from engine.jobs.sweeps.space import Range, Space, Value, grid_size, overrides_of, value_text
from engine.jobs.sweeps.study import first_values
from engine.runs.keys import quote_key
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better
from engine.runs.monitor import config_monitor
from engine.train.models.catalog import resolve_model_source
from engine.train.models.weights_file import weights_problems
from engine.train.optim.timm_optimizers import timm_optimizer_problems

# No name of a config key or of an option has another character.
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class SweepPlan:
    """A validated sweep.

    `config` is the config of trial 0, without a name. `preset` holds the values of trial 0 that lie in their space.
    `command` is that of a script with its placeholders, None for trainings: such a sweep has no preset.
    """

    settings: SweepSettings
    config: Config
    preset: Mapping[str, Value]
    command: Program | None = None


def plan_sweep(settings: SweepSettings, runs_dir: Path, *, trust: CodeTrust, engine: str = "") -> SweepPlan:
    """Validate the settings of trainings and choose their devices, of jobs of a batch system `engine` or of this host.
    Raises UsageError with every problem."""
    spaces, problems = settings.check()
    try:
        resolved = resolve_config(settings.config, overrides_of(settings.fixed), trust_code=trust.granted)
        config = without_name(resolved.config)
        trust = replace(trust, foreign=resolved.foreign_code)
    except ConfigError as error:
        problems += error.problems
        config = without_name(error.valid_part)
    settings, config = agree_on_metric(settings, config)
    found = _check_values(settings, config, spaces, trust_code=trust.granted)
    known = {problem.location for problem in problems}
    raise_if_any([*problems, *(problem for problem in found if problem.location not in known)])
    device = device_overrides(config, settings.parallel, engine)
    for share in () if engine else divide_gpus(device["device.gpus"], settings.parallel):
        checked = config.with_values(device={"gpus": share, "wait": "device.wait" in device})
        with collect_problems(problems):
            problems += find_problems(RunRequest(checked, runs_dir, "sweep", code_trust=trust))
    raise_if_any(list(dict.fromkeys(problems)))
    if "data.batch_size" in spaces:
        # Else the run could reduce the size of the first trial, and the results would list another one.
        config = config.with_values(data={"batch_size": config.data.batch_size})
    preset = preset_values(config, spaces)
    trials = min(settings.trials, grid_size(spaces, preset)) if settings.sampler == "grid" else settings.trials
    settings = codec.replace(settings, trials=trials, device=device)
    return SweepPlan(settings, config, preset)


def agree_on_metric(settings: SweepSettings, config: Config) -> tuple[SweepSettings, Config]:
    """Return settings whose metric is that of `run.monitor` if none was typed, and else a config whose trials keep the
    checkpoint of their best epoch by the typed metric, unless it sets `run.monitor`."""
    name, monitor = monitored_name(config), config_monitor(config)
    if settings.metric == MONITORED:
        own = f"{quote_key(METRIC_PREFIX + name)}={monitor.better}"
        registered = METRICS_OF_MONITORS.get(name)
        return codec.replace(settings, metric=registered or own), config
    objective = settings.objective
    monitors = {key: name for name, key in METRICS_OF_MONITORS.items()} | {"val_loss": "loss"}
    found = monitors.get(objective.key, objective.key.removeprefix(METRIC_PREFIX))
    # One of another task is refused as a monitor. Trials may record others in ways that the config does not tell.
    is_known = found in task_scores(config) or any(found in facts.metrics for facts in TASK_FACTS.values())
    has_own = any(map(is_user_code, config.eval.metrics))
    if config.run.monitor != "auto" or found in (*METRICS, name) or not (is_known or has_own):
        return settings, config
    mode = "auto" if found in task_scores(config) else "min" if objective.better is Better.LOW else "max"
    return settings, config.with_values(run={"monitor": found, "monitor_mode": mode})


def without_name(config: Config) -> Config:
    """Return the config without what names or continues one run."""
    return config.with_values(run={"name": None, "resume": False, "requeue": False})


def trial_overrides(settings: SweepSettings, params: Mapping[str, Value]) -> list[str]:
    """Return what the command of a trial sets besides the config file: its values, and the typed keys of the
    optimizer, which another optimizer would drop from the file."""
    fixed = {key: text for key, text in settings.fixed.items() if key.startswith("optim.")}
    return overrides_of({**fixed, **params})


def _check_values(
    settings: SweepSettings, config: Config, spaces: Mapping[str, Space], *, trust_code: bool
) -> list[Problem]:
    """Return the problems of every end and choice."""
    problems = list[Problem]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(as_stored(config)))
        for key, value in ((key, value) for key, space in spaces.items() for value in space.probes()):
            try:
                overrides = trial_overrides(settings, {key: value})
                _check_names(resolve_config(str(file), overrides, trust_code=trust_code).config, key)
            except UsageError as error:
                for problem in error.problems:
                    is_own = problem.location == key
                    reason = problem.reason if is_own else f"{problem.reason} (with {key}={value_text(value)})"
                    problems.append(replace(problem, reason=reason, source=""))
    return list(dict.fromkeys(problems))


def _check_names(config: Config, key: str) -> None:
    """Check what the schema leaves to the installed libraries. Raises UsageError."""
    if key.startswith("model."):
        resolve_model_source(config.model)
        raise_if_any(weights_problems(config))
    elif key == "optim.name":
        raise_if_any(timm_optimizer_problems(config.optim))


def preset_values(config: Config, spaces: Mapping[str, Space]) -> dict[str, Value]:
    """Return the config's own value of each searched key, without those that lie outside of their space."""
    values = dict[str, Value]()
    for key, space in spaces.items():
        section, _, name = key.partition(".")
        own: Any = as_stored(config).get(section, {}).get(name)
        if isinstance(space, Range):
            if space.contains(own):
                values[key] = own
        elif same := [choice for choice in space.values if parse_value(key, choice) == own]:
            values[key] = same[0]
    return values


def device_overrides(config: Config, parallel: int, engine: str = "") -> dict[DeviceKey, str]:
    """Return the overrides of section `device` for the trials. Raises UsageError if `engine`, which runs them as jobs,
    cannot.

    Without a choice of the user, a trial takes one free GPU and waits for it; listed GPUs are divided among the trials
    that run at the same time, see `divide_gpus`. On the CPU, they divide the cores.
    """
    device = config.device
    gpus = device.gpus
    if engine:
        check_job_config(engine, config)
        return {"device.gpus": gpus}
    if gpus == "auto":
        gpus = "free:1" if _host_has_gpus() else "cpu"
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


def _host_has_gpus() -> bool:
    """Whether this host has GPUs to train on, free or not."""
    try:
        return bool(preview_devices("free:1"))
    except NotFreeError as error:
        return error.problems[0].code != "driver-unavailable"
    except UsageError:
        return False


def plan_script(
    settings: SweepSettings, command: Program, runs_dir: Path, *, trust: CodeTrust, engine: str = ""
) -> SweepPlan:
    """Validate the settings and the command, and choose the devices of the trials as `plan_sweep` does.

    Raises UsageError with every problem."""
    spaces, problems = settings.check()
    problems += _placeholder_problems(command, list(settings.space))
    try:
        config = without_name(resolve_config(None, overrides_of(settings.fixed)).config)
    except ConfigError as error:
        raise UsageError([*problems, *error.problems]) from error
    raise_if_any(problems)
    command = fill_command(command, {key: text for key, text in settings.space.items() if key not in spaces})
    device = device_overrides(config, settings.parallel, engine)
    device.pop("device.threads", None)
    settings = codec.replace(
        settings,
        space={key: settings.space[key] for key in spaces},
        device=device,
        command=shlex.join(redact_argv(command.argv)),
        trials=min(settings.trials, grid_size(spaces, None)) if settings.sampler == "grid" else settings.trials,
    )
    first = fill_command(command, first_values(settings))
    problems += find_command_problems(RunRequest(config, runs_dir, "sweep", code_trust=trust, command=first), first)
    for share in () if engine else divide_gpus(device["device.gpus"], settings.parallel):
        with collect_problems(problems):
            check_devices_exist(share)
    raise_if_any(problems)
    return SweepPlan(settings, config, {}, command=command)


def _placeholder_problems(command: Program, names: Sequence[str]) -> list[Problem]:
    """Return which parameters have no placeholder in the command, and which placeholders have no parameter."""
    words = [*command.argv, *(command.environment[name] for name in command.expanded)]
    found, problems = find_placeholders(words), list[Problem]()
    for name in names:
        if name in PLACEHOLDERS:
            reason = f"is what gputrain replaces by itself ({', '.join(PLACEHOLDERS)})"
            problems.append(Problem(name, reason, "use another name", code="conflict"))
        elif _NAME.fullmatch(name) is None:
            reason = "cannot name a placeholder: it needs a letter, then letters, digits, _ . and - only"
            problems.append(Problem(name, reason, code="invalid-name"))
        elif name not in found:
            reason = f"has no placeholder {{{name}}} in the command"
            problems.append(Problem(name, reason, f"type {{{name}}} where its value belongs", code="no-effect"))
    for name in found:
        if name not in names and name not in PLACEHOLDERS:
            reason, advice = f"has no values{did_you_mean(name, names)}", f"add {name}=SPACE or {name}=VALUE before --"
            problems.append(Problem(f"{{{name}}}", reason, advice, code="missing-value"))
    return problems


def fill_command(command: Program, values: Mapping[str, Value]) -> Program:
    """Return a command with the values in place of their placeholders, in its words, in what `--env` sets, and in the
    places of its metric files."""
    texts = {name: value_text(value) for name, value in values.items()}
    environment = {
        name: fill([text], texts)[0] if name in command.expanded else text for name, text in command.environment.items()
    }
    argv, metrics = (tuple(fill(words, texts)) for words in (command.argv, command.metrics))
    return codec.replace(command, argv=argv, environment=environment, metrics=metrics)


def trial_line(settings: SweepSettings, values: Mapping[str, Value]) -> str:
    """Return the command of a trial as a line of a shell, without secrets."""
    return shlex.join(fill(shlex.split(settings.command), {name: value_text(value) for name, value in values.items()}))
