"""The sweep of a script: values for the placeholders in a command, `{lr}`, make the command of each trial.

`gputrain sweep … -- COMMAND` calls `plan_script`; `trial_kinds` starts the trials. The command is stored in the folder
of the sweep (`engine.command.spec`), so that it keeps its environment and its working folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.command.devices import PLACEHOLDERS, fill, find_placeholders
from engine.command.spec import Command, read_command
from engine.config.code_trust import CodeTrust
from engine.config.loader import ConfigError, resolve_config
from engine.gpus.device_preview import check_devices_exist
from engine.launch.command_checks import find_command_problems
from engine.launch.request import RunRequest
from engine.runs.keys import parse_metric_name, quote_key
from engine.runs.metric_directions import DIRECTIONS
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better, foreign_metric, registry_keys
from engine.sweeps.folder import SweepFolder
from engine.sweeps.plan import SweepPlan, device_overrides, divide_gpus, without_name
from engine.sweeps.settings import SweepSettings, check_numbers
from engine.sweeps.space import Space, Value, grid_points, overrides_of, parse_space, value_text
from engine.sweeps.study import first_values
from engine.utils import codec
from engine.utils.errors import Problem, UsageError, collect_problems, did_you_mean, raise_if_any
from engine.utils.redaction import redact_argv

# No name of a config key or of an option has another character.
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def script_metric(option: str, text: str, better: Better) -> str:
    """Return the setting `metric` of `--maximize METRIC` or `--minimize METRIC` for a script.

    Raises UsageError if the metric is one of the registry whose values are better in the other direction.
    """
    rest, _, word = text.rpartition("=")
    name = parse_metric_name(rest if word in DIRECTIONS else text)
    known = DIRECTIONS.get(word) or _known_direction(name) or better
    if known is not better:
        other = "--minimize" if known is Better.LOW else "--maximize"
        raise UsageError.one(option, f"{known} values of {name} are better; use {other} {name}", code="conflict")
    return _to_setting(name, better)


def _known_direction(name: str) -> Better | None:
    key = METRICS[name].key if name in METRICS else registry_keys([name]).get(name)
    return None if key is None else METRICS[key].better or None


def _to_setting(name: str, better: Better) -> str:
    return f"{quote_key(METRIC_PREFIX + name)}={better}"


def with_script_direction(settings: SweepSettings, directions: Mapping[str, Better]) -> SweepSettings:
    """Return settings whose metric has a direction: that of the option, of `directions`, or of its name.

    Raises UsageError if there is no metric, or its direction is unknown.
    """
    if settings.metric == SweepSettings().metric:
        advice = "add --maximize METRIC or --minimize METRIC, such as --maximize val/acc"
        raise UsageError.one("metric", "is missing: a script has no metric of its own", advice, code="missing-value")
    rest, _, word = settings.metric.rpartition("=")
    name = parse_metric_name(rest if word in DIRECTIONS else settings.metric)
    better = DIRECTIONS.get(word) or _known_direction(name) or directions.get(name) or foreign_metric(name).better
    if better is Better.NEITHER:
        reason = f"whether high or low values of {name} are better is unknown"
        raise UsageError.one("metric", reason, f"add --maximize {name} or --minimize {name}", code="unknown-value")
    return replace(settings, metric=_to_setting(name, better))


def plan_script(settings: SweepSettings, command: Command, runs_dir: Path, *, trust: CodeTrust) -> SweepPlan:
    """Validate the settings and the command, and choose the devices of the trials. Raises UsageError with every
    problem."""
    problems = check_numbers(settings)
    spaces, values = dict[str, Space](), dict[str, Value]()
    for name, text in settings.space.items():
        with collect_problems(problems):
            space = parse_space(name, text, integers=False)
            if space is None:
                values[name] = text
            else:
                spaces[name] = space
    problems += _placeholder_problems(command, list(settings.space))
    if not spaces and settings.space and not problems:
        example = f"give several values, such as {next(iter(settings.space))}=log:1e-4..1e-1"
        problems.append(Problem("", f"there is nothing to search; {example}", code="missing-value"))
    try:
        config = without_name(resolve_config(None, overrides_of(settings.fixed)).config)
    except ConfigError as error:
        problems += error.problems
        config = without_name(error.valid_part)
    raise_if_any(problems)
    command = fill_command(command, values)
    searched = {name: text for name, text in settings.space.items() if name in spaces}
    device = device_overrides(config, settings.parallel)
    device.pop("device.threads", None)
    settings = replace(
        settings, space=searched, device=device, command=shlex.join(redact_argv(command.argv)), config=None
    )
    if settings.sampler == "grid":
        settings = replace(settings, trials=min(settings.trials, grid_points(spaces)))
    first = fill_command(command, first_values(settings))
    problems += find_command_problems(RunRequest(config, runs_dir, "sweep", code_trust=trust, command=first))
    for share in divide_gpus(device["device.gpus"], settings.parallel):
        with collect_problems(problems):
            check_devices_exist(share)
    raise_if_any(problems)
    return SweepPlan(settings, config, {}, (), command=command)


def _placeholder_problems(command: Command, names: Sequence[str]) -> list[Problem]:
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
            hint = did_you_mean(name, names)
            reason = f"has no values{hint}"
            advice = f"add {name}=SPACE or {name}=VALUE before --"
            problems.append(Problem(f"{{{name}}}", reason, advice, code="missing-value"))
    return problems


def fill_command(command: Command, values: Mapping[str, Value]) -> Command:
    """Return a command with the values in place of their placeholders, in its words, in what `--env` sets, and in the
    places of its metric files."""
    texts = {name: value_text(value) for name, value in values.items()}
    environment = dict(command.environment)
    for name in command.expanded:
        environment[name] = fill([environment[name]], texts)[0]
    argv, metrics = (tuple(fill(words, texts)) for words in (command.argv, command.metrics))
    return codec.replace(command, argv=argv, environment=environment, metrics=metrics)


def is_same_command(folder: SweepFolder, command: Command) -> bool:
    """Whether the stored command of a sweep is this one, in whatever environment. Raises UsageError if it cannot be
    read."""
    stored = read_command(folder)
    return codec.replace(stored, environment=command.environment, cwd_inode=command.cwd_inode) == command and all(
        stored.environment.get(name) == command.environment[name] for name in command.expanded
    )


def trial_line(settings: SweepSettings, values: Mapping[str, Value]) -> str:
    """Return the command of a trial as a line of a shell, without secrets."""
    return shlex.join(fill(shlex.split(settings.command), {name: value_text(value) for name, value in values.items()}))
