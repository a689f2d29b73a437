"""The readers of foreign metrics and parameters, each with valid files.

Checksums and lengths are right in a part of the inputs, so that the messages inside the frames are read, too.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from hypothesis import strategies as st
from inputs import RAW_BYTES, damaged, json_files, json_line_files, large_json_files, large_yaml_files, yaml_files
from readers import Reader

from engine.jobs.command.try_parse import try_parse
from engine.watch.folders import RunFollower, find_runs
from engine.watch.output_metrics import OutputMetrics
from engine.watch.parameters import MAX_KEY_LENGTH, MAX_PARAMETERS, MAX_TEXT_LENGTH, Parameters, read_parameters
from engine.watch.reading import MAX_NAME_LENGTH, MAX_STEP, Reading
from support.foreign import event, event_file, field, scalar, session_start, wandb_file, wandb_record

MAX_POLLS = 40
MAX_ESCAPED_CHARACTERS = 10  # such as \U0010ffff
# A larger file is not read again while it grows.
MAX_GROWN_BYTES = 1 << 20
LARGE_BYTES, LARGE_TEXT = 1 << 24, 1 << 20

_TENSOR = field(1, "a") + field(8, field(1, 1) + field(2, b"") + field(5, b"\0\0\0\0"))
_METADATA = field(1, field(1, "hparams") + field(2, field(3, field(1, field(1, "lr") + field(2, field(2, 0.5))))))
EVENTS = [
    event(1, scalar("loss", 0.5), scalar("lr", 0.1)),
    event(300, _TENSOR),
    event(0, field(1, "_hparams_/session_start_info") + field(9, _METADATA)),
    session_start(2),
]
ROWS = [
    {"step": 1, "epoch": 0.5, "loss": 0.25, "val": {"acc": 1}},
    {"_step": 2, "_timestamp": 1.8e9, "bad": "NaN", "image": {"_type": "image"}},
]
CONFIG = {"lr": 0.1, "model": {"name": "a", "sizes": [1, 2]}}
CSV = b"epoch,step,train/loss,val/loss\n0,1,0.5,\n0,2,,0.25\nepoch,step,lr\n1,3,0.1\n"
STATE = {"global_step": 2, "log_history": [{"step": 1, "loss": 0.5}, {"step": 2, "epoch": 1.0}], "max_steps": 2}
OUTPUT = b"""Epoch 1/3
 12/100 [00:01<00:08,  9.9it/s, loss=0.5]
{'loss': '0.5', 'epoch': '0.1'}
[rank0]: epoch 1 step 3/9 [1/2] train loss 0.5 Acc@1: 12/34 lr=1e-3
  Epoch    GPU_mem       loss  Size
    1/3         0G      2.303    64: 100% 4/4
