"""Arguments, options and error reporting that the commands share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tui.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.config.code_trust import CodeTrust
    from engine.config.loader import ResolvedConfig
    from engine.runs.folder import RunFolder
    from engine.utils.errors import Problem


FlagValue = str | bool | tuple[str, ...]
"""A value as typed, or one that needs no parsing."""


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Print one line for each problem of a UsageError and exit with code 2."""
    from engine.utils.errors import UsageError

    try:
        yield
    except UsageError as error:
        for problem in error.problems:
            print_error(problem)
        raise typer.Exit(2) from error


def print_error(problem: Problem) -> None:
    """Print an error on stderr, escaped: it may contain the names of other users' runs and files."""
    from engine.utils.text import printable

    typer.echo(f"error: {printable(str(problem))}", err=True)


def print_warning(problem: Problem) -> None:
    """Print a warning on stderr, escaped as an error."""
    from engine.utils.text import printable

    typer.echo(f"warning: {printable(str(problem))}", err=True)


def watch_other_hosts(folders: Sequence[RunFolder], *, take_over: bool = False) -> None:
    """Watch the heartbeats of runs that other hosts claim, until it is known whether those live. Says so on stderr."""
    from engine.runs.claim import watch_claims

    if announce_watch(folders, take_over=take_over):
        watch_claims([folder.owner for folder in folders], take_over=take_over)


def announce_watch(folders: Sequence[RunFolder], *, take_over: bool = False) -> bool:
    """Say on stderr that heartbeats of other hosts are to be watched. Return whether there are any."""
    from engine.runs.claim import uncertain_claims
    from engine.utils.text import pluralize, printable

    owners = {folder.owner: folder for folder in folders}
    waits = uncertain_claims([*owners], take_over=take_over)
    if not waits:
        return False
    of_runs = printable(owners[next(iter(waits))].name) if len(waits) == 1 else pluralize(len(waits), "run")
    typer.echo(f"Watching the heartbeat of {of_runs} on another host for up to {max(waits.values()):g} s.", err=True)
    return True


