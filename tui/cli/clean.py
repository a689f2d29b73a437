"""`gputrain clean`: delete what this user can do without."""

from __future__ import annotations

import typer

from tui.cli.command import command
from tui.cli.options import JsonOption, YesOption


@command(["gputrain clean", "gputrain clean --yes"])
def clean(*, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Delete caches and what dead runs left, after a question.

    Caches are made again when they are needed: decoded images, lists of models, compiled code. Runs, trained
    models, settings and presets stay. With --json, it only lists.
    """
    from engine.doctor.leftovers import Leftover, find_leftovers, remove_leftovers
    from engine.show.table import Align, Column
    from engine.utils.errors import UsageError
    from engine.utils.text import pluralize
    from engine.utils.units import format_bytes
    from tui.cli.console import ask, print_json, print_table

    found = find_leftovers()
    if as_json:
        print_json({"leftovers": found})
        return
    if not found:
        typer.echo("There is nothing to delete.", err=True)
        return
    columns: list[Column[Leftover]] = [
        Column("place", "place", lambda row: row.place),
        Column("files", "files", lambda row: f"{row.files:,}", Align.RIGHT),
        Column("size", "size", lambda row: format_bytes(row.size_bytes), Align.RIGHT),
    ]
    print_table(columns, found)
    count = pluralize(sum(row.files for row in found), "file")
    size = format_bytes(sum(row.size_bytes for row in found))
    ask(f"Delete {count}, {size}", (), "gputrain clean", yes=yes)
    try:
        remove_leftovers()
    except OSError as error:
        reason = f"cannot be deleted: {error.strerror}"
        raise UsageError.one(str(error.filename), reason, code="not-writable") from error
    typer.echo(f"Deleted {count}, {size}.", err=True)
