"""What a remote run is called and made of: name, config, facts about the run, tags and note."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engine.config.schema import without_unstored
from engine.config.yaml_io import MAX_CONFIG_BYTES
from engine.runs.events import RunStarted
from engine.runs.folder import RunFolder
from engine.runs.labels import read_labels
from engine.runs.run_config import read_stored_config

# A config has about 150 keys.
MAX_KEYS = 1000
MAX_TEXT_CHARACTERS = 6000
# Addresses of services, which contain passwords, belong to the user and not to the run.
PRIVATE_SECTIONS = ("notify",)
STARTED_SECTION = "started"
RUN_FACTS = ("host", "world_size", "backend", "global_batch", "train_images", "val_images", "classes", "parameters")


@dataclass(frozen=True)
class RunDescription:
    """Name, config and labels of a run."""

    name: str
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of `config.yaml` by section, and the section `started` with facts of the run's start."""
    tags: tuple[str, ...] = ()
    note: str = ""
    started_at: float | None = None
    """Unix seconds of the first start."""
    host: str = ""

    def flat_config(self) -> dict[str, str]:
        """Return the config as text by `section.key`. Unset keys are skipped."""
        return {
            f"{section}.{key}": _as_text(value)
            for section, keys in self.config.items()
            for key, value in keys.items()
            if value is not None
        }

    def digest(self) -> str:
        """Return a digest of what can change while a run exists: everything but the facts of its start."""
        config = {section: keys for section, keys in self.config.items() if section != STARTED_SECTION}
        text = json.dumps([self.name, config, self.tags, self.note], sort_keys=True, default=str)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def describe_run(folder: RunFolder, first_start: RunStarted | None) -> RunDescription:
    """Return the description of a run from its folder and the first start in its journal."""
    config = _read_config(folder)
    if first_start is not None:
        facts = {name: getattr(first_start, name) for name in RUN_FACTS}
        versions = {f"{name}_version": version for name, version in list(first_start.versions.items())[:10]}
        facts["time"] = datetime.fromtimestamp(first_start.time, UTC).isoformat(timespec="seconds")
        config[STARTED_SECTION] = {key: _bounded(value) for key, value in (facts | versions).items()}
    labels = read_labels(folder)
    return RunDescription(
        name=folder.name,
        config=config,
        tags=labels.tags,
        note=labels.note,
        started_at=first_start.time if first_start else None,
        host=str(_bounded(first_start.host)) if first_start else "",
    )


def _read_config(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the stored config by section; {} if it cannot be read. It may come from another version of gputrain."""
    values = read_stored_config(folder.config, MAX_CONFIG_BYTES) or {}
    sections = {
        str(section): {str(key)[:100]: _bounded(value) for key, value in list(keys.items())[:MAX_KEYS]}
        for section, keys in list(values.items())[:MAX_KEYS]
        if isinstance(keys, dict) and section not in PRIVATE_SECTIONS
    }
    return without_unstored(sections)


def _bounded(value: Any) -> Any:
    """Return a JSON value of limited size: numbers and short text as they are, everything else as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return _as_text(value)


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 1] + "…"
