"""`gputrain data pack` in a shell: output and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.data.found_folders import write_roboflow
from support.data.packed_photos import NUM_PHOTOS, write_photos
from support.messages import says
from tui.cli import data
from tui.cli.main import app


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos")


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], prog_name="gputrain")
    return result.exit_code, result.stdout, result.stderr


def test_pack_prints_progress_and_summary(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(data, "show_progress", shown.append)
    monkeypatch.setattr(data, "SHOWN_EVERY", 1)
    code, out, err = invoke("pack", photos, "-o", tmp_path / "shards", "--max-side", 40)
    assert code == 0
    assert err.splitlines() == [
        "Checking the image files",
        f"train on it: gputrain run --data-path {tmp_path / 'shards'}",
    ]
    assert out.startswith(f"{tmp_path / 'shards'}: {NUM_PHOTOS} images, 2 classes, ")
    assert f"{NUM_PHOTOS}/{NUM_PHOTOS} images" in shown and shown[-1] == ""


def test_pack_prints_json_summary(photos: Path, tmp_path: Path) -> None:
    code, out, _ = invoke("pack", photos, "-o", tmp_path / "shards", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["images"] == {"train": NUM_PHOTOS, "val": 0}
    assert summary["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "shards").iterdir())


def test_pack_names_repeated_images_and_leaves_out_test_images(tmp_path: Path) -> None:
    code, out, err = invoke("pack", write_roboflow(tmp_path / "photos"), "-o", tmp_path / "shards")
    assert code == 0 and "24 training images, 10 for validation" in out
    assert says(err, "images-repeated", "warning: FOLDER: ", "2 of 10 (valid/cat/copy0.jpg, ")
    assert "skipped: the test images (" in err


@pytest.mark.parametrize(
    ("arguments", "code", "location", "value"),
    [
        (["pack"], "missing-value", "FOLDER", "`gputrain data pack ~/photos -o shards`"),
        (["pack", "photos"], "missing-value", "--output", "photos -o DIR"),
        (["pack", "/nowhere", "-o", "/tmp/shards"], "not-found", "FOLDER", "/nowhere"),
        (["pack", "labels.csv", "-o", "/tmp/shards"], "not-supported", "FOLDER", "labels.csv"),
    ],
)
def test_invalid_arguments_are_one_sentence(arguments: list[str], code: str, location: str, value: str) -> None:
    exit_code, _, err = invoke(*arguments)
    assert exit_code == 2
    (line,) = [line for line in err.splitlines() if line != "Checking the image files"]
    assert line.startswith(f"error: {location}: ")
    assert says(line, code, value)
