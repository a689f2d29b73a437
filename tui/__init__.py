"""Command line and terminal UI of gputrain, with the entry points of `gputrain` and `gputrain-tui`.

The entry points import the rest lazily: `tui.__main__` settles first where `engine` lies, `gputrain gpus` and
`gputrain-tui` start the GPU sampler first, and `gputrain-tui` does without the command line.
"""

import gc
import os
import stat
import sys


def restrict_umask() -> None:
    """Deny write access for other users on every file that this process and its children create."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


def limit_output() -> None:
    """Let stdout and stderr write what the terminal can draw, and escape what their encoding lacks."""
    from engine.base.errors import UsageError
    from tui.terminal.characters import limit_characters, requested_characters

    for stream in (sys.stdout, sys.stderr):
        limit_characters(stream)
    try:
        requested_characters(os.environ)
    except UsageError as error:
        print(f"warning: {error}", file=sys.stderr)


def main() -> None:
    """Entry point of `gputrain`."""
    from engine.base.entry_point import begin_process, reported_faults

    begin_process()
    if sys.argv[1:2] in (["run"], ["resume"], ["sweep"]):
        from engine.jobs.command.membership import leave_outer_run

        leave_outer_run()
    restrict_umask()
    # With the default thresholds, 500 collections take a tenth of the time to import torch.
    gc.set_threshold(100_000)
    if sys.argv[1:2] == ["gpus"]:
        # The driver is the slowest part: the sampler queries it while the command line is imported and parsed.
        from engine.gpus.start_sampler import prestart_sampler

        prestart_sampler()
    limit_output()
    from tui.cli.main import app

    with reported_faults():
        app()


def screen() -> None:
    """Entry point of `gputrain-tui`."""
    from engine.base.entry_point import begin_process, reported_faults

    begin_process()
    restrict_umask()
    if len(sys.argv) == 1:
        # Imports and the first frame create many objects that stay; the app enables the collector after them.
        gc.disable()
        if sys.stdin.isatty() and sys.stdout.isatty():
            # The sampler queries the driver while the screen is imported.
            from engine.gpus.start_sampler import prestart_sampler

            prestart_sampler()
        limit_output()
        # The most common call skips the import of typer.
        from engine.base.errors import UsageError
        from tui.cli.open_tui import open_screen

        with reported_faults():
            try:
                open_screen()
            except UsageError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)
        return
    limit_output()
    from tui.cli.main import screen_app

    with reported_faults():
        screen_app()
