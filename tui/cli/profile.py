"""`gputrain runs profile`: where the time of training steps goes, measured on a live run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from engine.utils.errors import Problem, UsageError
from tui.cli.command import command
from tui.cli.console import print_error, print_json
from tui.cli.options import JsonOption
from tui.cli.run_control import answers
from tui.cli.run_options import takes_run, watch_other_hosts

if TYPE_CHECKING:
    from engine.runs.events import Profiled
    from engine.runs.folder import RunFolder
    from engine.runs.profile_file import Profile

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
    from engine.runs.profile_file import newest_profile, read_profile
    from engine.utils.codec import InvalidRecordError

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
    from engine.runs.events import Profiled
    from engine.runs.folder import RunState
    from engine.runs.record_completion import open_run
    from engine.runs.sent_request import SentRequest
    from engine.utils.units import format_duration

    deadline = time.monotonic() + MAX_WAIT_SECONDS

    def answer(sent: SentRequest) -> Profiled | None:
        found = next((event for event in sent.events if isinstance(event, Profiled)), None)
        if found is None and not sent.state.live:
            fail(f"no profile of {folder.name}: it is {sent.state}", code="not-running")
        if found is None and time.monotonic() > deadline:
            advice = "the request stays, see it later with --stored"
            fail(f"no profile of {folder.name} within {format_duration(MAX_WAIT_SECONDS)}; {advice}", code="timed-out")
        return found

    watch_other_hosts([folder])
    state = open_run(folder).state
    if state is RunState.WAITING or not state.live:
        advice = "take a profile when it trains; those that were taken before are shown with --stored"
        fail(f"{folder.name} is not running: it is {state}; {advice}", code="not-running")
    if state is RunState.PAUSED:
        typer.echo(f"{folder.name} is paused; the profile begins when it continues.", err=True)
    sent = SentRequest(folder, "profile", steps=steps)
    [(_, event)] = answers([sent], answer)
    return event


def show(folder: RunFolder, name: str, profile: Profile, *, as_json: bool) -> None:
    """Print a profile to stdout."""
    from engine.runs.profile_file import diagnose_profile

    path = str(folder.profiles / name)
    if as_json:
        from engine.utils.codec import asdict

        own = {"run": folder.name, "folder": path, "diagnosis": diagnose_profile(profile)}
        print_json(asdict(profile) | own)
        return
    from tui.cli.console import table_console
    from tui.tables.profile import profile_lines, trace_lines

    console = table_console()
    for line in (*profile_lines(profile, console.width), *trace_lines(profile, path)):
        console.print(line, soft_wrap=True)


def fail(reason: str, *, code: str) -> NoReturn:
    """Print an error and exit with code 1."""
    print_error(Problem("", reason, code=code))
    raise typer.Exit(1)
