"""Files of public programs, read as their authors meant them.

`tests/recordings/files` has a folder for each case. `expected.json` maps it to `runs`: how many are found, `expect`: a
pattern of the name, the number of values, the last step and the last value, `absent`: patterns that no metric may
match, and `problems`: whether something is said of what was left out. Null is any. The folders of Z are made from the
sources of the programs that write such files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from engine.report.foreign_run import read_whole
from engine.watch.folders import SearchLimits, find_runs

FILES = Path(__file__).parents[2] / "recordings" / "files"
CASES: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
HOUR = 3600.0


@pytest.mark.parametrize("case", CASES)
def test_files_of_public_programs_are_read_as_meant(case: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FILES / case, tmp_path / case))
    hour_ago = time.time() - HOUR
    for path in folder.rglob("*"):
        os.utime(path, (hour_ago, hour_ago))
    wanted, found = CASES[case], find_runs(folder, SearchLimits(names_unread=True))
    runs = found.runs
    assert wanted["runs"] in (None, len(runs))
    readers = [read_whole(run) for run in runs]
    problems = "; ".join((*found.unread, *(problem for reader in readers for problem in reader.problems)))
    metrics = [(name, value) for reader in readers for name, value in reader.curves.values(reader.curves.names).items()]
    for pattern, count, step, last in wanted["expect"]:
        named = [value for name, value in metrics if re.search(pattern, name, re.IGNORECASE)]
        assert any(
            count in (None, value.count)
            and step in (None, value.step)
            and (
                last is None
                or (math.nan if value.last is None else value.last) == pytest.approx(last, 1e-5, nan_ok=True)
            )
            for value in named
        ), (pattern, metrics)
    for pattern in wanted["absent"]:
        assert not [name for name, _ in metrics if re.search(pattern, name, re.IGNORECASE)]
    assert wanted["problems"] is None or bool(problems) is wanted["problems"]
    assert not [text for text in wanted["problem_not"] if text in problems]
