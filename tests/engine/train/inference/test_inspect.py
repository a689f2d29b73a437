"""Inspection of the single images of a run, and when the stored one is used again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.yaml_io import to_yaml
from engine.runs.folder import RunFolder
from engine.runs.inspection import Inspection, write_inspection
from engine.train.data.sources.open import open_source
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.inspect import inspect_checkpoint
from engine.train.inference.preview import load_preview
from engine.train.inference.stored_inspection import InspectionRequest, _has_same_files, checkpoint_digest, find_stored
from engine.train.inference.trained_model import read_trained_checkpoint
from support.data.packed_photos import pack_photos
from support.data.photo_folder import write_photo_folder
from support.runs.inspections import make_inspection
from support.runs.trained_run import DIGITS, call, saved_run

ALL_LISTS = ("--list", "mistakes", "--list", "uncertain", "--list", "label-issues")


def inspect(run: RunFolder, *overrides: str, part: Any = "val") -> Inspection:
    request = InspectionRequest("", False, overrides, part)
    return inspect_checkpoint(run, read_trained_checkpoint(run), request, "cpu")


def folder_run(tmp_path: Path, **config: Any) -> RunFolder:
    photos = write_photo_folder(tmp_path / "photos")
    # Threads of torch run in the process of the tests, so no loader can be forked.
    data = {"dataset": "folder", "path": str(photos), "image_size": 8, "batch_size": 3, "workers": 0}
    data |= config.pop("data", {})
    run = saved_run(tmp_path / "runs" / "photos", data=data, **config)
    run.config.write_text(to_yaml({"data": data}))
    return run


def test_inspection_agrees_with_evaluation(run: RunFolder) -> None:
    inspection = inspect(run, part="all")
    evaluation = evaluate_checkpoint(read_trained_checkpoint(run), part="all", device="cpu").evaluation
    assert len(inspection) == evaluation.metrics.images == 1797
    counts = np.zeros((10, 10), int)
    np.add.at(counts, (inspection.columns["label"], inspection.columns["predicted"]), 1)
    assert counts.tolist() == evaluation.confusion
    assert inspection.columns["loss"].mean() == pytest.approx(evaluation.metrics.loss, rel=1e-5)
    assert np.allclose(
        inspection.columns["loss"], -np.log(inspection.columns["label_probability"]), rtol=1e-3, atol=1e-5
    )
    assert (inspection.columns["second"] != inspection.columns["predicted"]).all()
    assert inspection.info.epoch is not None and inspection.info.stale_reason([inspection.info.epoch]) is None


def test_inspection_keeps_pictures_of_datasets_without_files(run: RunFolder) -> None:
    inspection = inspect(run)
    source = open_source(DIGITS)
    worst = inspection.images(inspection.ranked("mistakes", limit=3))
    for image in worst:
        pixels, labels = source.load("val", np.array([image.index]))
        assert np.array_equal(np.asarray(load_preview(run, inspection, image)), pixels[0, 0])
        assert labels[0] == image.label


def test_inspection_of_shards_has_names_and_pictures(tmp_path: Path) -> None:
    pack_photos(write_photo_folder(tmp_path / "unpacked"), tmp_path / "shards")
    run = folder_run(tmp_path, data={"dataset": "webdataset", "path": str(tmp_path / "shards")})
    inspection = inspect(run, part="all")
    assert {image.path for image in inspection.images(range(16))} == {
        f"train-00000.tar/{name}/{8 * label + number:07d}-{number}.png"
        for label, name in enumerate(("cat", "dog"))
        for number in range(8)
    }
    assert inspection.info.root is None
    assert load_preview(run, inspection, inspection.image(0)).size == (8, 8)
    assert _has_same_files(inspection.info)


def test_results_belong_to_their_files_when_others_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_run(tmp_path, data={"on_bad": "skip"})
    before = inspect(run, part="all")
    broken = Path(str(before.info.root), before.image(1).name)
    broken.write_bytes(b"x" * broken.stat().st_size)
    # As if the file broke after the scan of the folder.
    monkeypatch.setattr("engine.train.data.sources.folder._check_image", lambda path: 0)
    after = inspect(run, part="all")
    assert (len(before), len(after), after.info.unread_count) == (16, 15, 1)
    by_path = {image.path: image.loss for image in before.images(range(16))}
    assert all(by_path[image.path] == pytest.approx(image.loss) for image in after.images(range(15)))
    assert broken.name in after.info.unread[0]


def test_stored_inspection_is_used_while_checkpoint_and_images_are_the_same(tmp_path: Path) -> None:
    run = folder_run(tmp_path)
    digest = checkpoint_digest(run.checkpoints / "best.pt")
    request = InspectionRequest(digest, part="all")
    write_inspection(run, inspect_checkpoint(run, read_trained_checkpoint(run), request, "cpu"))
    assert find_stored(run, request) is not None
    assert find_stored(run, InspectionRequest(digest, part="val")) is not None
    assert find_stored(run, InspectionRequest("0" * 64, part="val")) is None
    assert find_stored(run, InspectionRequest(digest, raw=True)) is None
    assert find_stored(run, InspectionRequest(digest, overrides=("data.path=/other",))) is None
    photo = next((tmp_path / "photos" / "cat").iterdir())
    photo.rename(tmp_path / "photos" / "dog" / "moved.png")
    assert find_stored(run, request) is None


def test_stored_inspection_runs_no_code(tmp_path: Path, run: RunFolder) -> None:
    """The inspection of another user's run claims to be of a folder, and names code."""
    (tmp_path / "hostile.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    info = {"data": {"dataset": "hostile:dataset"}, "part": "val"}
    written = make_inspection([[0.9, 0.1, 0.0]], [0], info=info)
    write_inspection(run, written)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert find_stored(run, InspectionRequest(written.info.digest)) is None
    assert not (tmp_path / "hostile.ran").exists()


def test_evaluate_list_evaluates_once(tmp_path: Path) -> None:
    run = folder_run(tmp_path)
    first = call("evaluate", run.path, "--split", "all", *ALL_LISTS, "--json")
    assert first.exit_code == 0, first.output
    values = json.loads(first.stdout)
    assert (values["images"], list(values["lists"])) == (16, ["mistakes", "uncertain", "label-issues"])
    worst = values["lists"]["mistakes"][0]
    assert Path(worst["path"]).is_file() and {worst["label"], worst["predicted"]} == {"cat", "dog"}
    written = run.inspection.stat().st_mtime_ns
    table = call("evaluate", run.path, "--split", "all", "--list", "mistakes", "-n", "1")
    assert table.exit_code == 0 and run.inspection.stat().st_mtime_ns == written
    lines = table.stdout.splitlines()
    assert lines[1].startswith("16 images, ") and lines[3] == "Most confident mistakes"
    assert lines[5].split()[:3] == [f"{worst['label']}/{Path(worst['path']).name}", worst["label"], worst["predicted"]]
    assert len(lines) == 6
    assert (
        call("evaluate", run.path, "--list", "uncertain", "--again").exit_code == 0
        and run.inspection.stat().st_mtime_ns != written
    )
