"""Write JSON files that no record of gputrain describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.files import replace_file


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file atomically by a JSON object."""
    replace_file(path, lambda file: file.write(json.dumps(values).encode()))