def print_no_effect(resolved: ResolvedConfig) -> None:
    """Print a warning for each key of a config that is set and has no effect."""
    for _, warning in resolved.no_effect:
        print_warning(warning)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments into CONFIG (or None) and the `section.key=value` overrides.

    Raises UsageError if there is more than one CONFIG, or a key without a value.
    """
    from engine.config.schema import fields
    from engine.utils.errors import UsageError

    overrides = [argument for argument in arguments or [] if is_override(argument)]
    files = [argument for argument in arguments or [] if not is_override(argument)]
    if bare_keys := [file for file in files if file in dict(fields())]:
        raise UsageError.one(
            bare_keys[0], f"is a config key and needs a value: {bare_keys[0]}=VALUE", code="missing-value"
        )
    if len(files) > 1:
        raise UsageError.one(
            files[1],
            f"is a second CONFIG after {files[0]}; keep one, and set values as section.key=value",
            code="too-many",
        )
    return (files[0] if files else None), overrides


def is_override(argument: str) -> bool:
    """Return whether the argument is `section.key=value` rather than a path that contains an equals sign."""
    return "/" not in argument.partition("=")[0] and "=" in argument


def flag_overrides(values: dict[str, str | None]) -> dict[str, tuple[str, FlagValue]]:
    """Map parameters of a command and their typed values to overrides: config key -> (flag as typed, value)."""
    return {
        FLAG_TO_KEY[name]: (f"--{name.replace('_', '-')} {value}", value)
        for name, value in values.items()
        if value is not None
    }


def run_flags(
    values: dict[str, str | None], switches: dict[str, bool], ngpu: int | None
) -> dict[str, tuple[str, FlagValue]]:
    """Map the flags of a command that trains to overrides, as `flag_overrides`; `switches` are flags without a value.

    Raises UsageError if --ngpu and --gpus disagree.
    """
    from engine.utils.errors import UsageError

    flags = flag_overrides(values)
    flags |= {FLAG_TO_KEY[name]: (f"--{name}", True) for name, enabled in switches.items() if enabled}
    if ngpu is not None:
        selection, gpus = f"free:{ngpu}" if ngpu else "cpu", values["gpus"]
        if gpus is not None and gpus != selection:
            raise UsageError.one(
                "--ngpu", f"means --gpus {selection}, but --gpus {gpus} is also set; keep one", code="conflict"
            )
        flags[FLAG_TO_KEY["gpus"]] = (f"--ngpu {ngpu}", selection)
    return flags


def after_flags(after: list[str] | None, after_any: list[str] | None) -> dict[str, tuple[str, FlagValue]]:
    """Map --after and --after-any to the override of `queue.after`, as `flag_overrides`."""
    from engine.config.queue_section import ANY_END

    references = (*_split_references(after), *(f"{name}{ANY_END}" for name in _split_references(after_any)))
    return {FLAG_TO_KEY["after"]: (f"--after {','.join(references)}", references)} if references else {}


def _split_references(options: list[str] | None) -> list[str]:
    """Return the runs of `--after a,b --after c`."""
    return [part.strip() for option in options or [] for part in option.split(",") if part.strip()]


def resolve_arguments(
    arguments: list[str] | None,
    flags: Mapping[str, tuple[str, FlagValue]] | None = None,
    *,
    trust_code: bool = False,
    allow_missing: bool = False,
) -> ResolvedConfig:
    """Resolve CONFIG, overrides and flags to a config. Raises UsageError with every problem found.

    `allow_missing` accepts a config without a value that a run needs, see `resolve_config`."""
    from engine.config.loader import resolve_config

    file, overrides = split_arguments(arguments)
    return resolve_config(file, overrides, flags, trust_code=trust_code, allow_missing=allow_missing)


def code_trust(resolved: ResolvedConfig, *, granted: bool) -> CodeTrust:
    """Return whose code a resolved config may name; what runs only because of --trust-code is printed on stderr."""
    return replace(trust_option(granted=granted), foreign=resolved.foreign_code)


def trust_option(*, granted: bool) -> CodeTrust:
    """Return what --trust-code grants. Each of its messages is printed once, although several steps check the code."""
    from engine.config.code_trust import CodeTrust

    return CodeTrust(granted, notify=functools.cache(print_warning))


# `tui.cli.help` prints one line for each word of the metavar.
CONFIG_HELP = "YAML file, or preset such as digits.\nConfig override, such as optim.lr=0.1 or --optim.lr 0.1."
RUN_HELP = "Run name, unambiguous prefix, run folder, or last."
ConfigArguments = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help=CONFIG_HELP)]
NgpuOption = Annotated[
    int | None, typer.Option("--ngpu", min=0, metavar="N", help="Shorthand for --gpus free:N; 0 means --gpus cpu.")
]
AfterAnyOption = Annotated[
    list[str] | None,
    # In the group `tui.cli.help.CONFIG_OPTIONS`, as --after.
    typer.Option(
        "--after-any", metavar="RUN", help="Like --after, however the run ends.", rich_help_panel="Config options"
    ),
]
RunsDirOption = Annotated[
    str | None, typer.Option("--runs-dir", metavar="DIR", help="Folder of the runs [default: $GPUTRAIN_RUNS or ./runs]")
]
TrustCodeOption = Annotated[
    bool,
    typer.Option("--trust-code", help="Run user code (module:name) that another user names or can change."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EventsJsonOption = Annotated[bool, typer.Option("--json", help="Print events as JSON lines; implies --headless.")]
DetachOption = Annotated[
    bool,
    typer.Option(
        "--detach", help="Start the run in the background, print its name, and return; with --wait, it queues."
    ),
]
# Set by --detach for the command that it starts.
DetachedOption = Annotated[bool, typer.Option("--detached", hidden=True)]
HeadlessOption = Annotated[bool, typer.Option("--headless", help="Run without a screen; print progress to stderr.")]
BetterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--better", metavar="NAME=low", help="Which values of one of your own metrics are better: low or high."
    ),
]
LowBandwidthOption = Annotated[bool, typer.Option("--low-bandwidth", help="Refresh every 5 s instead of every second.")]
TrustOwnerOption = Annotated[
    bool, typer.Option("--trust-owner", help="Use a run that another user owns or can change.")
]
TakeOverOption = Annotated[
    bool,
    typer.Option("--take-over", help="Take over a run of another host whose heartbeat does not move for 30 s."),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
