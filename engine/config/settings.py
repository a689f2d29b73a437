"""The user's settings file, `$XDG_CONFIG_HOME/gputrain/settings.yaml`: what the user allows in all runs.

Its only content is `run: {code_packages: [...]}`. `engine.config.loader` merges it below all other layers, and
`engine.inference` reads it for commands that take no config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from engine.config.run_sections import RunConfig
from engine.config.yaml_io import MAX_CONFIG_BYTES, parse_yaml
from engine.utils.errors import UsageError
from engine.utils.files import config_folder, own_folder_advice, read_bytes, user_path_problem

SETTINGS_FILE = "settings.yaml"


def settings_file() -> Path:
    """Return the path of the user's settings file."""
    return config_folder() / SETTINGS_FILE


def read_code_packages() -> tuple[str, ...]:
    """Return `run.code_packages` of the user's settings, empty if there is no file, or no access to its folder.

    Raises UsageError if the file is invalid, or others can change it.
    """
    path = settings_file()
    try:
        path.lstat()
    except OSError:
        return ()
    try:
        # It may be a link, as programs that manage dotfiles make it.
        text = read_bytes(path.resolve(), MAX_CONFIG_BYTES).decode()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror or error}", code="not-readable") from error
    except UnicodeDecodeError as error:
        raise UsageError.one(str(path), f"cannot be read: {error}", code="wrong-format") from error
    if (problem := user_path_problem(config_folder(), SETTINGS_FILE)) is not None:
        reason = f"is not used, because {problem}; {own_folder_advice('XDG_CONFIG_HOME')}"
        raise UsageError.one(str(path), reason, code="foreign-writable")
    try:
        return _parse(parse_yaml(text))
    except (yaml.YAMLError, ValueError) as error:
        reason = "is not valid: its only content is run: {code_packages: [PACKAGE, ...]}"
        raise UsageError.one(str(path), reason, code="wrong-format") from error


def _parse(content: Any) -> tuple[str, ...]:
    """Raises ValueError for anything but the one known key."""
    content = content or {}
    if not isinstance(content, dict) or set(content) - {"run"}:
        raise ValueError("unknown content")
    run = content.get("run") or {}
    if not isinstance(run, dict) or set(run) - {"code_packages"}:
        raise ValueError("unknown content")
    return RunConfig.model_validate(run).code_packages
