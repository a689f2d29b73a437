"""The readers of files that others may have written, each with valid documents and the functions that gputrain calls.

`fuzz_readers.py` passes them changed and damaged files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from containers import dataset_file, read_shard, tar_shard, with_right_checksums
from hypothesis import strategies as st
from inputs import damaged, json_files, json_line_files, large_json_files, large_yaml_files, yaml_files
from run_readers import (
    BOTTLENECK,
    EVALUATION,
    EVENT_DOCUMENTS,
    OWNERS,
    SPARSE_EVALUATION,
    SUMMARY,
    read_evaluation,
    read_log,
    read_owner,
    read_requests,
    read_run,
    run_file,
)

from engine.config.loader import resolve_config
from engine.config.optimizer_options import option_problems
from engine.config.schema import as_dict
from engine.config.settings import read_code_packages
from engine.config.yaml_io import parse_yaml, to_yaml
from engine.data.sources import decoded_cache, folder
from engine.data.sources.decoded_cache import DecodedChunks, load_or_decode
from engine.data.sources.tar_index import ShardError
from engine.gpus.reservation import Reservation
from engine.gpus.reservation_reader import read_reservations
from engine.models import catalog
from engine.optim import timm_optimizers
from engine.show.table import plain_lines
from engine.utils import libraries
from engine.utils.codec import MAX_JSON_BYTES, asdict, encode
from engine.utils.errors import Problem, UsageError
from engine.utils.files import cache_folder, config_folder, make_user_folder, state_folder
from engine.utils.helper_process import HelperError
from tui.cli.models import find_models
from tui.form.model import load_last_form, validate_form
from tui.tables.models import MODEL_COLUMNS

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


# ---- Reservations ----

RESERVATION = {
    "format": 1, "run": "a", "since": 1.0, "selection": "all", "visible": ["GPU-1"],
    "gpus": ["GPU-1"], "ranks": [{"run": "a", "rank": 0, "pid": 8, "uuid": "GPU-1"}], "write_lock": True,
    "priority": 0, "blocked": "", "share": 1, "min_free": 1 << 30, "begin": 5.0,
}  # fmt: skip
_HELD: list[Reservation] = []


def prepare_reservation(root: Path) -> Path:
    os.environ["GPUTRAIN_RESERVATIONS"] = str(root)
    reservation = Reservation()
    reservation.enqueue("all", ["GPU-1"], "a")
    _HELD.append(reservation)
    return next(root.glob("gputrain-*/*.json"))


def _check_printable(problem: Problem) -> None:
    assert str(problem).isprintable()


def read_all_reservations(_: Path) -> None:
    for reservation in read_reservations(report=_check_printable):
        assert reservation.key is not None
        encode(reservation)


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


def read_models(_: Path) -> None:
    libraries.ask_helper = no_helper
    with contextlib.suppress(UsageError):
        catalog.model_names("torchvision")
    models = find_models("torchvision")
    if not models:
        return
    catalog.filter_models(models, "res")
    plain_lines(MODEL_COLUMNS, models)
    json.dumps([asdict(model) for model in models])


def read_timm_optimizers(_: Path) -> None:
    libraries.ask_helper = no_helper
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
    return DecodedChunks((2, 1, 2, 2), [np.full((2, 1, 2, 2), 7, np.uint8)])


def decoded_file(suffix: str) -> Callable[[Path], Path]:
    def prepare(root: Path) -> Path:
        folder_path = user_file(cache_folder, str)(root) / "decoded"
        load_or_decode("k", decode)
        return folder_path / f"k.{suffix}"

    return prepare


def read_decoded_metadata(_: Path) -> None:
    assert int(load_or_decode("k", decode).images.sum()) == 56


def read_decoded_images(root: Path) -> None:
    (root / "gputrain" / "decoded" / "k.json").write_text(json.dumps(METADATA))
    cached = decoded_cache._read_cached("k")
    assert cached is None or (cached.images.ndim, cached.images.dtype) == (4, np.uint8)


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


INDEX = {"format": 1, "stamps": {"/images/a.png": [len(PNG), 1, 1], "/images/b.png": [1, 2, 2]}}
METADATA = {"format": 1, "unread": {"1": "why"}, "labels": {"train": [0], "val": [1]}, "classes": ["a", "b"]}
MODELS = {
    "format": 1,
    "models": [{"source": "torchvision", "name": "resnet18", "parameters": 5, "weights": ["V1"], "top1": 69.7}],
}
OPTIMIZERS = {
    "format": 1,
    "optimizers": {
        "adamp": {"options": {"eps": {"default": 1e-8, "optional": False}}, "refused": ""},
        "x": {"options": {}, "refused": "y"},
    },
}
FORM = {"format": 1, "base": "digits", "typed": {"run.epochs": "3", "optim.name": "adamw"}}

READERS = [
    Reader("owner.json", json_files(OWNERS), run_file("owner.json"), read_owner, (UsageError,)),
    Reader("events.jsonl", json_line_files(EVENT_DOCUMENTS), run_file("events.jsonl"), read_run),
    Reader("summary.json", json_files([SUMMARY | {"bottleneck": BOTTLENECK}]), run_file("summary.json"), read_run),
    Reader(
        "control request",
        json_files([{"format": 1, "request": name, "by": "me", "time": 1.0} for name in ("stop", "pause", "x")]),
        run_file("control/1.json"),
        read_requests,
    ),
    Reader(
        "evaluation.json",
        json_files([{"format": 1, "classes": ["a", "b"], "last": EVALUATION, "best": SPARSE_EVALUATION}]),
        run_file("evaluation.json"),
        read_evaluation,
    ),
    Reader("log.txt", st.binary(max_size=200), run_file("log.txt"), read_log),
    Reader("config.yaml", yaml_files(CONFIGS), config_file, read_config, large=large_yaml_files),
    Reader("reservation", json_files([RESERVATION]), prepare_reservation, read_all_reservations),
    Reader(
        "model catalog",
        json_files([MODELS]),
        user_file(cache_folder, lambda: f"models-torchvision-{catalog.installed_version('torchvision')}.json"),
        read_models,
        (UsageError,),
    ),
    Reader(
        "timm optimizers",
        json_files([OPTIMIZERS]),
        user_file(cache_folder, lambda: f"optimizers-timm-{timm_optimizers.installed_version('timm')}.json"),
        read_timm_optimizers,
        (UsageError,),
    ),
    Reader("index of images", json_files([INDEX]), prepare_image_index, read_image_index),
    Reader("metadata of decoded images", json_files([METADATA]), decoded_file("json"), read_decoded_metadata),
    Reader("decoded images", damaged(decoded_array()), decoded_file("npy"), read_decoded_images, large=no_large_files),
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
