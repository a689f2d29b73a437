"""The readers of files that others may have written, each with valid documents and the functions that gputrain calls.

`fuzz_readers.py` passes them changed and damaged files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from containers import (
    dataset_file,
    packed_set,
    read_pack,
    read_shard,
    tar_shard,
    with_right_checksums,
    with_right_digest,
)
from hypothesis import strategies as st
from inputs import damaged, json_files, json_line_files, large_json_files, large_yaml_files, yaml_files

from engine.config.loader import resolve_config
from engine.config.optimizer_options import option_problems
from engine.config.schema import as_dict
from engine.config.settings import read_code_packages
from engine.config.yaml_io import parse_yaml, to_yaml
from engine.data.pack.pack_file import InvalidPackError
from engine.data.sources import decoded_cache, folder
from engine.data.sources.decoded_cache import DecodedChunks, load_or_decode
from engine.data.sources.tar_index import ShardError
from engine.gpus.reservation import Reservation
from engine.gpus.reservation_reader import read_reservations
from engine.models import catalog
from engine.optim import timm_optimizers
from engine.runs import ownership, watcher
from engine.runs.control import RequestCounters, consume_requests
from engine.runs.evaluations import mistakes
from engine.runs.event_lines import event_line
from engine.runs.events import CheckpointSaved, ControlEvent, GpuEvent, RankFailed, RunFinished, RunPaused, WarningEvent
from engine.runs.find import find_run
from engine.runs.folder import RunFolder, list_runs
from engine.runs.history import History
from engine.runs.journal import JournalReader, to_line
from engine.runs.ownership import Ownership, _owned_by_another, check_claim
from engine.runs.records import GpuSample
from engine.runs.run_row import make_run_row
from engine.runs.watcher import RunWatcher
from engine.utils.errors import UsageError
from engine.utils.files import MAX_JSON_BYTES, cache_folder, config_folder, make_user_folder, state_folder
from engine.utils.helper_process import HelperError
from factories import make_epoch, make_run_folder, make_run_resumed, make_run_started, make_step
from tui.form.model import load_last_form, validate_form
from tui.log_tail import LogTail
from tui.pollers import EvaluationPoller, RunPoller
from tui.text.confusion import matrix_lines
from tui.text.models import list_models, print_models
from tui.text.preview import figure_lines
from tui.text.ranks import rank_lines
from tui.text.run_lines import run_line
from tui.text.run_progress import progress_line
from tui.text.run_table import RunTable, default_fields
from tui.text.runs import row_cells

HOST = os.uname().nodename
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)


@dataclass(frozen=True)
class Reader:
    """A file that `prepare` places below a folder, the `inputs` for it, and the function that reads it as gputrain
    does, which raises only `documented` exceptions. `large` are files that must not take much memory."""

    name: str
    inputs: st.SearchStrategy[bytes]
    prepare: Callable[[Path], Path]
    read: Callable[[Path], None]
    documented: tuple[type[Exception], ...] = ()
    large: Callable[[], Iterator[bytes]] = lambda: large_json_files(MAX_JSON_BYTES)


# ---- Run folders ----

EVENTS = [
    *(make_run_started(), make_step(1), make_epoch(1), make_run_resumed(3, 5.0), make_step(4), make_epoch(2, 0.9)),
    *(WarningEvent(message="ä"), CheckpointSaved(path="p", step=1, epoch=1), RunPaused(step=4, epoch=2)),
    *(ControlEvent(request="stop", by="me", outcome="yes"), RankFailed(rank=0, device="cpu", cause="why")),
    GpuEvent(gpus=[GpuSample("GPU-1", "h", "ok", busy=3.0, memory_used=5, throttle=["power"])]),
    RunFinished(state="finished"),
]
EVENT_DOCUMENTS = [json.loads(to_line(event)) for event in EVENTS]
OWNERS = [
    {"format": 1, "host": host, "pid": 7, "agents": ["n/1"], "user": "u", "heartbeat": heartbeat}
    for host in (HOST, "other")
    for heartbeat in (time.time(), 1.0, None)
]
SUMMARY = History().summary().to_dict() | {"epochs": 3, "best_epoch": 2, "best_val_accuracy": 0.5, "val_loss": 1.0}
VERDICT = {"kind": "data", "message": "slow", "share": 0.5, "advice": "more workers"}
EVALUATION = {
    "epoch": 1, "loss": 0.5, "top1": 0.5, "top5": 1.0, "images": 4, "per_class": [0.5, None],
    "confusion": [[1, 1], [0, 2]],
}  # fmt: skip


def run_file(name: str) -> Callable[[Path], Path]:
    """Return a function that makes a run folder and returns the path of one of its files."""

    def prepare(root: Path) -> Path:
        run = make_run_folder(root, "a", *EVENTS[:4])
        run.control.mkdir()
        return run.path / name

    return prepare


def read_owner(root: Path) -> None:
    # Without the wait for an owner that is about to exit.
    ownership._retry = lambda attempt: attempt()
    run = RunFolder(root / "a")
    run.is_owned()
    run.state(run.history())
    list_runs(root)
    os.close(find_run(root, "a").held_fd)
    assert str(_owned_by_another(run))
    with contextlib.suppress(UsageError):
        check_claim(root, "a", resume=True)
    Ownership(run).release()


def read_run(root: Path) -> None:
    """Read the journal like `gputrain runs`, `gputrain logs`, the screens and a resumed run."""
    run = RunFolder(root / "a")
    for event in JournalReader(run.journal).poll():
        assert (event_line(event) or "").isprintable()
    history = run.history()
    json.dumps(history.summary().to_dict(), allow_nan=False)
    run.state(history)
    watch = RunWatcher(run)
    row = make_run_row(watch)
    json.dumps(row.to_dict())
    for line in (
        *row_cells(row),
        run_line(row, 10, 80),
        RunTable.fit([row], 200, default_fields(), with_message=True).line(row),
        *figure_lines(row, None, 80),
        progress_line(row, 100),
    ):
        assert str(line).isprintable()
    feed = RunPoller(run)
    feed.poll()
    assert feed.latest is not None
    rank_lines(feed.latest.ranks, None, 80, 2)


def read_partial_run(root: Path) -> None:
    """Read only both ends of the journal, and the rest from summary.json."""
    limits = ("MAX_FULL_READ_BYTES", "TAIL_BYTES", "SCAN_BLOCK_BYTES")
    original = {name: getattr(watcher, name) for name in limits}
    for name in limits:
        setattr(watcher, name, 100)
    try:
        read_run(root)
    finally:
        for name, value in original.items():
            setattr(watcher, name, value)


def read_requests(root: Path) -> None:
    counters = RequestCounters()
    for request in consume_requests(RunFolder(root / "a").control):
        event = ControlEvent(request=request.request, by=request.by, outcome=counters.apply(request.request))
        assert event_line(event)
        assert to_line(event).isprintable()


def read_evaluation(root: Path) -> None:
    poller = EvaluationPoller(RunFolder(root / "a").evaluation)
    poller.poll()
    if (evaluations := poller.latest) is None:
        assert poller.problem
        return
    for evaluation in (evaluations.last, evaluations.best):
        if evaluation.counts.size:
            mistakes(evaluation.counts)
            matrix_lines(list(evaluations.classes), evaluation.counts.tolist())


def read_log(root: Path) -> None:
    LogTail(RunFolder(root / "a").log).lines()


# ---- Reservations ----

RESERVATION = {
    "format": 1, "run": "a", "user": "u", "pid": 7, "since": 1.0, "wants": "all", "visible": ["GPU-1"],
    "gpus": ["GPU-1"], "ranks": [{"run": "a", "rank": 0, "pid": 8, "uuid": "GPU-1"}], "write_lock": True,
}  # fmt: skip
_HELD: list[Reservation] = []


def prepare_reservation(root: Path) -> Path:
    os.environ["GPUTRAIN_RESERVATIONS"] = str(root)
    reservation = Reservation()
    reservation.enqueue("all", ["GPU-1"], "a")
    _HELD.append(reservation)
    return next(root.glob("gputrain-*/*.json"))


def _check_printable(sentence: str) -> None:
    assert sentence.isprintable()


def read_all_reservations(_: Path) -> None:
    for reservation in read_reservations(report=_check_printable):
        assert reservation.key is not None
        json.dumps(asdict(reservation))


# ---- User folders ----


def user_file(get_root: Callable[[], Path], name: Callable[[], str]) -> Callable[[Path], Path]:
    """Return a function that makes a user folder and returns the path of one of its files."""

    def prepare(root: Path) -> Path:
        for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            os.environ[variable] = str(root)
        return make_user_folder(get_root()) / name()

    return prepare


def no_helper(*_: object, **__: object) -> Any:
    raise HelperError("not started")


def no_counts(_: str, names: list[str], *__: object) -> Iterator[int | None]:
    yield from (None for _ in names)


def read_models(_: Path) -> None:
    catalog.ask_helper, catalog.count_model_parameters = no_helper, no_counts  # type: ignore[assignment]
    with contextlib.suppress(UsageError):
        catalog.model_names("torchvision")
    models = list_models("torchvision")
    if not models:
        return
    catalog.filter_models(models, "res")
    with contextlib.redirect_stdout(io.StringIO()):
        print_models(models, catalog.with_parameter_counts(models, lambda *_: None))
    json.dumps([model.to_dict() for model in models])


def read_parameter_counts(_: Path) -> None:
    catalog.count_model_parameters = no_counts  # type: ignore[assignment]
    models = [catalog.CatalogModel("torchvision", "resnet18")]
    with contextlib.redirect_stdout(io.StringIO()):
        print_models(models, catalog.with_parameter_counts(models, lambda *_: None))


def read_timm_optimizers(_: Path) -> None:
    timm_optimizers.ask_helper = no_helper
    optim = resolve_config(None).config.optim.model_copy(update={"name": "timm:adamp", "options": {"eps": 1.0}})
    assert all(problem.message for problem in timm_optimizers.timm_optimizer_problems(optim))
    list(option_problems(optim, timm_optimizers.timm_options(optim.name)))


def read_form(_: Path) -> None:
    form = load_last_form()
    validate_form(form)
    with contextlib.suppress(UsageError):
        form.arguments()


def prepare_image_index(root: Path) -> Path:
    (root / "images").mkdir()
    (root / "images" / "a.png").write_bytes(PNG)
    path = user_file(cache_folder, str)(root)
    folder._readable_images(root / "images")
    return next(path.glob("images-*.json"))


def read_image_index(root: Path) -> None:
    readable, unreadable = folder._readable_images(root / "images")
    assert (len(readable), unreadable) == (1, [])


def decode() -> DecodedChunks:
    return DecodedChunks((2, 1, 2, 2), [np.full((2, 1, 2, 2), 7, np.uint8)], {"unread": {}})


def decoded_file(suffix: str) -> Callable[[Path], Path]:
    def prepare(root: Path) -> Path:
        folder_path = user_file(cache_folder, str)(root) / "decoded"
        load_or_decode("k", decode)
        return folder_path / f"k.{suffix}"

    return prepare


def read_decoded_metadata(_: Path) -> None:
    assert int(load_or_decode("k", decode).images.sum()) == 56


def read_decoded_images(root: Path) -> None:
    """Read an array whose size and modification time are those in the metadata."""
    path = root / "gputrain" / "decoded" / "k.npy"
    status = path.stat()
    metadata = {"file": [status.st_size, status.st_mtime_ns], "shape": [2, 1, 2, 2], "checksum": "", "about": {}}
    path.with_suffix(".json").write_text(json.dumps(metadata))
    cached = decoded_cache._read_cached("k", verify=False)
    assert cached is None or (cached.images.shape, cached.images.dtype) == ((2, 1, 2, 2), np.uint8)


def no_large_files() -> Iterator[bytes]:
    yield from ()


def decoded_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.full((2, 1, 2, 2), 7, np.uint8))
    return buffer.getvalue()


# ---- Configs ----

CONFIGS: list[Mapping[str, Any]] = [
    as_dict(resolve_config("digits").config),
    {"base": "b.yaml", "model": {"name": "m:Net", "options": {"a": 1}}, "optim": {"betas": [0.9, 0.99]}},
]


def config_file(root: Path) -> Path:
    return root / "a.yaml"


def read_config(root: Path) -> None:
    """An accepted config can be written and read back; a rejected one has a message for each key."""
    try:
        resolved = resolve_config(str(root / "a.yaml"))
    except UsageError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)
        return
    assert parse_yaml(to_yaml(as_dict(resolved.config)))


INDEX = {"/images/a.png": [len(PNG), 1], "/images/b.png": [1, 2]}
METADATA = {"file": [144, 1], "shape": [2, 1, 2, 2], "checksum": "00", "about": {"unread": {}}}
MODELS = {"known": [{"source": "torchvision", "name": "resnet18", "parameters": 5, "weights": ["V1"], "top1": 69.7}]}
OPTIMIZERS = {
    "optimizers": {"adamp": {"options": {"eps": {"default": 1e-8, "optional": False}}}, "x": {"refused": "y"}}
}
FORM = {"format": 1, "base": "digits", "typed": {"run.epochs": "3", "optim.name": "adamw"}}

READERS = [
    Reader("owner.json", json_files(OWNERS), run_file("owner.json"), read_owner, (UsageError,)),
    Reader("events.jsonl", json_line_files(EVENT_DOCUMENTS), run_file("events.jsonl"), read_run),
    Reader("ends of events.jsonl", json_line_files(EVENT_DOCUMENTS), run_file("events.jsonl"), read_partial_run),
    Reader("summary.json", json_files([SUMMARY | {"verdict": VERDICT}]), run_file("summary.json"), read_partial_run),
    Reader(
        "control request",
        json_files([{"format": 1, "request": name, "by": "me", "time": 1.0} for name in ("stop", "pause", "x")]),
        run_file("control/1.json"),
        read_requests,
    ),
    Reader(
        "evaluation.json",
        json_files([{"format": 1, "classes": ["a", "b"], "last": EVALUATION, "best": EVALUATION}]),
        run_file("evaluation.json"),
        read_evaluation,
    ),
    Reader("log.txt", st.binary(max_size=200), run_file("log.txt"), read_log),
    Reader("config.yaml", yaml_files(CONFIGS), config_file, read_config, large=large_yaml_files),
    Reader("reservation", json_files([RESERVATION]), prepare_reservation, read_all_reservations),
    Reader(
        "model catalog",
        json_files([MODELS]),
        user_file(cache_folder, lambda: f"models-torchvision-{catalog.library_version('torchvision')}.json"),
        read_models,
        (UsageError,),
    ),
    Reader(
        "parameter counts",
        json_files([{"resnet18": 5, "alexnet": 3}]),
        user_file(cache_folder, lambda: catalog._counts_file_name("torchvision")),
        read_parameter_counts,
    ),
    Reader(
        "timm optimizers",
        json_files([OPTIMIZERS]),
        user_file(cache_folder, lambda: f"optimizers-timm-{timm_optimizers.version('timm')}.json"),
        read_timm_optimizers,
        (UsageError,),
    ),
    Reader("index of images", json_files([INDEX]), prepare_image_index, read_image_index),
    Reader("metadata of decoded images", json_files([METADATA]), decoded_file("json"), read_decoded_metadata),
    Reader("decoded images", damaged(decoded_array()), decoded_file("npy"), read_decoded_images, large=no_large_files),
    Reader(
        "packed set",
        st.one_of(damaged(packed_set()), damaged(packed_set()).map(with_right_digest)),
        dataset_file,
        read_pack,
        (InvalidPackError, OSError),
        large=no_large_files,
    ),
    Reader(
        "tar shard",
        st.one_of(damaged(tar_shard()), damaged(tar_shard()).map(with_right_checksums)),
        dataset_file,
        read_shard,
        (ShardError,),
        large=no_large_files,
    ),
    Reader("choices of the form", json_files([FORM]), user_file(state_folder, lambda: "form.json"), read_form),
    Reader(
        "settings.yaml",
        yaml_files([{"run": {"code_packages": ["timm", "torchvision"]}}]),
        user_file(config_folder, lambda: "settings.yaml"),
        lambda _: check_packages(),
        (UsageError,),
        large=large_yaml_files,
    ),
    Reader(
        "preset",
        yaml_files(CONFIGS),
        user_file(lambda: make_user_folder(config_folder(), "presets"), lambda: "mine.yaml"),
        lambda _: valid_config_of_preset(),
        large=large_yaml_files,
    ),
]


def check_packages() -> None:
    assert all(isinstance(package, str) for package in read_code_packages())


def valid_config_of_preset() -> None:
    with contextlib.suppress(UsageError):
        resolve_config("mine")
