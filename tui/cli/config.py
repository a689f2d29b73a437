"""`gputrain config`: print the config that `gputrain run` resolves from the same arguments, or describe the keys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tui.cli.arguments import (
    AfterAnyOption,
    ConfigArguments,
    JsonOption,
    NgpuOption,
    after_flags,
    exit_on_usage_error,
    print_no_effect,
    print_warning,
    resolve_arguments,
    run_flags,
)
from tui.cli.help import TRAIN, ConfigCommand, make_epilog

app = typer.Typer()

SETTING_COLUMNS = 48


@app.command(
    cls=ConfigCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(
        [
            "gputrain config digits optim.lr=0.2 --diff",
            "gputrain config flowers.yaml --ngpu 2 --amp bf16 --sources",
            "gputrain config --describe",
        ]
    ),
)
def config(
    arguments: ConfigArguments = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print only keys that differ from their defaults.")] = False,
    sources: Annotated[bool, typer.Option("--sources", help="Print where each value comes from.")] = False,
    described: Annotated[
        bool, typer.Option("--describe", help="Describe every key, or the given keys and sections: choices, default.")
    ] = False,
    as_json: JsonOption = False,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    ngpu: NgpuOption = None,
    wait: Annotated[bool, typer.Option("--wait")] = False,
    ranks: Annotated[str | None, typer.Option("--ranks")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs")] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size")] = None,
    lr: Annotated[str | None, typer.Option("--lr")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer")] = None,
    scheduler: Annotated[str | None, typer.Option("--scheduler")] = None,
    amp: Annotated[str | None, typer.Option("--amp")] = None,
    workers: Annotated[str | None, typer.Option("--workers")] = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    seed: Annotated[str | None, typer.Option("--seed")] = None,
    name: Annotated[str | None, typer.Option("--name")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher")] = None,
    priority: Annotated[str | None, typer.Option("--priority")] = None,
    after: Annotated[list[str] | None, typer.Option("--after")] = None,
    after_any: AfterAnyOption = None,
    share: Annotated[str | None, typer.Option("--share")] = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
) -> None:
    """Print the resolved config.

    Takes the arguments of `gputrain run`. Later layers take precedence: defaults, base config, CONFIG, then flags and
    KEY=VALUE. A missing value that a run needs, such as data.path, is a warning.
    """
    flag_values = {
        "gpus": gpus, "ranks": ranks, "epochs": epochs, "batch_size": batch_size, "lr": lr, "optimizer": optimizer,
        "scheduler": scheduler, "amp": amp, "workers": workers, "model": model, "dataset": dataset,
        "data_path": data_path, "seed": seed, "name": name, "launcher": launcher, "priority": priority, "share": share,
    }  # fmt: skip
    with exit_on_usage_error():
        flags = run_flags(flag_values, {"resume": resume, "wait": wait}, ngpu) | after_flags(after, after_any)
        if described:
            print_config_keys(arguments or [], [flag for flag, _ in flags.values()], as_json=as_json)
            return
        # Only printed: no code that it names runs.
        resolved = resolve_arguments(arguments, flags, trust_code=True, allow_missing=True)
    from engine.config.schema import as_dict, without_unstored
    from engine.config.yaml_io import to_yaml

    for problem in resolved.missing:
        print_warning(problem)
    print_no_effect(resolved)
    values = as_dict(resolved.config, only_changed=diff)
    if not sources:
        # The YAML may become a config file.
        typer.echo(json.dumps(values, indent=2) if as_json else to_yaml(without_unstored(values)).rstrip())
        return
    rows = {
        f"{section}.{key}": {"value": value, "source": resolved.sources[f"{section}.{key}"]}
        for section, keys in values.items()
        for key, value in keys.items()
    }
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from engine.show.table import cell_width, pad

    for key, row in rows.items():
        setting = f"{key} = {json.dumps(row['value'])}"
        # A long value moves only its own source.
        typer.echo(f"{pad(setting, max(cell_width(setting), SETTING_COLUMNS))}  {row['source']}")


def print_config_keys(names: list[str], flags: list[str], *, as_json: bool) -> None:
    """Print every config key, or those of the given names and sections, with description, choices and default.

    Raises UsageError for a name that is neither a key nor a section, and for flags, which set values."""
    from engine.config.command_line import format_value
    from engine.config.key_names import key_hint
    from engine.config.messages import EXTRA_ALLOWED_FORMS
    from engine.config.schema import fields, sections
    from engine.utils.errors import UsageError, did_you_mean
    from tui.form.fields import field_kind

    def choices_of(annotation: object) -> list[str]:
        return [choice for choice in field_kind(annotation)[0] if choice and annotation is not bool]

    if flags:
        raise UsageError.one(
            "--describe", f"prints no values, so it cannot be combined with {flags[0]}", code="conflict"
        )
    rows = {
        key: {
            "description": info.description,
            "choices": choices_of(info.annotation),
            "other": EXTRA_ALLOWED_FORMS.get(key),
            "default": info.default,
        }
        for key, info in fields()
    }
    for name in names:
        if not any(key == name or key.startswith(f"{name}.") for key in rows):
            hint = did_you_mean(name, sections()) or key_hint(name)
            raise UsageError.one(name, f"is no config key or section{hint}", code="unknown-key")
    if names:
        rows = {key: row for key, row in rows.items() if key in names or key.partition(".")[0] in names}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for key, row in rows.items():
        other = f", or {row['other']}" if row["other"] else ""
        choices = f" One of {', '.join(row['choices'])}{other}." if row["choices"] else ""
        default = format_value(row["default"])
        default = f" [default: {default}]" if default not in ("", "[]") else ""
        typer.echo(f"{key}\n    {row['description']}{choices}{default}")
