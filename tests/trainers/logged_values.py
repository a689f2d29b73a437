"""Run a trainer of this folder: `python logged_values.py MODULE FOLDER FILE`.

It writes its logs below the folder. What it logged is in the file: `test_trainers.py` compares it with what the readers
find. The trainers run in environments of their own, so this module needs the standard library only.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEED = 0


class LoggedValues:
    """The metrics and parameters of each run below a folder, by the name that the readers give to the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.parameters: dict[str, dict[str, Any]] = defaultdict(dict)

    def add(self, run: str, values: Mapping[str, Any], step: int) -> None:
        """Remember the values of a step. A step that is repeated replaces what it was before."""
        for name, value in values.items():
            self.metrics[run][name][step] = float(value)

    def add_parameters(self, run: str, parameters: Mapping[str, Any]) -> None:
        """Remember parameters that the readers should find."""
        self.parameters[run] |= parameters


if __name__ == "__main__":
    module, folder, path = sys.argv[1:]
    logged = LoggedValues(Path(folder).absolute())
    logged.folder.mkdir(parents=True)
    importlib.import_module(module).main(logged)
    Path(path).write_text(json.dumps([logged.metrics, logged.parameters]))
