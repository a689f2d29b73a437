"""The user's settings file, `$XDG_CONFIG_HOME/gputrain/settings.yaml`: what the user allows in all runs.

It holds `run: {code_packages: [...]}`, which `engine.config.loader` merges below all other layers and
`engine.inference` reads for commands that take no config, `limits: {gpus: N, runs: N, hours: H}`, see
`engine.config.limits`, `reservations`, the folder of the reservations of GPUs, see `engine.gpus.reservation`, and
`hosts: [NAME, ...]`, the other hosts of `--hosts all` and `run --on any`, see `engine.hosts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from engine.config.run_sections import RunConfig
from engine.config.section import Section
from engine.config.yaml_io import MAX_CONFIG_BYTES, parse_yaml
from engine.utils.errors import UsageError
from engine.utils.files import config_folder, own_folder_advice, read_bytes, settings_file, user_path_problem

CONTENT = (
    "run: {code_packages: [PACKAGE, ...]}, limits: {gpus: N, runs: N, hours: H}, reservations: /FOLDER and "
    "hosts: [HOST, ...]"
)


class LimitValues(Section):
    """Section `limits` of the settings file."""

    gpus: int | None = Field(None, ge=1, le=1024, description="GPUs that your runs on one host use at once.")
    runs: int | None = Field(None, ge=1, le=1024, description="Runs that you have on one host at once.")
    hours: float | None = Field(
        None, gt=0, le=1e5, description="Hours of one run: the highest queue.time_limit, and its default."
    )


@dataclass(frozen=True)
class UserSettings:
    """Content of the settings file."""

    code_packages: tuple[str, ...] = ()
    limits: LimitValues = field(default_factory=LimitValues)
    reservations: Path | None = None
    hosts: tuple[str, ...] = ()
    """As typed: `engine.hosts.channel` checks the names."""


def read_code_packages() -> tuple[str, ...]:
    """Return `run.code_packages` of the user's settings. Raises UsageError as `read_settings` does."""
    return read_settings().code_packages


def read_settings() -> UserSettings:
    """Return the user's settings, the defaults if there is no file, or no access to its folder.

    Raises UsageError if the file is invalid, or others can change it.
    """
    path = settings_file()
    try:
        path.lstat()
    except OSError:
        return UserSettings()
    try:
        # It may be a link, as programs that manage dotfiles make it.
        text = read_bytes(path.resolve(), MAX_CONFIG_BYTES).decode()
    except FileNotFoundError:
        return UserSettings()
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror or error}", code="not-readable") from error
    except UnicodeDecodeError as error:
        raise UsageError.one(str(path), f"cannot be read: {error}", code="wrong-format") from error
    if (problem := user_path_problem(config_folder(), path.name)) is not None:
        reason = f"is not used, because {problem}; {own_folder_advice('XDG_CONFIG_HOME')}"
        raise UsageError.one(str(path), reason, code="foreign-writable")
    try:
        return _parse(parse_yaml(text))
    except (yaml.YAMLError, ValueError) as error:
        reason = f"is not valid: it may hold {CONTENT}"
        raise UsageError.one(str(path), reason, code="wrong-format") from error


def _parse(content: Any) -> UserSettings:
    """Raises ValueError for anything but the known keys."""
    content = content or {}
    if not isinstance(content, dict) or set(content) - {"run", "limits", "reservations", "hosts"}:
        raise ValueError("unknown content")
    run, limits = content.get("run") or {}, content.get("limits") or {}
    if not isinstance(run, dict) or set(run) - {"code_packages"}:
        raise ValueError("unknown content")
    folder = content.get("reservations")
    if folder is not None and not (isinstance(folder, str) and Path(folder).is_absolute()):
        raise ValueError("not an absolute path")
    hosts = content.get("hosts") or []
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ValueError("no list of names")
    return UserSettings(
        RunConfig.model_validate(run).code_packages,
        LimitValues.model_validate(limits),
        None if folder is None else Path(folder),
        tuple(hosts),
    )
