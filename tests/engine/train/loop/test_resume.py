"""A checkpoint is compared with the config and the data that its run resumes with."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.distributed import HashStore

from engine.base.errors import Problem, UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict
from engine.runs.folder import RunFolder
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.open import open_source
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.resume import compare_with_checkpoint, describe_lr_rise, load_for_resume
from support.data.photo_folder import write_photo_folder
from support.messages import has_problem, raises_problem
from support.runs.in_process import train_in_process

TRAINING = ["device.gpus=cpu", "data.dataset=folder", "data.image_size=16", "data.batch_size=4", "model.name=linear"]
TRAINING += ["run.epochs=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`, and with `run`, which was trained on them."""
    folder = tmp_path_factory.mktemp("trained")
    train_in_process(folder / "run", *TRAINING, f"data.path={write_photo_folder(folder / 'photos')}")
    return folder


@pytest.fixture
def photos(trained: Path, tmp_path: Path) -> Path:
    """A copy of the photos, which a test may change."""
    return Path(shutil.copytree(trained / "photos", tmp_path / "photos"))


@pytest.fixture
def checkpoint(trained: Path) -> dict[str, Any]:
    return load_checkpoint(trained / "run" / "checkpoints" / "last.pt")


def reopened(photos: Path, *overrides: str) -> tuple[Config, ImageSource]:
    config = resolve_config("digits", [*TRAINING, f"data.path={photos}", *overrides]).config
    return config, open_source(config)


def refusal(checkpoint: dict[str, Any], photos: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(UsageError) as refused:
        compare_with_checkpoint(checkpoint, *reopened(photos, *overrides))
    return refused.value.problems


def test_compare_refuses_changed_seed_without_mentioning_the_split(checkpoint: dict[str, Any], photos: Path) -> None:
    [problem] = refusal(checkpoint, photos, "run.seed=5")
    assert problem.location == "run.seed"
    assert all(value in str(problem) for value in (" 0", " 5", "run.seed", "--name"))


def test_compare_refuses_renamed_image(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    assert has_problem(refusal(checkpoint, photos), "data-changed", "data.path", "training", "names", "--name")


def test_compare_refuses_another_number_of_images(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "dog" / "0.png").write_bytes(b"")
    problems = refusal(checkpoint, photos)
    assert has_problem(problems, "data-changed", "data.path", "3 validation images", " 4 ", "dog/0.png")


def test_compare_refuses_image_moved_to_another_class(checkpoint: dict[str, Any], photos: Path) -> None:
    _, source = reopened(photos)
    relabeled = source.labels["train"][::-1]  # type: ignore[attr-defined]
    source.labels["train"] = relabeled  # type: ignore[attr-defined]
    config, _ = reopened(photos)
    with raises_problem("data-changed", "data.path", "labels"):
        compare_with_checkpoint(checkpoint, config, source)


def test_compare_refuses_other_classes(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "dog").rename(photos / "wolf")
    assert has_problem(refusal(checkpoint, photos), "data-changed", "data.path", "(new wolf, missing dog)")


def test_compare_refuses_other_evaluation(checkpoint: dict[str, Any], photos: Path) -> None:
    assert [problem.location for problem in refusal(checkpoint, photos, "data.val_resize=20")] == ["data.val_resize"]
    checkpoint["image_format"] |= {"val_resize": 20, "interpolation": "bicubic"}
    problems = refusal(checkpoint, photos)
    assert has_problem(problems, "data-changed", "data.path", "16 bilinear", "resize 20 crop 16 bicubic")


def test_compare_reports_reencoded_images(checkpoint: dict[str, Any], photos: Path) -> None:
    for path in photos.rglob("*.png"):
        Image.open(path).save(path, dpi=(300, 300))
    moved, warning = compare_with_checkpoint(checkpoint, *reopened(photos))
    assert has_problem([warning], "data-changed", "", "training and validation")
    for stored in checkpoint["fingerprints"].values():
        stored |= {"names": "", "labels": "", "sizes": ""}
    assert compare_with_checkpoint(checkpoint, *reopened(photos)) == [moved]


def test_load_for_resume_refuses_on_all_ranks_data_of_one_host(
    trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    store, folders = HashStore(), [trained / "photos", photos]

    def resume(rank: int) -> list[Problem]:
        with pytest.raises(UsageError) as refused:
            load_for_resume(RunFolder(trained / "run"), *reopened(folders[rank]), RankInfo(rank, 2, rank, 2), store)
        return refused.value.problems

    with ThreadPoolExecutor(2) as pool:
        problems = list(pool.map(resume, range(2)))
    assert problems[0] == problems[1]
    assert has_problem(problems[0], "data-changed", "data.path", "training", "names", "(on second)")


COSINE = {"run.epochs": "8", "optim.lr": "0.05", "schedule.by": "epoch", "schedule.warmup_epochs": "0"}


def cosine(*changes: str) -> Config:
    """Return a config whose cosine spans 8 epochs, with changes."""
    values = COSINE | dict(change.split("=") for change in changes)
    return resolve_config("digits", [f"{key}={value}" for key, value in values.items()]).config


@pytest.mark.parametrize(
    ("changes", "step", "is_named"),
    [
        (["run.epochs=16"], 352, True),
        (["run.epochs=16"], 176, True),
        # The advice.
        (["run.epochs=16", "optim.lr=0.00381"], 352, False),
        (["run.epochs=16", "schedule.name=constant"], 352, False),
        ([], 176, False),
        (["run.epochs=6"], 176, False),
        (["run.epochs=16"], 0, False),
    ],
)
def test_describe_lr_rise_names_both_rates_and_the_key(changes: list[str], step: int, *, is_named: bool) -> None:
    found = describe_lr_rise(as_dict(cosine()), cosine(*changes), step, 44, 1)
    assert len(found) == is_named
    if step == 352 and found:
        assert has_problem(found, "resume-differs", "", " 0.0019 ", " 0.025,", "optim.lr=0.00381")


def test_load_for_resume_loads_the_same_checkpoint_on_all_ranks(trained: Path) -> None:
    store = HashStore()

    def resume(rank: int) -> int:
        rank_info = RankInfo(rank, 2, rank, 2)
        state, notes = load_for_resume(RunFolder(trained / "run"), *reopened(trained / "photos"), rank_info, store)
        assert state is not None
        assert notes == []
        return int(state["step"])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(resume, range(2))) == [3, 3]
