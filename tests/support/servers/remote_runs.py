"""Read what `gputrain runs sync` wrote: metrics of MLflow runs, records of an offline run of Weights & Biases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32768
HEADER_BYTES = 7
FILE_HEADER_BYTES = 7
FULL, LAST = 1, 4


def mlflow_runs(uri: str, experiment: str = "gputrain") -> list[Any]:
    """Return the runs of an experiment that are not deleted."""
    client = mlflow_client(uri)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def mlflow_points(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each row of each metric of a run."""
    client = mlflow_client(uri)
    names = client.get_run(run_id).data.metrics
    return {name: [(row.step, row.value) for row in client.get_metric_history(run_id, name)] for name in names}


def mlflow_client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of the only .wandb file in an offline folder.

    It is a log of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    return [Record.FromString(data) for data in _log_entries(file.read_bytes())]


def _log_entries(data: bytes) -> Iterator[bytes]:
    position, entry = FILE_HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += HEADER_BYTES
        entry += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield entry
            entry = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an offline run, with `_step` and `_timestamp`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.HasField("history")
    ]
