"""`gputrain notify`: send a test message to the destinations of a config."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from tui.cli.arguments import ConfigArguments, JsonOption, TrustCodeOption, exit_on_usage_error, resolve_arguments
from tui.cli.help import MACHINE, CommandGroup, HelpCommand, make_epilog

app = typer.Typer()
commands = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(commands, name="notify", rich_help_panel=MACHINE)


@commands.callback(
    epilog=make_epilog(
        [
            "pip install apprise                        the library that sends messages",
            "export NTFY=ntfy://MY-SECRET-TOPIC         put a URL into a variable",
            "gputrain run digits notify.urls=env:NTFY   use it for one run",
            "chmod 600 ~/.config/gputrain/notify        a file of URLs for all runs",
            "gputrain notify test                       check that a message arrives",
        ],
        "Services and their URLs: https://appriseit.com/services/",
    )
)
def notify() -> None:
    """Messages about runs, by ntfy, Slack, mail, Telegram and others.

    A run sends them when it finished, failed, crashed, stalls, has a throttled GPU, or got the GPUs that it waited for
    (notify.when). A URL contains secrets, so a config only refers to one: env:NAME or file:PATH, a file of mode 0600
    with one URL per line.
    """


@commands.command(
    cls=HelpCommand,
    epilog=make_epilog(
        ["gputrain notify test", "gputrain notify test flowers.yaml", "gputrain notify test notify.urls=env:NTFY"],
        exit_codes={0: "sent to each destination", 1: "not sent to one of them", 2: "usage or config error"},
    ),
)
def test(arguments: ConfigArguments = None, as_json: JsonOption = False, trust_code: TrustCodeOption = False) -> None:
    """Send a test message to each destination.

    These are those of CONFIG and of the user's own file.
    """
    with exit_on_usage_error():
        refuse_urls(arguments or [])
        config = resolve_arguments(arguments, trust_code=trust_code).config
        raise typer.Exit(send_test(config.notify.urls, as_json=as_json))


def refuse_urls(arguments: list[str]) -> None:
    """Raise UsageError, without the URL, if an argument is one instead of a config."""
    from engine.config.notify_section import REFERENCE_ADVICE, URLS_KEY
    from engine.utils.errors import UsageError

    if any("://" in argument.partition("=")[0] for argument in arguments):
        raise UsageError.one(
            "CONFIG", f"is a URL; set {URLS_KEY}=env:NAME instead", REFERENCE_ADVICE, code="invalid-value"
        )


def send_test(urls: Sequence[str], *, as_json: bool) -> int:
    """Send the test message, print a line per destination without its URL, and return the exit code.

    Raises UsageError if there is no destination.
    """
    import socket
    from dataclasses import asdict

    from engine.notify.destinations import user_file
    from engine.notify.message import test_message
    from engine.notify.sender import send_message
    from engine.utils.errors import UsageError
    from engine.utils.text import printable

    deliveries = send_message(test_message(socket.gethostname()), urls)
    if not deliveries:
        advice = f"set notify.urls=env:NAME, or write URLs into {user_file()} (chmod 600)"
        raise UsageError.one("notify.urls", "there is no destination", advice, code="missing-value")
    if as_json:
        typer.echo(json.dumps([asdict(delivery) for delivery in deliveries], indent=2))
    else:
        for delivery in deliveries:
            typer.echo(printable(delivery.line), err=not delivery.sent)
    return 0 if all(delivery.sent for delivery in deliveries) else 1
