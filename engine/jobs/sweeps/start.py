"""Create the folder of a new sweep, or load an existing one to continue it, and run its controller.

`gputrain sweep` calls `create_sweep` or `load_sweep`, then `run_sweep` or `submit_sweep`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from engine.base import codec
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.exit_codes import ExitCode
from engine.base.files import append_to_file, replace_file
from engine.base.process import SignalHandler, ignore_sighup
from engine.base.text import pluralize
from engine.base.wait import wait_until
from engine.config.limits import requested_gpus
from engine.config.loader import resolve_config
from engine.config.run_name import name_from_stem, name_problem, normalize_name
from engine.config.schema import as_stored
from engine.config.user_code import TRUST_ADVICE
from engine.config.yaml_io import to_yaml
from engine.jobs.command.spec import Program, read_command, write_command
from engine.jobs.launch.detached import start_detached
from engine.jobs.launch.submission import JobOptions, job_line, submit_job
from engine.jobs.sweeps.controller import Controller, Emit
from engine.jobs.sweeps.folder import LAST_SWEEP, MAX_NAME_BYTES, MAX_NAME_CHARACTERS, SweepFolder, is_sweep_folder
from engine.jobs.sweeps.plan import SweepPlan, divide_gpus, preset_values, trial_line, without_name
from engine.jobs.sweeps.settings import read_settings, write_settings
from engine.jobs.sweeps.study import first_values, open_study
from engine.runs.batch.engine import JobRequest
from engine.runs.batch.job import require_no_open_job
from engine.runs.control import consume_requests
from engine.runs.folder import RunState

DETACH_TIMEOUT_SECONDS = 20.0


def check_name(name: str) -> str:
    """Return the normalized name. Raises UsageError if a sweep must not have it."""
    name = normalize_name(name)
    problem = name_problem(name, MAX_NAME_CHARACTERS, MAX_NAME_BYTES)
    if name == LAST_SWEEP:
        problem = "it stands for the latest sweep; use another name"
    if problem is not None:
        raise UsageError.one("--name", f"{name!r} is not allowed: {problem}", code="invalid-name")
    return name


def choose_folder(root: Path, name: str | None, plan: SweepPlan, stem: str) -> SweepFolder:
    """Return the folder of the sweep that a command means: the existing one with the same settings, else a new one.

    Without a name, a sweep of `flowers.yaml`, whose `stem` is `flowers`, is called `flowers-sweep`, or
    `flowers-sweep-2` if that is another one. Raises UsageError if the name is in use.
    """
    if name is None:
        stem = name_from_stem(stem)[: MAX_NAME_CHARACTERS - 12]
        names = (f"{stem}-sweep" + (f"-{number}" if number > 1 else "") for number in count(1))
        return next(folder for each in names if not _taken_by(folder := SweepFolder(root / each), plan))
    folder = SweepFolder(root / check_name(name))
    if taken := _taken_by(folder, plan):
        advice = "use another --name"
        if is_sweep_folder(folder.path):
            advice += f", or continue the sweep with `gputrain sweep resume {folder.name}`"
        raise UsageError.one("--name", f"{taken} already exists in {root}", advice, code="name-in-use")
    return folder


def _taken_by(folder: SweepFolder, plan: SweepPlan) -> str:
    """Return the file, run or sweep with other settings that has the name of a planned sweep or of one of its trials,
    "" if none has."""
    if is_sweep_folder(folder.path) and _continues(folder, plan):
        return ""
    trials = sorted(folder.path.parent.glob(f"{folder.name}-[0-9][0-9][0-9]*"))
    return folder.name if os.path.lexists(folder.path) else trials[0].name if trials else ""


def _continues(folder: SweepFolder, plan: SweepPlan) -> bool:
    """Whether a plan is that of an existing sweep, but for the number of trials and their environment.

    Raises UsageError if that sweep cannot be read."""
    stored, planned = read_settings(folder.settings), plan.settings
    changeable = {"trials": planned.trials, "parallel": planned.parallel, "device": planned.device}
    if codec.replace(stored, **changeable) != planned:
        return False
    if (command := plan.command) is None:
        return True
    previous = read_command(folder)
    same_place = codec.replace(previous, environment=command.environment, cwd_inode=command.cwd_inode)
    typed = [previous.environment.get(name) == command.environment[name] for name in command.expanded]
    return same_place == command and all(typed)


def create_sweep(folder: SweepFolder, plan: SweepPlan) -> None:
    """Write the files of a new sweep; `sweep.yaml`, which makes it one, last. Raises UsageError."""
    folder.make()
    text = to_yaml(as_stored(plan.config))
    with folder.writing():
        replace_file(folder.config, lambda file: file.write(text.encode()), durable=True)
        if plan.command is not None:
            write_command(folder, plan.command)
        write_settings(folder.settings, plan.settings)


def load_sweep(
    folder: SweepFolder, numbers: dict[str, Any], *, trust_code: bool = False, command: Program | None = None
) -> SweepPlan:
    """Load a sweep to continue it, and store other `numbers`, its `trials` and `parallel`. `command` is the stored one
    of a script, which the caller trusts. Raises UsageError."""
    stored = read_settings(folder.settings)
    settings = codec.replace(stored, **numbers)
    raise_if_any(settings.check()[1])
    divide_gpus(settings.device.get("device.gpus", ""), settings.parallel)
    if not trust_code and (reason := folder.foreign_reason()) is not None:
        # Its values count as typed arguments, and may name code.
        raise UsageError.one(folder.name, f"its trials do not run: {reason}", TRUST_ADVICE, code="untrusted-code")
    config = without_name(resolve_config(str(folder.config), trust_code=trust_code).config)
    preset = preset_values(config, settings.spaces()) if command is None else {}
    if settings != stored:
        with folder.writing():
            write_settings(folder.settings, settings)
    return SweepPlan(settings, config, preset, command=command)


def run_sweep(
    folder: SweepFolder, plan: SweepPlan, *, command: Sequence[str], flags: Sequence[str], emit: Emit, task: str = ""
) -> ExitCode:
    """Run the controller of a sweep to its end or to a stop, or with `task`, the ID of a job of an array, one trial.

    Raises UsageError if it is already running."""
    if not task:
        require_no_open_job(folder, RunState.WAITING)
    with nullcontext() if task else folder.controller_lock():
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
            for line in () if task else plan_lines(folder, plan, len(study.trials())):
                report(line)
            return Controller(folder, plan, study, command, flags, report, signals, task).run()
        finally:
            os.close(log)


def submit_sweep(folder: SweepFolder, plan: SweepPlan, engine: str, options: JobOptions, flags: Sequence[str]) -> str:
    """Submit the trials that have not ended as an array of jobs, and return a sentence. `flags` are those of `gputrain
    sweep resume`. Raises UsageError."""
    settings, gpus = plan.settings, requested_gpus(plan.settings.device["device.gpus"])
    require_no_open_job(folder, RunState.WAITING)
    with folder.controller_lock(), folder.writing():
        trials = open_study(folder, settings, create=True).trials()
        left = settings.trials - sum(trial.state.is_finished() for trial in trials)
        if left <= 0:
            raise UsageError.one(folder.name, "has no trial left; --trials N adds some", code="already-finished")
        request = JobRequest(
            name=folder.name,
            folder=Path.cwd(),
            log=folder.job_log,
            command=job_line("sweep", "resume", folder.name, "--runs-dir", str(folder.path.parent), *flags),
            gpus=gpus,
            cores=1 if gpus or plan.command is not None else plan.config.device.ranks,
            time_limit_min=plan.config.queue.time_limit,
            partition=options.partition,
            options=options.options,
            array_size=left,
            array_limit=settings.parallel,
        )
        job = submit_job(engine, folder, request)
    return f"Submitted as {engine} job {job}: {pluralize(left, 'trial')}, {settings.parallel} at a time."


def plan_lines(folder: SweepFolder, plan: SweepPlan, done: int = 0) -> Iterator[str]:
    """Yield what a sweep searches and how; `done` is the number of trials that have begun."""
    settings = plan.settings
    begun = f", {done} begun" if done else ""
    how = f"{settings.parallel} at a time, sampler {settings.sampler}, pruner {settings.pruner}"
    yield f"{folder.name}: {settings.trials} trials{begun}, {how}, in {folder.path}"
    for key, text in settings.space.items():
        yield f"  {key} in {text}"
    outside = [] if settings.command or done else [key for key in settings.space if key not in plan.preset]
    if outside:
        yield f"trial 0 is the config itself, although its value of {' and '.join(outside)} is not in the space"


def dry_run_lines(folder: SweepFolder, plan: SweepPlan) -> Iterator[str]:
    """Yield the plan of a sweep with the command of its first trial."""
    yield from plan_lines(folder, plan)
    settings = plan.settings
    first = trial_line(settings, first_values(settings)) if settings.command else "the config itself"
    yield f"first trial: {first}"


def detach_sweep(folder: SweepFolder, command: Sequence[str], flags: Sequence[str]) -> Problem | None:
    """Start the controller in the background, and wait until it runs. Return a warning about the background, if any.

    `command` is the gputrain command line, `flags` are flags of its `sweep resume`. Raises UsageError if it ends."""
    root = folder.path.parent
    launched = start_detached([*command, "sweep", "resume", folder.name, "--runs-dir", str(root), *flags], root)
    wait_until(lambda: folder.is_owned() or launched.exit_code is not None, DETACH_TIMEOUT_SECONDS)
    if launched.exit_code:
        reason = "; ".join(launched.output_lines()[-3:]) or "it ended at once"
        raise UsageError.one(folder.name, f"the sweep could not be started: {reason}", code="not-started")
    return launched.warning
