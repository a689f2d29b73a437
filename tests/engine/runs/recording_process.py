"""A process that owns a run and records steps until it is killed: `python recording_process.py ROOT NAME`."""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

from engine.config.schema import Config
from engine.runs import recorder as recorder_module
from engine.runs.claimed_run import claim_run
from engine.runs.recorder import Recorder
from support.replace import replace
from support.runs.event_factories import make_run_started, make_step

INTERVAL_SECONDS = 0.1


def main(root: Path, name: str) -> None:
    recorder_module.RECORD_INTERVAL_SECONDS = INTERVAL_SECONDS
    claimed = claim_run(root, name, "x", resume=False)
    recorder = Recorder(claimed.folder, Config(), lambda _: None)
    recorder.record(make_run_started(time.time()))
    for step in count(1):
        recorder.record(replace(make_step(step), time=time.time()))
        time.sleep(0.003)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
