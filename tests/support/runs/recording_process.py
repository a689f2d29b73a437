"""A process that owns a run and records steps until it is killed: `python -m support.runs.recording_process ROOT NAME`.

The clock of its recorder counts the steps, so it writes the record once in `STEPS_PER_RECORD` of them.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

from engine.config.schema import Config
from engine.runs.ownership import claim_run
from engine.runs.recorder import RECORD_INTERVAL_SECONDS, Recorder
from support.replace import replace
from support.runs.event_factories import make_run_started, make_step

STEPS_PER_RECORD = 20


def main(root: Path, name: str) -> None:
    step = 0
    claimed = claim_run(root, name, "x", resume=False)
    recorder = Recorder(
        claimed.folder, Config(), lambda _: None, clock=lambda: step * RECORD_INTERVAL_SECONDS / STEPS_PER_RECORD
    )
    recorder.record(make_run_started(time.time()))
    for step in count(1):
        recorder.record(replace(make_step(step), time=time.time()))
        time.sleep(0.003)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
