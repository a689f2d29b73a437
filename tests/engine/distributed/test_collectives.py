"""Gathering of bytes and JSON values: in the order of the ranks, and without unpickling what comes over the network."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch.distributed as dist

from engine.distributed.collectives import all_gather_json, gather_bytes
from gputrain_command import ROOT

PICKLING_COLLECTIVES = r"\b\w*(gather_object|object_list)\b"


def gather(rank: int, folder: Path) -> None:
    """Gather values of different sizes over two ranks, and write what this rank receives."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    gathered = gather_bytes(bytes([rank]) * (3 + 4 * rank), dist.group.WORLD)
    values = all_gather_json({"rank": rank, "names": ["ä"] * rank}, dist.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps([[data.hex() for data in gathered], values]))
    dist.destroy_process_group()


def test_gathers_return_values_of_all_ranks_in_order(tmp_path: Path) -> None:
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                gather(rank, tmp_path)
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    values = [{"rank": 0, "names": []}, {"rank": 1, "names": ["ä"]}]
    assert json.loads((tmp_path / "0.json").read_text()) == [["000000", "01010101010101"], values]
    assert json.loads((tmp_path / "1.json").read_text()) == [[], values]


def test_engine_calls_no_collective_that_unpickles() -> None:
    files = sorted((ROOT / "engine").rglob("*.py"))
    assert [path.name for path in files if re.search(PICKLING_COLLECTIVES, path.read_text())] == []
