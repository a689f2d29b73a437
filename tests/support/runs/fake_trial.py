"""A stand-in for `gputrain run` as the controller of a sweep starts it: owns the run and writes its journal, no torch.

`behavior.json` in the runs folder maps names of runs to what they do; each start adds the name to `starts.txt`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine.base.codec import replace
from engine.base.errors import UsageError
from engine.runs.control import consume_requests
from engine.runs.events import ControlEvent, RunFinished, RunResumed, RunStarted
from engine.runs.journal import Journal
from engine.runs.ownership import claim_run

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.runs.event_factories import RUN_FIELDS, make_epoch

EPOCHS = 2
START: dict[str, Any] = RUN_FIELDS | {"world_size": 1, "devices": ["cpu"], "epochs": EPOCHS}


def main(arguments: list[str]) -> int:
    root, name = Path(arguments[arguments.index("--runs-dir") + 1]), arguments[arguments.index("--name") + 1]
    with (root / "starts.txt").open("a") as file:
        file.write(f"{name}\n")
    behavior = json.loads((root / "behavior.json").read_text()).get(name, "finish")
    if behavior == "refuse":
        print("error: data.path: does not exist", file=sys.stderr)
        return 2
    values = dict(text.split("=", 1) for text in arguments if "=" in text)
    try:
        claimed = claim_run(root, name, name, resume=True)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    history = claimed.folder.history()
    if history.finished is not None and history.finished.state == "finished":
        return 0
    journal = Journal(claimed.folder.journal)
    is_new, done = history.started is None, len(history.epochs)
    journal.append(RunStarted(**START) if is_new else RunResumed(**START, from_step=done * 10))
    if behavior == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behavior == "fail":
        journal.append(RunFinished(state="failed", message=f"the loss of {name} is not finite"))
        return 1
    accuracy = float("nan") if behavior == "nan" else 1 - abs(float(values.get("optim.lr", 0.1)) - 0.1)
    for epoch in range(done + 1, EPOCHS + 1):
        reached = accuracy * epoch / EPOCHS
        scores = {"val_loss": 1 - reached, "metrics": {"val/distance": 1 - reached}}
        journal.append(replace(make_epoch(epoch, reached, time=time.time()), **scores))
    if behavior == "sigterm" and is_new:
        journal.append(ControlEvent(request="stop", by="SIGTERM", outcome=""))
        journal.append(RunFinished(state="stopped"))
        return 3
    while behavior == "wait":
        for request in consume_requests(claimed.folder.control):
            journal.append(ControlEvent(request=request.request, by=request.by, outcome=""))
            journal.append(RunFinished(state="stopped"))
            return 3
        time.sleep(0.02)
    journal.append(RunFinished(state="finished"))
    claimed.ownership.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
