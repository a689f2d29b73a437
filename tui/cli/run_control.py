"""`gputrain stop`, `gputrain runs pause`, `continue` and `checkpoint`: requests to live runs, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from engine.base.codec import InvalidRecordError, asdict
from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.text import list_names, printable
from engine.base.units import format_duration
from engine.jobs.command.process_tree import describe_unkillable
from engine.jobs.launch.survivors import stop_survivors
from engine.runs.batch.job import cancel_job
from engine.runs.control import RequestName
from engine.runs.events import CheckpointSaved, Profiled, RunContinued, RunPaused, WarningEvent
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, RunState
from engine.runs.profile_file import Profile, diagnose_profile, newest_profile, read_profile
from engine.runs.root import runs_root
from engine.runs.run_row import RunRow, claim_message, open_run
from engine.runs.sent_request import SentRequest
from tui.cli.command import command
from tui.cli.console import print_error, print_json, print_lines, table_console
from tui.cli.options import JsonOption, NoWaitOption, RunsDirOption, TrustOwnerOption, run_argument
from tui.cli.run_options import for_each, takes_run, takes_runs, watch_other_hosts

T = TypeVar("T")
Answer = str | Problem | None
"""What a run did as the end of a sentence, why it did not, or None as long as it has not answered."""
POLL_SECONDS = 0.2
# After this time without an answer, it is said what is awaited.
PATIENCE_SECONDS = 10.0
JOB_GRACE_SECONDS = 120.0  # for the checkpoint of a run; then its job is cancelled, which also ends one that hangs
ANSWER_CODES = {0: "all runs answered, or --no-wait", 1: "a run is not live, or did not do it", 2: "usage error"}


@command(["gputrain stop last", "gputrain stop fashion-17 fashion-18 --no-wait"])
def stop(
    *,
    runs: Annotated[list[str], run_argument("RUN...")],
    no_wait: NoWaitOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Stop runs at their next step and save checkpoints.

    Waits until all have stopped. A waiting run leaves the queue: its folder stays, as a stopped run, and runs that wait
    for it are held. A job in Slurm or Ray is cancelled if it waits, or if its run does not stop within two minutes.
    `gputrain resume RUN` starts a run again. A second request kills the processes of a command at once.
    """
    from engine.jobs.queue.edit import cancel_interrupted

    cancels_at = time.monotonic() + JOB_GRACE_SECONDS

    def refuse(folder: RunFolder, run: RunRow) -> Answer:
        state = run.state
        if state == RunState.INTERRUPTED and folder.is_own and cancel_interrupted(folder):
            return f"is {RunState.STOPPED}"
        if (cancelled := cancel_job(folder)) is not None:
            return cancelled
        if not run.live and (ended := _stop_survivors(folder)) is not None:
            return ended
        return None if run.live else f"is not running: it is {state}"

    def answer(sent: SentRequest) -> Answer:
        why = claim_message(sent.folder, RunState.CRASHED) if sent.row.state == RunState.CRASHED else ""
        if sent.row.live and time.monotonic() > cancels_at:
            return cancel_job(sent.folder, is_owned=True)
        return None if sent.row.live else f"is {sent.row.state}{f': {why}' if why else ''}"

    found = for_each(runs, lambda name: _find_stoppable(name, runs_dir, trust_owner=trust_owner))
    _send([*{folder.path: folder for folder in found}.values()], "stop", answer, no_wait=no_wait, refuse=refuse)


def _stop_survivors(folder: RunFolder) -> Answer:
    """End what is left of a command whose supervisor has ended; None if nothing is."""
    count, unkillable = stop_survivors(folder)
    if unkillable:
        return Problem("", f"{folder.name}: {describe_unkillable(unkillable)}", code="process-left")
    return f"is not running, and its processes ({count}) are ended" if count else None


def _find_stoppable(name: str, runs_dir: str | None, *, trust_owner: bool) -> RunFolder:
    """Return a run, or one in another runs folder that `gputrain queue` lists. Raises UsageError."""
    from engine.jobs.queue.edit import find_own_row

    root = runs_root(runs_dir)
    try:
        return find_run(root, name, trust_owner=trust_owner)
    except UsageError as error:
        if error.problems[0].code != "unknown-run":
            raise
        row = find_own_row(name, root)
        if name not in (row.name, row.folder):
            # `last` means runs of this folder only.
            raise
        typer.echo(f"{printable(row.name)} is in {printable(row.folder)}.", err=True)
        return RunFolder(Path(row.folder))


