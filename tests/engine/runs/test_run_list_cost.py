"""What a run list costs: the files that it opens, and the time for 10,000 runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.runs.events import RunFinished
from engine.runs.labels import RunLabels
from engine.runs.run_list import RunList
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import (
    make_ended_runs,
    make_run_folder,
    write_labels,
)

AUDIT = """
import json, sys
from pathlib import Path
from engine.runs.run_list import RunList
root, opened = sys.argv[1], []
sys.addaudithook(lambda event, values: opened.append(values[0]) if event == "open" else None)
runs = RunList(Path(root))
runs.poll()
paths = [path for path in map(str, opened) if path.startswith(root)]
print(json.dumps({row.name: [path[len(row.folder) + 1:] for path in paths if path.startswith(row.folder + "/")]
                  for row in runs.rows}))
"""


def test_list_opens_record_and_labels_of_ended_run_and_no_journal(tmp_path: Path) -> None:
    for state in ("finished", "stopped", "failed"):
        for number in (1, 2):
            folder = make_run_folder(
                tmp_path, f"{state}-{number}", make_run_started(), make_epoch(1), RunFinished(state=state)
            )
            folder.config.touch()
            folder.owner.touch()
        write_labels(folder, RunLabels(tags=("night",)))
    make_run_folder(tmp_path, "crashed", make_run_started(), make_epoch(1))
    result = subprocess.run([sys.executable, "-c", AUDIT, str(tmp_path)], check=True, capture_output=True, text=True)
    opened = json.loads(result.stdout)
    crashed = opened.pop("crashed")
    assert "summary.json" in crashed and "events.jsonl" not in crashed and "config.yaml" not in crashed
    assert len(opened) == 6 and all(names == ["summary.json", "labels.json"] for names in opened.values())


@pytest.mark.soak
def test_list_of_10000_runs_is_complete_within_seconds(tmp_path: Path) -> None:
    make_ended_runs(tmp_path / "runs", 10_000)
    for label in ("cold", "warm"):
        runs, start, cpu = RunList(tmp_path / "runs"), time.monotonic(), time.process_time()
        runs.poll(0.1)
        while len(runs.rows) < 100:
            runs.poll(0.1)
        first, first_cpu = time.monotonic() - start, time.process_time() - cpu
        while not runs.complete:
            runs.poll(0.1)
        whole, whole_cpu = time.monotonic() - start, time.process_time() - cpu
        start = time.monotonic()
        runs.poll(0.1)
        again = time.monotonic() - start
        print(f"\n{label}: 100 rows {first:.2f} s ({first_cpu:.2f} s CPU), all {whole:.2f} s ({whole_cpu:.2f} s CPU)")
        assert len(runs.rows) == 10_000
        # Three times the targets, as other programs may run.
        assert first < 1.8 and again < 0.3
    assert whole < 3.3
