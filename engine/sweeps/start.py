"""Create the folder of a new sweep, or load an existing one to continue it, and run its controller.

`gputrain sweep` calls `create_sweep` or `load_sweep`, then `run_sweep`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from engine.command.spec import Command, write_command
from engine.config.code_trust import CodeTrust
from engine.config.loader import resolve_config
from engine.config.notify_section import URLS_KEY
from engine.config.run_name import name_from_stem, name_problem, normalize_name
from engine.config.user_code import TRUST_ADVICE, user_code_names
from engine.launch.command_checks import folder_problem
from engine.launch.detached import start_detached
from engine.launch.request import RunRequest
from engine.runs.control import consume_requests
from engine.runs.metrics import Better
from engine.runs.root import is_run_folder
from engine.sweeps.controller import Controller, Emit
from engine.sweeps.folder import (
    LAST_SWEEP,
    MAX_NAME_BYTES,
    MAX_NAME_CHARACTERS,
    SweepFolder,
    controller_lock,
    is_sweep_folder,
    make_sweep_folder,
)
from engine.sweeps.plan import SweepPlan, divide_gpus, preset_values, without_name
from engine.sweeps.script import is_same_command, trial_line
from engine.sweeps.settings import SweepSettings, check_numbers
from engine.sweeps.space import Value, overrides_of
from engine.sweeps.study import SweepStudy, first_values, open_study
from engine.sweeps.sweep_file import read_settings, write_settings
from engine.utils.errors import Problem, UsageError, raise_if_any
from engine.utils.exit_codes import ExitCode
from engine.utils.files import append_to_file, replace_file
from engine.utils.process import SignalHandler, ignore_sighup

DETACH_TIMEOUT_SECONDS = 20.0


def check_name(name: str) -> str:
    """Return the normalized name. Raises UsageError if a sweep must not have it."""
    name = normalize_name(name)
    if (problem := name_problem(name, MAX_NAME_CHARACTERS, MAX_NAME_BYTES)) is not None:
        raise UsageError.one("--name", f"{name!r} is not allowed: {problem}", code="invalid-name")
    if name == LAST_SWEEP:
        raise UsageError.one(
            "--name", f"{name} is reserved: it stands for the latest sweep", "use another name", code="invalid-name"
        )
    return name


def choose_folder(root: Path, name: str | None, plan: SweepPlan, stem: str) -> SweepFolder:
    """Return the folder of the sweep that a command means: the existing one with the same settings, else a new one.

    Without a name, a sweep of `flowers.yaml`, whose `stem` is `flowers`, is called `flowers-sweep`, or
    `flowers-sweep-2` if that is another one. Raises UsageError if the name belongs to a sweep with other settings, or
    to something else.
    """
    if name is not None:
        name = check_name(name)
        folder = SweepFolder(root / name)
        if is_sweep_folder(folder.path):
            if differences := _differences(folder, plan):
                reason = f"the sweep {name} already exists in {root} with another {', '.join(differences)}"
                advice = f"use another --name, or continue it with `gputrain sweep resume {name}`"
                raise UsageError.one("--name", reason, advice, code="conflict")
        elif taken := _taken_name(folder):
            raise UsageError.one(
                "--name", f"{taken} already exists in {root}", "use another name with --name", code="name-in-use"
            )
        return folder
    stem = name_from_stem(stem)[: MAX_NAME_CHARACTERS - 12]
    for number in count(1):
        folder = SweepFolder(root / (f"{stem}-sweep" + (f"-{number}" if number > 1 else "")))
        if is_sweep_folder(folder.path):
            if not _differences(folder, plan):
                return folder
        elif _taken_name(folder) is None:
            return folder
    raise AssertionError("unreachable")


def _differences(folder: SweepFolder, plan: SweepPlan) -> list[str]:
    """Return the names of the settings in which an existing sweep differs from a planned one."""
    found = read_settings(folder.settings).differences(plan.settings)
    if not found and plan.command is not None and not is_same_command(folder, plan.command):
        return ["working folder or option of the command"]
    return found


def _taken_name(folder: SweepFolder) -> str | None:
    """Return the file or run that a new sweep of this name would meet: its own folder, or a run named like a trial."""
    path = folder.path
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not is_run_folder(path)):
        return path.name
    trials = sorted(path.parent.glob(f"{path.name}-[0-9][0-9][0-9]*"))
    return trials[0].name if trials else None


def create_sweep(folder: SweepFolder, plan: SweepPlan) -> None:
    """Write the files of a new sweep; `sweep.yaml`, which makes it one, last. Raises UsageError."""
    make_sweep_folder(folder)
    with controller_lock(folder):
        text = plan.config_yaml
        try:
            replace_file(folder.config, lambda file: file.write(text.encode()), durable=True)
            if plan.command is not None:
                write_command(folder, plan.command)
            write_settings(folder.settings, plan.settings)
        except OSError as error:
            raise UsageError.one(
                str(folder.path), f"cannot be written to: {error.strerror}", code="not-writable"
            ) from error


def load_sweep(
    folder: SweepFolder,
    *,
    trials: int | None = None,
    parallel: int | None = None,
    trust_code: bool = False,
    command: Command | None = None,
) -> SweepPlan:
    """Load a sweep to continue it, and store another number of trials or of parallel trials. `command` is the stored
    one of a script, which the caller trusts. Raises UsageError."""
    stored = read_settings(folder.settings)
    settings = replace(
        stored,
        trials=stored.trials if trials is None else trials,
        parallel=stored.parallel if parallel is None else parallel,
    )
    raise_if_any(check_numbers(settings))
    divide_gpus(settings.device.get("device.gpus", ""), settings.parallel)
    config = without_name(resolve_config(str(folder.config), trust_code=trust_code).config)
    if not trust_code and (reason := folder.foreign_reason()) is not None:
        refuse_user_code(folder, settings, reason)
    preset = dict[str, Value]()
    outside = tuple[str, ...]()
    if command is not None:
        request = RunRequest(config, folder.path.parent, "", code_trust=CodeTrust(trust_code))
        raise_if_any([problem] if (problem := folder_problem(request, command)) is not None else [])
    else:
        preset = preset_values(config, settings.spaces(), trust_code=trust_code)
        outside = tuple(key for key in settings.space if key not in preset)
    if settings != stored:
        try:
            write_settings(folder.settings, settings)
        except OSError as error:
            raise UsageError.one(
                str(folder.settings), f"cannot be written to: {error.strerror}", code="not-writable"
            ) from error
    return SweepPlan(settings, config, preset, outside, command=command)


def refuse_user_code(folder: SweepFolder, settings: SweepSettings, foreign: str) -> None:
    """Raise UsageError if a sweep that others can change searches user code: its values count as typed arguments."""
    for key, space in settings.spaces().items():
        for value in space.probes():
            config = resolve_config(str(folder.config), overrides_of({key: value})).config
            if key in ("run.code", URLS_KEY) or key in user_code_names(config):
                reason = f"{value} is not imported: the sweep {folder.name} {foreign}"
                raise UsageError.one(key, reason, TRUST_ADVICE, code="untrusted-code")


def run_sweep(
    folder: SweepFolder, plan: SweepPlan, *, command: Sequence[str], flags: Sequence[str], emit: Emit
) -> ExitCode:
    """Run the controller of a sweep to its end or to a stop. Raises UsageError if it is already running."""
    with controller_lock(folder):
        # A request that an earlier controller has not read.
        for _ in consume_requests(folder.control):
            pass
        study = open_study(folder, plan.settings, create=True)
        log = append_to_file(folder.log)

        def report(line: str) -> None:
            os.write(log, f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n".encode())
            emit(line)

        try:
            ignore_sighup()
            signals = SignalHandler()
            signals.install()
            _announce(folder, plan, study, report)
            return Controller(folder, plan, study, command, flags, report, signals).run()
        finally:
            os.close(log)


def _announce(folder: SweepFolder, plan: SweepPlan, study: SweepStudy, report: Emit) -> None:
    """Report what the sweep is about to do."""
    for line in plan_lines(folder, plan, len(study.trials())):
        report(line)


def plan_lines(folder: SweepFolder, plan: SweepPlan, done: int = 0) -> Iterator[str]:
    """Yield what a sweep searches and how; `done` is the number of trials that have begun."""
    settings = plan.settings
    begun = f", {done} begun" if done else ""
    how = f"{settings.parallel} at a time, sampler {settings.sampler}, pruner {settings.pruner}"
    yield f"{folder.name}: {settings.trials} trials{begun}, {how}, in {folder.path}"
    for key, text in settings.space.items():
        yield f"  {key} in {text}"
    if plan.outside and not done:
        keys = " and ".join(plan.outside)
        yield f"trial 0 is the config itself, although its value of {keys} is not in the space"


def dry_run_lines(folder: SweepFolder, plan: SweepPlan) -> Iterator[str]:
    """Yield the plan of a sweep with the command of its first trial."""
    yield from plan_lines(folder, plan)
    settings = plan.settings
    verb = "minimizes" if settings.objective.better is Better.LOW else "maximizes"
    shares = divide_gpus(settings.device["device.gpus"], settings.parallel)
    yield (
        f"{verb} {settings.metric_name}; each trial has the GPUs {' or '.join(shares)}"
        if shares != ["cpu"]
        else (f"{verb} {settings.metric_name}; the trials run on the CPU")
    )
    if settings.command:
        yield f"first trial: {trial_line(settings, first_values(settings))}"
    else:
        yield "first trial: the config itself"


def detach_sweep(folder: SweepFolder, command: Sequence[str], flags: Sequence[str]) -> Problem | None:
    """Start the controller in the background, and wait until it runs. Return a warning about the background, if any.

    `command` is the gputrain command line, `flags` are flags of its `sweep resume`. Raises UsageError if it ends."""
    root = folder.path.parent
    launched = start_detached([*command, "sweep", "resume", folder.name, "--runs-dir", str(root), *flags], root)
    deadline = time.monotonic() + DETACH_TIMEOUT_SECONDS
    while not folder.is_running() and time.monotonic() < deadline:
        if launched.exit_code is not None:
            if launched.exit_code == 0:
                break
            reason = "; ".join(launched.output_lines()[-3:]) or "it ended at once"
            raise UsageError.one(folder.name, f"the sweep could not be started: {reason}", code="not-started")
        time.sleep(0.05)
    return launched.warning
