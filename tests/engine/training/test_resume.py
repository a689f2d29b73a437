"""A checkpoint is compared with the config and the data that its run resumes with."""

from __future__ import annotations

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.distributed import HashStore

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.data.sources.open import open_source
from engine.distributed.rank_env import RankInfo
from engine.runs.folder import RunFolder
from engine.training.checkpoint import load_checkpoint
from engine.training.resume import compare_with_checkpoint, load_for_resume
from engine.utils.errors import UsageError
from support.data.photo_folder import write_photo_folder
from support.runs.in_process import single_rank_trainer, train_in_process

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


def refusal(checkpoint: dict[str, Any], photos: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as refused:
        compare_with_checkpoint(checkpoint, *reopened(photos, *overrides))
    return str(refused.value)


def test_compare_reports_nothing_if_nothing_changed(trained: Path, checkpoint: dict[str, Any]) -> None:
    assert compare_with_checkpoint(checkpoint, *reopened(trained / "photos")) == []


def test_compare_reports_moved_data(trained: Path, checkpoint: dict[str, Any], photos: Path) -> None:
    assert compare_with_checkpoint(checkpoint, *reopened(photos)) == [
        f"data.path changed from {trained}/photos to {photos} since the checkpoint"
    ]


def test_compare_refuses_changed_seed_without_mentioning_the_split(checkpoint: dict[str, Any], photos: Path) -> None:
    assert refusal(checkpoint, photos, "run.seed=5") == (
        "run.seed: cannot change when a run is resumed: it began with 0, not 5; set run.seed to 0 again, or use a new "
        "name with --name to start a new run"
    )


def test_compare_refuses_renamed_image(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    assert refusal(checkpoint, photos) == (
        "data.path: the data has changed since the checkpoint: the training images have other names; restore the data, "
        "or use a new name with --name to start a new run"
    )


def test_compare_refuses_another_number_of_images(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "dog" / "0.png").write_bytes(b"")
    message = refusal(checkpoint, photos)
    assert "it has 3 validation images instead of 4 (skipped: dog/0.png (not an image))" in message


def test_compare_refuses_image_moved_to_another_class(checkpoint: dict[str, Any], photos: Path) -> None:
    _, source = reopened(photos)
    relabeled = source.labels["train"][::-1]  # type: ignore[attr-defined]
    source.labels["train"] = relabeled  # type: ignore[attr-defined]
    config, _ = reopened(photos)
    with pytest.raises(UsageError, match="the training images have other labels"):
        compare_with_checkpoint(checkpoint, config, source)


def test_compare_refuses_other_classes(checkpoint: dict[str, Any], photos: Path) -> None:
    (photos / "dog").rename(photos / "wolf")
    assert "its classes differ (new wolf, missing dog)" in refusal(checkpoint, photos)


def test_compare_refuses_other_image_size(checkpoint: dict[str, Any], photos: Path) -> None:
    checkpoint["image_format"]["size"] = 32
    assert "its images are 3x16x16 instead of 3x32x32" in refusal(checkpoint, photos)


def test_compare_refuses_other_evaluation(checkpoint: dict[str, Any], photos: Path) -> None:
    assert "data.val_resize: cannot change when a run is resumed" in refusal(checkpoint, photos, "data.val_resize=20")
    checkpoint["image_format"] |= {"val_resize": 20, "interpolation": "bicubic"}
    assert "the evaluation uses 16 bilinear instead of resize 20 crop 16 bicubic" in refusal(checkpoint, photos)


def test_compare_accepts_checkpoint_of_earlier_version(checkpoint: dict[str, Any], photos: Path) -> None:
    saved = checkpoint["image_format"]
    checkpoint["image_format"] = {key: saved[key] for key in ("size", "channels", "mean", "std")}
    assert len(compare_with_checkpoint(checkpoint, *reopened(photos))) == 1


def test_compare_reports_reencoded_images(checkpoint: dict[str, Any], photos: Path) -> None:
    for path in photos.rglob("*.png"):
        Image.open(path).save(path, dpi=(300, 300))
    assert compare_with_checkpoint(checkpoint, *reopened(photos))[1:] == [
        "the files of the training and validation images have other sizes than at the checkpoint"
    ]


def test_compare_without_fingerprint_reports_number_of_images(checkpoint: dict[str, Any], photos: Path) -> None:
    del checkpoint["data"]
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    assert len(compare_with_checkpoint(checkpoint, *reopened(photos))) == 1
    (photos / "cat" / "8.png").unlink()
    assert compare_with_checkpoint(checkpoint, *reopened(photos))[1:] == [
        "the data has changed: it had 12 training and 4 validation images, and now has 12 and 3"
    ]


def test_load_for_resume_refuses_on_all_ranks_data_of_one_host(
    trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    store, folders = HashStore(), [trained / "photos", photos]

    def resume(rank: int) -> str:
        with pytest.raises(UsageError) as refused:
            load_for_resume(RunFolder(trained / "run"), *reopened(folders[rank]), RankInfo(rank, 2, rank, 2), store)
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(resume, range(2)))
    assert messages[0] == messages[1]
    assert "the training images have other names (on second)" in messages[0]


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


def test_resumed_training_keeps_no_page_of_the_checkpoint_file(trained: Path) -> None:
    path = trained / "run" / "checkpoints" / "last.pt"
    overrides = [*TRAINING, f"data.path={trained / 'photos'}", "optim.momentum=0.9"]
    with single_rank_trainer(*overrides, checkpoint=path) as trainer:
        assert trainer.state.optimizer.state
        gc.collect()
        assert str(path.parent) not in Path("/proc/self/maps").read_text()
