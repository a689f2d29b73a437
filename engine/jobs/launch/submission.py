"""Submit a run to a batch system, such as `gputrain run --on slurm`: its folder, the script of its job, and its record.

A submitted run is a run folder that no process owns, as one whose wait was interrupted: the record says that it waits,
`job.json` which job will start it (`engine.runs.batch.job`), and its code is recorded. The job continues it like any
other run, `gputrain run --headless … --name NAME --resume`, so the script may run as often as the batch system wants.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from engine.base.codec import replace as replace_fields
from engine.base.errors import UsageError, raise_if_any
from engine.base.files import replace_file
from engine.config.limits import read_limits, requested_gpus
from engine.config.schema import Config
from engine.jobs.command.devices import JOB_PLACEHOLDERS, find_placeholders
from engine.jobs.launch.command_checks import find_command_problems
from engine.jobs.launch.phases import AlreadyFinishedError, Held, Requested, RunListener, claim
from engine.jobs.launch.request import RunRequest, limit_problems
from engine.runs.batch.engine import JobRequest
from engine.runs.batch.job import require_no_open_job, write_job
from engine.runs.batch.states import find_engine
from engine.runs.events import WaitingForGpus
from engine.runs.folder import RunFolder
from engine.runs.run_record import read_run_record

OWN_WORDS = ("--headless", "--detach", "--resume", "--queue")
OWN_OPTIONS = ("--name", "--runs-dir", "--time-limit", "--launcher")
OWN_KEYS = ("run.name=", "run.resume=", "queue.time_limit=", "device.wait=", "device.launcher=")
"""Words of `gputrain run` that the script has of its own, or that only mean the host where they are typed."""
GPU_OPTIONS = ("--gpus", "--ngpu")
JOB_SCRIPT = "job.sh"


@dataclass(frozen=True)
class JobOptions:
    """What `gputrain run` asks of a batch system beside the run. `options` are words for it, as typed."""

    nodes: int = 1
    partition: str = ""
    options: Sequence[str] = ()


def submit_run(engine: str, run: RunRequest, words: Sequence[str], options: JobOptions) -> tuple[str, str]:
    """Submit a run, and return its name and a sentence. `words` are those behind `gputrain run` that say what runs.

    Raises UsageError, and leaves nothing behind then."""
    run = _checked(engine, run, options)
    try:
        with Held() as held:
            claimed = claim(Requested(run, RunListener(lambda _: None), held), run.config)
            folder = claimed.folder
            job = submit_job(engine, folder, _job_request(engine, run, folder.path, words, options))
            claimed.recorder.record(WaitingForGpus(message=f"submitted as {engine} job {job}"))
    except AlreadyFinishedError:
        raise UsageError.one(str(run.config.run.name), "has already finished", code="already-finished") from None
    return folder.name, f"Submitted as {engine} job {job}."


def submit_job(engine: str, folder: RunFolder, request: JobRequest) -> str:
    """Submit a job for a folder, and return the ID of the job. Raises UsageError, and OSError."""
    system, path = find_engine(engine), folder.path / JOB_SCRIPT
    script = system.script(request).encode(errors="surrogateescape")
    replace_file(path, lambda file: file.write(script))
    job = system.submit(path, request)
    write_job(folder, engine, job)
    return job


def print_script(engine: str, run: RunRequest, words: Sequence[str], options: JobOptions) -> str:
    """Return the script that `submit_run` would submit. Raises UsageError as that does."""
    run = _checked(engine, run, options)
    names = (f"{run.default_name}-{number}" for number in count(1))
    name = run.config.run.name or next(name for name in names if not (run.runs_dir / name).exists())
    return find_engine(engine).script(_job_request(engine, run, run.runs_dir / name, words, options))


def _checked(engine: str, run: RunRequest, options: JobOptions) -> RunRequest:
    """Return the request as it is stored. Raises UsageError if no job can carry it out."""
    config = run.config
    check_job_config(engine, config)
    found = find_engine(engine)
    starts_ranks = run.command is None and found.starts_ranks(options.nodes)
    if config.run.snapshot and starts_ranks:
        reason = f"is not available for a training whose ranks {engine} starts"
        advice = "commit the code, and do not change it meanwhile"
        raise UsageError.one("run.snapshot", reason, advice, code="not-supported")
    if config.queue.time_limit and starts_ranks and not found.requeues:
        raise UsageError.one("queue.time_limit", f"is not available for a training on {engine}", code="not-supported")
    folder = run.resumed_folder
    if folder is not None and (record := read_run_record(folder)) is not None:
        require_no_open_job(folder, record.state)
    if run.command is not None:
        if _is_per_node(run):
            argv = tuple(found.per_node(run.command.argv))
            run = replace(run, command=replace_fields(run.command, argv=argv))
        assert run.command is not None  # noqa: S101 (as before)
        raise_if_any(find_command_problems(run, run.command))
    raise_if_any([*run.problems, *limit_problems(run)])
    return run


def check_job_config(engine: str, config: Config) -> None:
    """Raise UsageError for the keys that a job cannot have."""
    selection = config.device.gpus
    if selection != "cpu" and not selection.startswith("free:"):
        advice = f"type --ngpu N, those of each node, or --ngpu 0 for the CPU; {engine} chooses which"
        raise UsageError.one("--gpus", f"{selection} names no number of GPUs", advice, code="missing-value")
    for key in ("after", "begin", "min_free"):
        if getattr(config.queue, key):
            reason = f"is of the queue of this host, and not of {engine}"
            raise UsageError.one(f"queue.{key}", reason, code="not-supported")


def _is_per_node(run: RunRequest) -> bool:
    """Whether each node of a job runs the command, whose words name the nodes."""
    return run.command is not None and not {*JOB_PLACEHOLDERS}.isdisjoint(find_placeholders(run.command.argv))


def _job_request(engine: str, run: RunRequest, folder: Path, words: Sequence[str], options: JobOptions) -> JobRequest:
    """Return the job of a run in this folder. Raises UsageError."""
    config, command = run.config, run.command
    gpus, hours = requested_gpus(config.device.gpus), read_limits().hours
    typed = [*words[: [*words, "--"].index("--")]]
    kept = without_options(typed, OWN_WORDS, OWN_OPTIONS)
    kept = [word for word in kept if not word.startswith(OWN_KEYS)]
    kept += ["--name", folder.name, "--resume"]
    found = find_engine(engine)
    starts_ranks = command is None and found.starts_ranks(options.nodes)
    if starts_ranks and gpus and found.rank_gpus:
        kept = [word for word in without_options(kept, (), GPU_OPTIONS) if not word.startswith("device.gpus=")]
        kept += ["--gpus", found.rank_gpus]
    if found.requeues and "run.requeue" not in run.typed:
        kept.append("run.requeue=true")
    if not found.requeues and config.queue.time_limit:
        kept.append(f"queue.time_limit={config.queue.time_limit:g}")
    elif config.queue.time_limit and "queue.time_limit" not in run.typed and hours is None:
        # That of the job counts, which is requeued then.
        kept.append("queue.time_limit=0")
    if command is not None:
        # srun takes the first SIGINT for a question.
        is_default = _is_per_node(run) and "--stop-signal" not in typed
        kept += [*["--stop-signal", "TERM"] * is_default, "--", *command.argv]
    per_node = gpus or config.device.ranks
    return JobRequest(
        name=folder.name,
        folder=Path.cwd(),
        log=RunFolder(folder).job_log,
        command=job_line("run", "--headless", *kept),
        setup=[f"export GPUTRAIN_RUNS={shlex.quote(str(run.runs_dir))}"],
        nodes=options.nodes,
        tasks_per_node=per_node if starts_ranks else 0,
        gpus=gpus,
        cores=1 if starts_ranks or command is not None else config.device.ranks,
        time_limit_min=config.queue.time_limit,
        partition=options.partition,
        options=options.options,
        names_nodes=_is_per_node(run),
    )


def job_line(*words: str) -> str:
    """Return the line of a shell that runs the gputrain of this process with these words."""
    program = Path(sys.executable).with_name("gputrain")
    return shlex.join([str(program) if program.exists() else "gputrain", *words])


def without_options(words: Sequence[str], flags: Collection[str], options: Collection[str]) -> list[str]:
    """Return words of a command line without these flags, and without these options and their values."""
    kept, rest = list[str](), iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif word not in flags and word.partition("=")[0] not in options:
            kept.append(word)
    return kept
