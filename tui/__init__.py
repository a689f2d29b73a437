"""Shows. Trains nothing.

The entry points import the command line when they are called and not before: every rank that is spawned imports the
script that it was started from once more, and must not pay for a command line that it will never parse.
"""

import os
import stat
import sys


def restrict_umask() -> None:
    """Whatever the umask: what this process and its children make, every user of the host may at most read."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


def main() -> None:
    """Entry point of `gputrain`."""
    restrict_umask()
    if sys.argv[1:2] == ["gpus"]:
        # The driver takes longest: it is asked while the command line is imported and read.
        from engine.gpus.start_sampler import prestart_sampler

        prestart_sampler()
    from tui.cli.main import app

    app()


def screen() -> None:
    """Entry point of `gputrain-tui`."""
    restrict_umask()
    if len(sys.argv) == 1:
        # The way that is gone most, without the import of what reads a command line.
        from engine.utils.errors import UsageError
        from tui.cli.open_tui import open_screen

        try:
            open_screen()
        except UsageError as error:
            sys.exit(f"error: {error}")
        return
    from tui.cli.main import screen_app

    screen_app()
