"""`gputrain config`: print the config that `gputrain run` resolves from the same arguments, or describe the keys."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Annotated

import typer

from engine.base.errors import UsageError, did_you_mean
from engine.config.command_line import format_value
from engine.report.table import cell_width, pad
from tui.cli.command import command
from tui.cli.completions import complete_described
from tui.cli.config_arguments import ConfigArguments, FlagOverrides, config_flags, print_no_effect, resolve_arguments
from tui.cli.console import print_json, print_warning
from tui.cli.help import MAX_HELP_COLUMNS
from tui.cli.options import JsonOption

SETTING_COLUMNS = 48
INDENT = " " * 4
LIMITS_PLACE = "Set it in settings.yaml."


@command(
    [
        "gputrain config digits optim.lr=0.2 --diff",
        "gputrain config flowers.yaml --ngpu 2 --amp bf16 --sources",
        "gputrain config describe optim.lr loss",
    ]
)
@config_flags()
def show(
    *,
    arguments: ConfigArguments = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print only keys that differ from their defaults.")] = False,
    sources: Annotated[bool, typer.Option("--sources", help="Print where each value comes from.")] = False,
    as_json: JsonOption = False,
    flags: FlagOverrides,
) -> None:
    """Print the resolved config.

    Takes the arguments of `gputrain run`. Later layers take precedence: defaults, base config, CONFIG, then flags and
    KEY=VALUE. A missing value that a run needs, such as data.path, is a warning. The limits of your settings
    file, if any, are printed to stderr.
    """
    # Only printed: no code that it names runs.
    resolved = resolve_arguments(arguments, flags, trust_code=True, allow_missing=True)
    from engine.config.limits import limit_text, read_limits
    from engine.config.schema import as_dict, without_unstored
    from engine.config.yaml_io import to_yaml

    for problem in resolved.missing:
        print_warning(problem)
    print_no_effect(resolved)
    for key, value in read_limits().model_dump(exclude_none=True).items():
        typer.echo(f"limit: {limit_text(key, value)}", err=True)
    values = as_dict(resolved.config, only_changed=diff)
    if not sources:
        # The YAML may become a config file.
        if as_json:
            print_json({"config": values})
        else:
            typer.echo(to_yaml(without_unstored(values)).rstrip())
        return
    rows = {
        f"{section}.{key}": {"value": value, "source": resolved.sources[f"{section}.{key}"]}
        for section, keys in values.items()
        for key, value in keys.items()
    }
    if as_json:
        print_json({"config": rows})
        return

    for key, row in rows.items():
        setting = f"{key} = {json.dumps(row['value'])}"
        # A long value moves only its own source.
        typer.echo(f"{pad(setting, max(cell_width(setting), SETTING_COLUMNS))}  {row['source']}")


@command(["gputrain config describe", "gputrain config describe optim.lr loss", "gputrain config describe --json"])
def describe(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY]...", help="Key such as optim.lr, or section such as loss.", autocompletion=complete_described
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe config keys: choices and default.

    Describes all keys, or the given keys and sections.
    """
    from engine.config.key_names import key_hint
    from engine.config.messages import EXTRA_ALLOWED_FORMS
    from engine.config.schema import fields, sections
    from engine.config.settings import Limits
    from tui.form.fields import field_kind

    limits = {f"limits.{name}": info for name, info in Limits.model_fields.items()}

    def choices_of(annotation: object) -> list[str]:
        return [choice for choice in field_kind(annotation)[0] if choice and annotation is not bool]

    rows = {
        key: {
            "description": info.description if key not in limits else f"{info.description} {LIMITS_PLACE}",
            "choices": choices_of(info.annotation),
            "other": EXTRA_ALLOWED_FORMS.get(key),
            "default": info.default,
        }
        for key, info in (*fields(), *limits.items())
    }
    for name in names or ():
        if not any(key == name or key.startswith(f"{name}.") for key in rows):
            hint = did_you_mean(name, (*sections(), "limits")) or key_hint(name)
            raise UsageError.one(name, f"is no config key or section{hint}", code="unknown-key")
    if names:
        rows = {key: row for key, row in rows.items() if key in names or key.partition(".")[0] in names}
    if as_json:
        print_json({"keys": rows})
        return
    for key, row in rows.items():
        other = f", or {row['other']}" if row["other"] else ""
        choices = f" One of {', '.join(row['choices'])}{other}." if row["choices"] else ""
        default = format_value(row["default"])
        default = f" [default: {default}]" if default not in ("", "[]") and "efault:" not in row["description"] else ""
        text = f"{row['description']}{choices}{default}"
        if sys.stdout.isatty():
            width = min(shutil.get_terminal_size().columns, MAX_HELP_COLUMNS) - len(INDENT)
            text = f"\n{INDENT}".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
        typer.echo(f"{key}\n{INDENT}{text}")