@command(["gputrain runs pause last", "gputrain runs pause fashion-17 fashion-18 --no-wait"], exit_codes=ANSWER_CODES)
@takes_runs
def pause(*, folders: list[RunFolder], no_wait: NoWaitOption = False) -> None:
    """Pause live runs at their next step.

    Waits until all are paused. They keep their processes and GPUs.
    """

    def answer(sent: SentRequest) -> Answer:
        # Somebody may continue it at once.
        if sent.was_received and (sent.row.state == RunState.PAUSED or sent.has_answered(RunPaused)):
            return "is paused"
        return _revoked(sent, "continue")

    _send(folders, "pause", answer, no_wait=no_wait)


@command(["gputrain runs continue last", "gputrain runs continue fashion-17 fashion-18"], exit_codes=ANSWER_CODES)
@takes_runs
def continue_runs(*, folders: list[RunFolder], no_wait: NoWaitOption = False) -> None:
    """Continue paused runs.

    Waits until none is paused.
    """

    def answer(sent: SentRequest) -> Answer:
        if sent.has_answered(RunContinued):
            return "is running"
        if sent.was_received and sent.row.live and sent.row.state != RunState.PAUSED:
            return f"is {sent.row.state}"
        return _revoked(sent, "pause")

    _send(folders, "continue", answer, no_wait=no_wait)


def _revoked(sent: SentRequest, request: RequestName) -> Problem | None:
    """Return who revoked a request with the opposite one before the run could do it; None if nobody did."""
    later = sent.find_later(request)
    if later is None:
        return None
    reason = f"{sent.folder.name} did not {sent.request}: {later.by} sent a {request} request"
    return Problem("", reason, code="wrong-state")


@command(["gputrain runs checkpoint last", "gputrain runs checkpoint fashion-17 --no-wait"], exit_codes=ANSWER_CODES)
@takes_runs
def checkpoint(*, folders: list[RunFolder], no_wait: NoWaitOption = False) -> None:
    """Save checkpoints of live runs now.

    Each is saved at the next step, and of a paused run at once. Waits until all are written.
    """

    def answer(sent: SentRequest) -> Answer:
        for event in sent.events:
            if isinstance(event, CheckpointSaved) and event.requested:
                return f"saved {event.path} at step {event.step}"
            if isinstance(event, WarningEvent) and event.code == "not-writable":
                return Problem("", event.message, code=event.code)
        return None

    _send(folders, "checkpoint", answer, no_wait=no_wait)


def _not_training(folder: RunFolder, run: RunRow) -> Problem | None:
    """Return why a run would not answer; None if it would."""
    if not run.live or run.state == RunState.WAITING:
        return Problem("", f"{folder.name} is not running: it is {run.state}", code="not-running")
    if run.record.command:
        return Problem("", f"{folder.name} runs a command, which can only be stopped", code="not-supported")
    return None


def _send(
    folders: Sequence[RunFolder],
    request: RequestName,
    answer: Callable[[SentRequest], Answer],
    *,
    no_wait: bool,
    refuse: Callable[[RunFolder, RunRow], Answer] = _not_training,
) -> None:
    """Send a request to runs, and print what `answer` makes of each, or `refuse` of one that gets no request.

    Exits with code 1 if one is refused, ends or does not do it. Raises UsageError if this user may not control one.
    """

    def show(folder: RunFolder, found: str | Problem) -> bool:
        """Return whether it is a problem."""
        if isinstance(found, Problem):
            print_error(found)
        else:
            typer.echo(f"{printable(folder.name)} {found}.", err=True)
        return isinstance(found, Problem)

    def answer_or_end(sent: SentRequest) -> Answer:
        if (found := answer(sent)) is not None or sent.row.live:
            return found
        return Problem("", f"{sent.folder.name} did not {request}: it is {sent.row.state}", code="not-running")

    watch_other_hosts(folders)
    problems, sent, has_failed = list[Problem](), list[SentRequest](), False
    for folder in folders:
        with collect_problems(problems):
            if (refused := refuse(folder, open_run(folder))) is not None:
                has_failed |= show(folder, refused)
                continue
            sent.append(SentRequest(folder, request))
            if no_wait:
                typer.echo(f"Sent the {request} request to {printable(folder.name)}.", err=True)
    found_answers: Iterator[tuple[SentRequest, str | Problem]] = answers([] if no_wait else sent, answer_or_end)
    for each, found in found_answers:
        has_failed |= show(each.folder, found)
    raise_if_any(problems)
    if has_failed:
        raise typer.Exit(1)


def answers(sent: list[SentRequest], answer: Callable[[SentRequest], T | None]) -> Iterator[tuple[SentRequest, T]]:
    """Yield each request once `answer` finds something, with that. Says so if it takes long."""
    start, is_told = time.monotonic(), False
    while sent:
        if time.monotonic() - start > PATIENCE_SECONDS and not is_told:
            is_told = True
            typer.echo(describe_wait(sent), err=True)
        time.sleep(POLL_SECONDS)
        for each in sent.copy():
            each.poll()
            if (found := answer(each)) is not None:
                sent.remove(each)
                yield each, found


