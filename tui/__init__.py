"""Command line and terminal UI of gputrain, with the entry points of `gputrain` and `gputrain-tui`.

The entry points import the rest lazily: `tui.__main__` settles first where `engine` lies, `gputrain gpus` and
`gputrain-tui` start the GPU sampler first, and `gputrain-tui` does without the command line.
"""

import gc
import io
import os
import stat
import sys


def restrict_umask() -> None:
    """Deny write access for other users on every file that this process and its children create."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


def escape_unencodable_output() -> None:
    """Let stdout escape characters that its encoding lacks, as stderr does: a name may be of any script."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point of `gputrain`."""
    from engine.utils.entry_point import begin_process, reported_faults

    begin_process()
    restrict_umask()
    escape_unencodable_output()
    # With the default thresholds, 500 collections take a tenth of the time to import torch.
    gc.set_threshold(100_000)
    if sys.argv[1:2] == ["gpus"]:
        # The driver is the slowest part: the sampler queries it while the command line is imported and parsed.
        from engine.gpus.start_sampler import prestart_sampler

        prestart_sampler()
    from tui.cli.main import app

    with reported_faults():
        app()


def screen() -> None:
    """Entry point of `gputrain-tui`."""
    from engine.utils.entry_point import begin_process, reported_faults

    begin_process()
    restrict_umask()
    if len(sys.argv) == 1:
        # Imports and the first frame create many objects that stay; the app enables the collector after them.
        gc.disable()
        if sys.stdin.isatty() and sys.stdout.isatty():
            # The sampler queries the driver while the screen is imported.
            from engine.gpus.start_sampler import prestart_sampler

            prestart_sampler()
        # The most common call skips the import of typer.
        from engine.utils.errors import UsageError
        from tui.cli.open_tui import open_screen

        with reported_faults():
            try:
                open_screen()
            except UsageError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)
        return
    from tui.cli.main import screen_app

    with reported_faults():
        screen_app()
