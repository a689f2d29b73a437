"""Shows. Trains nothing.

The entry points import the command line when they are called and not before: every rank that is spawned imports the
script that it was started from once more, and must not pay for a command line that it will never parse.
"""

import sys


def main() -> None:
    """Entry point of `gputrain`."""
    if sys.argv[1:2] == ["gpus"]:
        # The driver takes longest: it is asked while the command line is imported and read.
        from engine.gpus.start import start_ahead

        start_ahead()
    from tui.cli import app

    app()


def screen() -> None:
    """Entry point of `gputrain-tui`."""
    from tui.app import run

    run()