def describe_wait(sent: Sequence[SentRequest]) -> str:
    """Return what is awaited: first that all runs receive the request."""
    silent = [each for each in sent if not each.was_received]
    names = printable(list_names([each.folder.name for each in silent or sent]))
    if silent:
        return f"Waiting for {names} to receive the request; the supervisor is suspended, or the host is busy."
    return f"Waiting for {names} to {sent[0].request}."


# As in `engine.runs.control`, which the help must not import.
DEFAULT_PROFILE_STEPS, MAX_PROFILE_STEPS = 10, 100
# A run that hangs answers nothing.
MAX_WAIT_SECONDS = 300


@command(
    [
        "gputrain runs profile last",
        "gputrain runs profile fashion-17 --steps 30",
        "gputrain runs profile last --stored --json",
    ],
    "A profiled step is slower. Traces are in RUN/profile.",
    exit_codes={0: "a profile was taken", 1: "no profile was taken", 2: "usage error"},
)
@takes_run
def profile(
    *,
    folder: RunFolder,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            max=MAX_PROFILE_STEPS,
            help=f"Optimizer steps to profile [default: {DEFAULT_PROFILE_STEPS}]",
        ),
    ] = None,
    stored: Annotated[bool, typer.Option("--stored", help="Show the newest profile that was taken before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Profile training steps of a live run.

    All ranks record the same steps with torch.profiler. Prints the time that each rank spends on data, forward,
    backward with its all-reduce, and optimizer, and where the traces for Perfetto are.
    """
    if stored and steps is not None:
        raise UsageError.one("--stored", "shows a profile that was taken before; omit --steps", code="conflict")
    if stored:
        found = newest_profile(folder)
        if found is None:
            advice = f"take one while it trains with `gputrain runs profile {folder.name}`"
            fail(f"{folder.name} has no profile; {advice}", code="not-recorded")
        show(folder, *found, as_json=as_json)
        return
    event = request_profile(folder, DEFAULT_PROFILE_STEPS if steps is None else steps)
    if not event.folder:
        fail(f"no profile of {folder.name}: {event.message}", code="not-recorded")
    name = event.folder.rpartition("/")[2]
    try:
        show(folder, name, read_profile(folder, name), as_json=as_json)
    except InvalidRecordError as error:
        fail(f"{event.folder} {error}", code=error.code)


def request_profile(folder: RunFolder, steps: int) -> Profiled:
    """Ask a live run for a profile, and return the event that answers it.

    Exits with code 1 if the run is not live or does not answer. Raises UsageError if this user may not control it.
    """
    deadline = time.monotonic() + MAX_WAIT_SECONDS

    def answer(sent: SentRequest) -> Profiled | None:
        found = next((event for event in sent.events if isinstance(event, Profiled)), None)
        if found is None and not sent.row.live:
            fail(f"no profile of {folder.name}: it is {sent.row.state}", code="not-running")
        if found is None and time.monotonic() > deadline:
            advice = "the request stays, see it later with --stored"
            fail(f"no profile of {folder.name} within {format_duration(MAX_WAIT_SECONDS)}; {advice}", code="timed-out")
        return found

    watch_other_hosts([folder])
    run = open_run(folder)
    state = run.state
    if run.record.command:
        fail(f"{folder.name} runs a command; only trainings can be profiled", code="not-supported")
    if state == RunState.WAITING or not run.live:
        advice = "take a profile when it trains; those that were taken before are shown with --stored"
        fail(f"{folder.name} is not running: it is {state}; {advice}", code="not-running")
    if state == RunState.PAUSED:
        typer.echo(f"{folder.name} is paused; the profile begins when it continues.", err=True)
    sent = SentRequest(folder, "profile", steps=steps)
    [(_, event)] = answers([sent], answer)
    return event


def show(folder: RunFolder, name: str, profile: Profile, *, as_json: bool) -> None:
    """Print a profile to stdout."""
    path = str(folder.profiles / name)
    if as_json:
        own = {"run": folder.name, "folder": path, "diagnosis": diagnose_profile(profile)}
        print_json(asdict(profile) | own)
        return
    from tui.screens.tables.profile import profile_lines, trace_lines

    console = table_console()
    print_lines(console, [*profile_lines(profile, console.width), *trace_lines(profile, path)])


def fail(reason: str, *, code: str) -> NoReturn:
    """Print an error and exit with code 1."""
    print_error(Problem("", reason, code=code))
    raise typer.Exit(1)
