"""Warnings before a run about shared memory, open files and disk space."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.limits import (
    LoaderFootprint,
    buffers_per_process,
    check_open_files,
    shm_shortage,
)
from engine.data.sources.base import ImageFormat
from engine.training.disk import checkpoint_bytes, disk_shortage, disk_warnings, max_new_checkpoints
from engine.utils.errors import Problem
from support.gputrain_command import Gputrain
from support.messages import has_problem, raises_problem, says

FOOTPRINT = LoaderFootprint(local_world_size=2, processes=4, prefetch=4, batch_bytes=12_800 << 10)


def is_shortage(shortage: Problem | None, code: str, *values: str) -> bool:
    return shortage is not None and has_problem([shortage], code, "", *values)


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def test_shared_memory_check_covers_prefetched_batches_of_all_workers() -> None:
    assert shm_shortage(FOOTPRINT, 475 << 20) is None
    advice = ("data.workers", "data.prefetch", "(docker run --shm-size=1g)")
    assert is_shortage(shm_shortage(FOOTPRINT, 64 << 20), "shm-full", "/dev/shm ", " 64 MiB ", " 475 MiB", *advice)


def test_shared_memory_check_counts_nccl() -> None:
    both, alone = replace(FOOTPRINT, nccl=True), replace(FOOTPRINT, processes=0, nccl=True)
    assert is_shortage(shm_shortage(both, 475 << 20), "shm-full", " 475 MiB ", " 612 MiB", "NCCL", "data.workers")
    shortage = shm_shortage(alone, 64 << 20)
    assert is_shortage(shortage, "shm-full", " 64 MiB ", " 137 MiB", "(docker run --shm-size=1g)")
    assert "data." not in str(shortage), "NCCL has no key that reduces it"
    assert shm_shortage(alone, 137 << 20) is None


def test_footprint_of_decode_threads_depends_on_their_processes() -> None:
    image_format = ImageFormat(224, 3, (0.5,), (0.5,))
    threads = config("data.dataset=folder", "data.path=photos")
    footprints = [LoaderFootprint.from_config(threads, 1, workers, image_format) for workers in (0, 1, 4, 5)]
    assert [footprint.processes for footprint in footprints] == [0, 1, 1, 2]
    assert [footprint.batches for footprint in footprints] == [0, 8, 8, 16]
    assert buffers_per_process(threads.data.prefetch) == 8
    shortage = shm_shortage(footprints[2], 1 << 20)
    assert is_shortage(shortage, "shm-full", " 1 MiB ", " 73.5 MiB", "data.prefetch")
    assert "data.workers" not in str(shortage)


def test_too_few_open_files_for_any_rank_are_refused() -> None:
    check_open_files(None)
    check_open_files(64)
    with raises_problem("limit-too-low", "open files", " 63 ", " 64;", "`ulimit -n 1024`"):
        check_open_files(63)


def test_disk_space_check_covers_kept_best_and_new_checkpoint(tmp_path: Path) -> None:
    keep_config = config("checkpoint.keep=3", "run.epochs=10")
    assert max_new_checkpoints(keep_config) == 5
    assert disk_shortage(tmp_path, 5 << 20, 1 << 20, max_new_checkpoints(keep_config)) is None
    shortage = disk_shortage(tmp_path, (5 << 20) - 1, 1 << 20, 5)
    assert is_shortage(shortage, "disk-full", f"{tmp_path} ", " 5 MiB ", "(5 files of 1 MiB)")
    [warning] = disk_warnings(keep_config, tmp_path / "runs" / "new" / "checkpoints", 1 << 60)
    assert has_problem([warning], "disk-full", "", "checkpoint.keep", "--runs-dir")


def test_disk_space_check_counts_existing_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "epoch-0001.pt").touch()
    (tmp_path / "best.pt").touch()
    (tmp_path / "last.pt").hardlink_to(tmp_path / "best.pt")
    assert max_new_checkpoints(config("checkpoint.keep=3", "run.epochs=10"), tmp_path) == 3
    assert max_new_checkpoints(config("checkpoint.keep=1", "run.epochs=1"), tmp_path) == 1


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["optim.name=sgd", "optim.momentum=0"], 1),
        (["optim.name=sgd"], 2),
        (["optim.name=adam"], 3),
        (["optim.name=adamw"], 3),
    ],
)
def test_checkpoint_bytes_include_optimizer_state(overrides: list[str], copies: int) -> None:
    assert checkpoint_bytes(1000, config(*overrides).optim) == 1000 * copies


def test_raise_open_files_raises_soft_limit_for_children() -> None:
    program = (
        "import os; from engine.utils.host import raise_open_files_limit; raise_open_files_limit(); "
        "os.system('ulimit -Sn')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512)),
    )
    assert done.stdout == "512\n"


@pytest.mark.nightly
def test_dry_run_warns_about_shared_memory(gputrain: Gputrain) -> None:
    data = ["data.dataset=fake", "data.fake_train=128", "data.fake_val=64", "data.workers=2", "data.prefetch=128"]
    data += ["data.pipeline=stream"]
    script = 'mount -t tmpfs -o size=6m tmpfs /dev/shm && exec "$@"'
    done = gputrain.run_in_mount_namespace(script, "run", "--dry-run", "--epochs", "1", *data)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "shm-full", "warning: /dev/shm ", " 6 MiB ", " 48.7 MiB")
