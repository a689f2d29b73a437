"""What a help page says: one sentence, examples, the rest of the text, arguments, options, notes and exit codes.

The classes of `tui.cli.help` write the pages. The option of a config key has the first sentence of its description, and
`gputrain config describe KEY` prints all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from engine.base.exit_codes import MEANINGS, ExitCode
from tui.form.flags import FLAG_TO_KEY

CONFIG_OPTIONS, COMMAND_OPTIONS = "Config options", "Options with -- COMMAND"
PANELS = ("Arguments", "Options")
# Last among the options of a page, in this order.
RARELY_USED = ("runs_dir", "trust_owner", "trust_code", "help")
# Each command may end with them.
ALWAYS = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE_ERROR)
# A wider option has its help below it.
NAME_COLUMNS = 24
# click keeps the lines of a paragraph that begins with it.
AS_WRITTEN = "\b\n"


def make_help(text: str | None, examples: Sequence[str]) -> str:
    """Return what precedes the options: the first paragraph of a text, which is one sentence, examples, the second."""
    summary, *more = _paragraphs(text)[:2]
    shown = "\n".join(("Examples:", *(f"  {example}" for example in examples)))
    return "\n\n".join((summary, f"{AS_WRITTEN}{shown}", *more))


def make_epilog(text: str | None, *notes: str, exit_codes: Mapping[int, str] | None = None) -> str:
    """Return what follows the options: the other paragraphs of the text, notes, and what the exit codes mean here."""
    parts = [*_paragraphs(text)[2:], *notes]
    if exit_codes:
        meanings = {code: exit_codes.get(code) or MEANINGS[code] for code in sorted({*ALWAYS, *exit_codes})}
        width = len(f"{max(meanings)}")
        lines = (f"  {code:<{width}d}  {meaning}" for code, meaning in meanings.items())
        parts.append("\n".join((f"{AS_WRITTEN}Exit codes:", *lines)))
    return "\n\n".join(parts)


def _paragraphs(text: str | None) -> list[str]:
    return inspect.cleandoc(text or "").split("\n\n")


def panel_of(param: Any) -> str:
    """Return the section of an option."""
    return getattr(param, "rich_help_panel", None) or "Options"


def write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments, then the options by section, then the names of those that the command only names.

    An argument that stands for several words, such as `[CONFIG] [KEY=VALUE]...`, has one line of help for each word.
    """
    _describe_flags(command)
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in command.panels}
    named: dict[str, list[str]] = {}
    for param in sorted(command.get_params(ctx), key=_rank):
        if param.param_type_name == "argument":
            names, lines = param.metavar.split(), param.help.splitlines()
            sections["Arguments"].extend(zip(names, lines, strict=True))
        elif (record := param.get_help_record(ctx)) is None:
            continue
        elif (title := command.named_in(param)) is not None:
            named.setdefault(title, []).append(param.opts[0])
        else:
            sections.setdefault(command.panel_of(param), []).append(record)
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, NAME_COLUMNS)
    for title, options in named.items():
        with formatter.section(title):
            formatter.write_text("  ".join(options))


def _rank(param: Any) -> int:
    return RARELY_USED.index(param.name) if param.name in RARELY_USED else -1


def _describe_flags(command: Any) -> None:
    """Give the options of config keys their help."""
    flags = [param for param in command.params if panel_of(param) == CONFIG_OPTIONS]
    if flags:
        from engine.config.schema import summarize_key

        # The default of a key is that of the run, if the command takes one.
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        takes_run = any(param.metavar.startswith("RUN") for param in arguments)
        for param in flags:
            if (key := FLAG_TO_KEY.get(param.name)) is not None:
                param.help = summarize_key(key, with_default=not takes_run)
