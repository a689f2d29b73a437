"""Fuzz the readers of configs and journals: a config is accepted or rejected with a `UsageError`, and invalid lines of
a journal are skipped."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.loader import ResolvedConfig, resolve_config
from engine.config.schema import Config, as_dict, fields, sections
from engine.config.yaml_io import parse_yaml, to_yaml
from engine.runs.curves import Curves
from engine.runs.event_lines import event_line
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    Event,
    GpuEvent,
    RankFailed,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    WarningEvent,
)
from engine.runs.folder import RunFolder
from engine.runs.history import history_from_events
from engine.runs.journal import EVENT_TYPES, JournalReader, event_type, from_line, to_line
from engine.runs.journal_source import JournalPoints
from engine.runs.record_completion import open_run, read_journal_record
from engine.runs.records import GpuSample
from engine.show.charts import run_charts
from engine.show.table import plain_lines
from engine.utils.codec import encode
from engine.utils.errors import UsageError
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import default_fields, make_run_folder, row_of
from tui.charts.plot import plot
from tui.charts.view import ChartView, curves_for
from tui.pollers.runs import RunPoller
from tui.screens.run_progress import progress_line
from tui.tables.ranks import rank_lines
from tui.tables.runs import fit_monitor_list, fit_run_list, listed_columns, monitor_line, run_list_line

# Deterministic examples. To try many more:
# GPUTRAIN_FUZZ=20000 pytest --timeout=0 tests/end_to_end/test_fuzz.py
EXAMPLES = int(os.environ.get("GPUTRAIN_FUZZ", "30"))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

KEYS = [key for key, _ in fields()]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 10**400, 2**63, 1e308, -0.0]))
WORDS = st.one_of(
    st.sampled_from(
        ["", "null", "off", "auto", "~", ".nan", "1e999", "0x10", "1_000", "010", "[", "{", "*a", "!!int x"]
    ),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def check_config(file: str | None, *overrides: str) -> None:
    """An accepted config can be written and read back; a rejected one has a message for each key."""
    try:
        resolved: ResolvedConfig = resolve_config(file, overrides)
    except UsageError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)
        return
    assert Config.model_validate(parse_yaml(to_yaml(as_dict(resolved.config)))) == resolved.config


@contextmanager
def config_files(**texts: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        for file_name, text in texts.items():
            (Path(name) / f"{file_name}.yaml").write_bytes(text)
        yield Path(name)


YAML_SYNTAX = [
    *(": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ", ", "&a ", "*a", "&a [", "*a, ", "<<: ", "? ", "|\n", ">"),
    *("---\n", "...", "'", '"', "#", "%YAML 1.1\n", "\t", "\x00", "\x85", "="),
    *(f"!!{tag} " for tag in ("float", "timestamp", "bool", "int", "omap", "pairs", "map", "seq", "str", "null")),
    *("!!binary ", "!!set ", "!!python/name:os.system ", "!x ", "2001-01-01", "1:30", "0b1", "0o7"),
]
YAML_PARTS = st.lists(
    st.one_of(
        st.sampled_from([*sections(), *(key.partition(".")[2] for key in KEYS), "base"]),
        st.sampled_from(YAML_SYNTAX),
        SCALARS.map(str),
    ),
    max_size=16,
).map("".join)


@fuzz
@given(st.one_of(YAML_PARTS.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=60)))
def test_resolve_accepts_or_rejects_any_text(text: bytes) -> None:
    with config_files(a=text) as folder:
        check_config(str(folder / "a.yaml"))


SECTIONS = st.dictionaries(
    st.sampled_from([*sections(), "base", "modle"]),
    st.one_of(
        st.dictionaries(st.one_of(st.sampled_from([key.partition(".")[2] for key in KEYS]), WORDS), VALUES, max_size=4),
        VALUES,
    ),
    max_size=4,
)


@fuzz
@given(SECTIONS)
def test_resolve_accepts_or_rejects_any_values(values: dict[str, Any]) -> None:
    with config_files(a=yaml.safe_dump(values).encode()) as folder:
        check_config(str(folder / "a.yaml"))


OVERRIDES = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS), st.one_of(YAML_PARTS, SCALARS, VALUES)),
    st.builds("{}={}".format, WORDS, WORDS),
    st.text(max_size=12),
)


@fuzz
@given(st.lists(OVERRIDES, max_size=4))
def test_resolve_accepts_or_rejects_any_argument(arguments: list[str]) -> None:
    check_config(None, *arguments)


BASES = st.one_of(
    st.lists(st.sampled_from(["a.yaml", "b.yaml", "c.yaml", "./b.yaml", "gone.yaml", ".", "~", "~x", "\0", ""])),
    VALUES,
)


@fuzz
@given(BASES, BASES, BASES, SECTIONS)
def test_resolve_accepts_or_rejects_any_base_chain(a: Any, b: Any, c: Any, values: dict[str, Any]) -> None:
    texts = {
        name: yaml.safe_dump(values | {"base": base}).encode() for name, base in zip("abc", (a, b, c), strict=True)
    }
    with config_files(**texts) as folder:
        check_config(str(folder / "a.yaml"))


EVENTS: list[Event] = [
    *(make_run_started(), make_step(1), make_epoch(1), make_run_resumed(3, 5.0), make_step(4), make_epoch(2, 0.9)),
    *(
        WarningEvent(message="ä", code="no-effect"),
        CheckpointSaved(path="p", step=1, epoch=1),
        ControlEvent(request="stop", by="me", outcome="yes"),
    ),
    RunPaused(step=4, epoch=2),
    RankFailed(rank=0, device="cpu", cause="why", code="rank-failed"),
    GpuEvent(gpus=[GpuSample("GPU-1", "h", "ok", util=3.0, memory_used=5, throttle=["power"])]),
    RunFinished(state="finished"),
]
LINES = [to_line(event) for event in EVENTS]


@st.composite
def nearly_valid_lines(draw: st.DrawFn) -> str:
    """Draw the line of an event with some fields changed or missing."""
    values = json.loads(draw(st.sampled_from(LINES)))
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=3)):
        values[name] = draw(VALUES)
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=1)):
        del values[name]
    return json.dumps(values)


@st.composite
def damaged_journals(draw: st.DrawFn) -> bytes:
    """Draw a journal that is truncated, has changed bytes, or has a part moved."""
    data = bytearray("\n".join(draw(st.lists(st.sampled_from(LINES), max_size=8))).encode() + b"\n")
    for position, value in draw(st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=6)):
        data[position % len(data)] = value
    start = draw(st.integers(0, len(data)))
    return bytes(data[draw(st.integers(0, start)) :] + data[:start])


JOURNALS = st.one_of(
    st.binary(max_size=80),
    st.lists(st.one_of(nearly_valid_lines(), st.sampled_from(LINES), VALUES.map(json.dumps)), max_size=6).map(
        lambda lines: "\n".join([*lines, ""]).encode()
    ),
    damaged_journals(),
)


@fuzz
@given(st.one_of(nearly_valid_lines(), VALUES.map(json.dumps), st.text()))
def test_from_line_returns_event_or_none_for_any_line(line: str) -> None:
    event = from_line(line)
    if event is None:
        return
    assert type(event) is EVENT_TYPES[event.type]
    assert (event_line(event) or "").isprintable()
    assert to_line(event).isprintable()
    assert from_line(to_line(event)) is not None


@fuzz
@given(JOURNALS, st.integers(1, 200))
def test_history_reads_any_journal(data: bytes, max_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_run_folder(Path(name), "a")
        folder.journal.write_bytes(data)
        whole = list(JournalReader(folder.journal).poll())
        reader, parts = JournalReader(folder.journal), list[Event]()
        while reader.offset < len(data):
            parts += reader.poll(max_bytes)
        assert list(map(to_line, parts)) == list(map(to_line, whole))
        history = history_from_events(whole)
        assert history.steps_done >= 0
        encode(history.record())
        read_like_screens(folder.path)


def has_start_of_another_format(data: bytes) -> bool:
    """Whether a complete line starts a session and lacks what every start has."""
    lines = data.split(b"\n")[:-1]
    return any(event_type(line) in (RunStarted, RunResumed) and from_line(line) is None for line in lines)


def read_like_screens(path: Path) -> None:
    """Read the run like `gputrain runs` and the run screen do."""
    folder = RunFolder(path)
    folder.summary.unlink(missing_ok=True)
    row = row_of(folder)
    assert row.unreadable == has_start_of_another_format(folder.journal.read_bytes())
    plain_lines(listed_columns([row]), [row])
    monitor_line(fit_monitor_list([row], 10, 80), row)
    run_list_line(fit_run_list([row], 200, default_fields(), with_message=True), row)
    progress_line(row, 100)
    feed = RunPoller(folder)
    feed.poll()
    assert feed.latest is not None and feed.caught_up
    rank_lines(feed.latest.ranks, None, 80, 2)
    data, points, view = Curves(), JournalPoints(), ChartView()
    while not feed.events.empty():
        data.add([points.read(feed.events.get() or ())])
    for chart in run_charts(data):
        plot(curves_for(data, chart, view.axis), view.window(data, chart.id), 40, 8)


@fuzz
@given(st.lists(JOURNALS, max_size=4).map(b"\n".join))
def test_record_of_any_journal_is_completed(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_run_folder(Path(name), "a")
        folder.summary.unlink()
        folder.journal.write_bytes(data)
        record = read_journal_record(folder).record
        assert open_run(folder).record == record
        # It is stored, unless the journal has no event, or a part that cannot be read.
        assert folder.summary.exists() == (record.started_at is not None and not has_start_of_another_format(data))