Test: [ 9/10] Loss: 1 (2) INFO
"""
METRIC = b"1800000000000 0.5 1\n1800000000000 nan 2\n1 2\n"


def at(name: str, *others: str) -> Callable[[Path], Path]:
    """Return a function that prepares a file of a run, with empty files beside it."""

    def prepare(root: Path) -> Path:
        for other in others:
            (root / other).parent.mkdir(parents=True, exist_ok=True)
            (root / other).touch()
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        return root / name

    return prepare


def read_grown(path_of: Callable[[Path], Path]) -> Callable[[Path], None]:
    """Return a function that reads a file whole, and then while it grows from its first half and shrinks again."""

    def read(root: Path) -> None:
        read_runs(root)
        path = path_of(root)
        if path.stat().st_size > MAX_GROWN_BYTES:
            return
        content = path.read_bytes()
        for run in find_runs(root).runs:
            follower = RunFollower(run)
            for end in (len(content) // 2, len(content), len(content) // 3):
                path.write_bytes(content[:end])
                for _ in range(3):
                    check(follower.poll())

    return read


def read_runs(root: Path) -> None:
    for run in find_runs(root).runs:
        assert run.name.isprintable()
        run.changed_at()
        follower = RunFollower(run)
        for _ in range(MAX_POLLS):
            readings = follower.poll()
            check(readings)
            if all(reading.share == 1 for reading in readings):
                break


def check(readings: list[Reading]) -> None:
    for reading in readings:
        assert 0 <= reading.share <= 1
        check_parameters(reading.parameters)
        for name, step, value, epoch, time in reading.points:
            assert name.isprintable()
            assert 0 < len(name) <= MAX_ESCAPED_CHARACTERS * MAX_NAME_LENGTH
            assert type(step) is int
            assert abs(step) <= MAX_STEP
            assert type(value) is float
            assert all(part is None or type(part) is float for part in (epoch, time))


def read_folder_parameters(root: Path) -> None:
    check_parameters(read_parameters(root))


def check_parameters(parameters: Parameters) -> None:
    assert len(parameters) <= MAX_PARAMETERS
    for key, value in parameters.items():
        assert key.isprintable()
        assert 0 < len(key) <= MAX_ESCAPED_CHARACTERS * MAX_KEY_LENGTH
        assert isinstance(value, bool | int | float | str | None)
        assert len(json.dumps(value, ensure_ascii=False).encode()) <= 8 * MAX_TEXT_LENGTH


def read_output(root: Path) -> None:
    try_parse(root / "log.txt")
    metrics, lines = OutputMetrics(), (root / "log.txt").read_text(errors="replace").split("\n")[:1000]
    for index, line in enumerate(lines):
        check([Reading(metrics.feed(line, lines[index + 1 : index + 3]))])


def large_lines() -> Iterator[bytes]:
    """Yield one endless line, and many names."""
    yield b"step,loss\n" + b"1" * LARGE_BYTES
    yield b"step," + b",".join(b"m%d" % number for number in range(LARGE_BYTES // 16)) + b"\n1"
    yield b"".join(b"step,m%d\n1,2\n" % number for number in range(50_000))


def large_frames() -> Iterator[bytes]:
    """Yield one huge record, and records of many fields, metrics and nested messages."""
    yield event_file(b"x" * LARGE_BYTES)
    yield event_file(*(field(5, field(1, b"") * 80_000) for _ in range(10)))
    yield event_file(*(event(0, *(scalar(f"{part}-{number}", 1.0) for number in range(1000))) for part in range(20)))
    nested = b""
    while len(nested) < 200_000:
        nested = field(6, nested)
    yield event_file(nested)


def large_wandb_files() -> Iterator[bytes]:
    yield wandb_file(records=[b"x" * LARGE_BYTES])
    yield wandb_file([{f"{part}-{number}": 1 for number in range(5000)} for part in range(20)])
    yield wandb_file([{"a": [[]] * 300_000} for _ in range(3)])


def database(config: bytes, metrics: bytes) -> bytes:
    """Return a database of trackio with one run, whose JSON may be damaged."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_name TEXT, config TEXT)")
        columns = "id INTEGER PRIMARY KEY, timestamp, run_name TEXT, step, metrics TEXT"
        connection.execute(f"CREATE TABLE metrics ({columns})")
        connection.execute("INSERT INTO configs VALUES (1, 'a', ?)", (config,))
        for step in (1, None, 2**62, "x"):
            row = ("2027-01-15T08:00:00+00:00", "a", step, metrics)
            connection.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?)", row)
        connection.commit()
        return connection.serialize()


