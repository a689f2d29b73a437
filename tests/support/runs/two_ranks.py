"""Run a function in two forked ranks of a Gloo group, for tests of what ranks do together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.base.process import die_with_parent


def run_on_two_ranks(folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """Return what `work` returns in two forked ranks of a Gloo group."""
    children, parent = [], os.getpid()
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                # A collective whose peer is gone waits for long.
                die_with_parent(parent)
                store = dist.FileStore(str(folder / "store"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                (folder / f"{rank}.json").write_text(json.dumps(work(rank)))
                dist.destroy_process_group()
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
