"""Every help page at 80 columns; `python tests/support/help_pages.py` writes them to the golden file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from tui.cli.main import app
from tui.cli.tree import WORDS, subcommands

HELP_PAGES = Path(__file__).parents[1] / "help_pages.txt"
COLUMNS = 80
PAGES: list[tuple[str, ...]] = [
    (),
    *((word,) for word in WORDS),
    *((word, name) for word in WORDS for name in subcommands(word) if name != WORDS[word].default),
]


@cache
def help_page(*words: str) -> str:
    """Return the help page of a command, or of all commands."""
    result = CliRunner(env={"COLUMNS": f"{COLUMNS}"}).invoke(app, [*words, "--help"], terminal_width=COLUMNS)
    assert result.exit_code == 0, result.output
    return result.output


def format_pages() -> str:
    """Return the text of help_pages.txt."""
    return "\n".join(f"$ {' '.join(('gputrain', *page, '--help'))}\n{help_page(*page)}" for page in PAGES)


if __name__ == "__main__":
    HELP_PAGES.write_text(format_pages())