def mlflow_database(name: bytes, param: bytes, value: object) -> bytes:
    """Return a database of MLflow with one run, whose texts and numbers may be damaged."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name)")
        connection.execute("CREATE TABLE runs (run_uuid PRIMARY KEY, name, status, lifecycle_stage, experiment_id)")
        connection.execute("CREATE TABLE params (key, value, run_uuid)")
        connection.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        connection.execute("INSERT INTO experiments VALUES (1, ?)", (name,))
        connection.execute("INSERT INTO runs VALUES ('a', ?, 'RUNNING', 'active', 1)", (name,))
        connection.execute("INSERT INTO params VALUES (CAST(? AS TEXT), CAST(? AS TEXT), 'a')", (name, param))
        for step in (1, None, 2**62, value):
            row = ("loss", value, step, step, step is None)
            connection.execute("INSERT INTO metrics VALUES (?, ?, ?, 'a', ?, ?)", row)
        connection.execute("INSERT INTO metrics VALUES (CAST(? AS TEXT), 0.5, 1800000000000, 'a', 1, 0)", (name,))
        connection.commit()
        return connection.serialize()


_DATABASE = database(json.dumps(CONFIG).encode(), json.dumps(ROWS[0]).encode())
_MLFLOW_DATABASE = mlflow_database(b"a", b"0.1", 0.5)
_SQL_VALUES = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), st.binary(max_size=20))
_RECORDS = [wandb_record(2, ROWS[0]), wandb_record(2, ROWS[1]), wandb_record(5, CONFIG)]


def history_of_one_value(text: bytes) -> bytes:
    return field(2, field(1, field(1, "a") + field(16, text)))


def any_of(records: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Draw up to six records, some of them damaged."""
    record = st.sampled_from(records)
    return st.lists(st.one_of(record, record, record.flatmap(damaged), RAW_BYTES), max_size=6)


def foreign_reader(
    name: str,
    inputs: st.SearchStrategy[bytes],
    prepare: Callable[[Path], Path],
    large: Callable[[], Iterator[bytes]],
) -> Reader:
    return Reader(name, inputs, prepare, read_grown(prepare), large=large)


FOREIGN_READERS = [
    foreign_reader(
        "TensorBoard events",
        st.one_of(damaged(event_file(*EVENTS)), any_of(EVENTS).map(lambda records: event_file(*records))),
        at("run/events.out.tfevents.1.host"),
        large_frames,
    ),
    foreign_reader(
        "W&B log",
        st.one_of(
            damaged(wandb_file(records=_RECORDS)),
            any_of(_RECORDS).map(lambda records: wandb_file(records=records)),
            json_files(ROWS).map(lambda text: wandb_file(records=[history_of_one_value(text)])),
        ),
        at("run/a.wandb"),
        large_wandb_files,
    ),
    foreign_reader("CSV", st.one_of(damaged(CSV), RAW_BYTES), at("run/metrics.csv"), large_lines),
    foreign_reader("JSON lines", json_line_files(ROWS), at("run/log.jsonl"), lambda: large_json_files(LARGE_BYTES)),
    foreign_reader(
        "trainer_state.json",
        json_files([STATE]),
        at("run/checkpoint-2/trainer_state.json"),
        lambda: large_json_files(LARGE_BYTES),
    ),
    foreign_reader(
        "MLflow metric", st.one_of(damaged(METRIC), RAW_BYTES), at("run/metrics/loss", "run/meta.yaml"), large_lines
    ),
    foreign_reader(
        "trackio database",
        st.one_of(
            damaged(_DATABASE),
            json_files([CONFIG]).map(lambda config: database(config, b"{}")),
            json_files(ROWS).map(lambda metrics: database(b"{}", metrics)),
        ),
        at("run/project.db"),
        lambda: iter([database(b"{}", b'{"a": ' + b"9" * LARGE_BYTES + b"}")]),
    ),
    foreign_reader(
        "MLflow database",
        st.one_of(
            damaged(_MLFLOW_DATABASE), st.builds(mlflow_database, st.binary(min_size=1), st.binary(), _SQL_VALUES)
        ),
        at("run/mlflow.db"),
        lambda: iter([mlflow_database(b"a" * LARGE_TEXT, b"9" * LARGE_TEXT, b"1" * LARGE_TEXT)]),
    ),
    Reader(
        "output of a command",
        st.one_of(damaged(OUTPUT), json_line_files(ROWS)),
        lambda root: root / "log.txt",
        read_output,
        large=large_lines,
    ),
    Reader(
        "foreign parameters",
        yaml_files([CONFIG, {"wandb_version": 1, "lr": {"value": 0.1}}]),
        lambda root: root / "config.yaml",
        read_folder_parameters,
        large=large_yaml_files,
    ),
    Reader(
        "foreign trainer parameters",
        json_files([STATE]),
        lambda root: root / "trainer_state.json",
        read_folder_parameters,
        large=lambda: large_json_files(LARGE_BYTES),
    ),
]
