"""`gputrain data pack` in a shell: output, refusals, and the end by a signal."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.data.pack.writer import PackProgress
from support.data.found_folders import write_roboflow
from support.data.packed_photos import NUM_PHOTOS, pack_photos, write_photos
from support.messages import says
from tui.cli import pack
from tui.cli.main import app


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos")


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], prog_name="gputrain")
    return result.exit_code, result.stdout, result.stderr


def test_pack_prints_summary(photos: Path, tmp_path: Path) -> None:
    code, out, err = invoke("pack", photos, "-o", tmp_path / "a.gpk", "--max-side", 40)
    assert code == 0
    assert err.splitlines() == [
        "Checking the image files",
        f"train on it: gputrain run --dataset packed --data-path {tmp_path / 'a.gpk'}",
    ]
    assert out.startswith(f"{tmp_path / 'a.gpk'}: {NUM_PHOTOS} images, 2 classes, ")


def test_pack_prints_json_summary(photos: Path, tmp_path: Path) -> None:
    code, out, _ = invoke("pack", photos, "-o", tmp_path / "a.gpk", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["images"] == {"train": NUM_PHOTOS, "val": 0}
    assert summary["size_bytes"] == (tmp_path / "a.gpk").stat().st_size


def test_pack_names_repeated_images_and_leaves_out_test_images(tmp_path: Path) -> None:
    code, out, err = invoke("pack", write_roboflow(tmp_path / "photos"), "-o", tmp_path / "a.gpk")
    assert code == 0 and "24 training images, 10 for validation" in out
    assert says(err, "images-repeated", "warning: FOLDER: ", "2 of 10 (valid/cat/copy0.jpg, ")
    assert "skipped: the test images (" in err


def test_dry_run_writes_nothing(photos: Path, tmp_path: Path) -> None:
    code, out, _ = invoke("pack", photos, "-o", tmp_path / "a.gpk", "--quality", 80, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["expected_bytes"] > NUM_PHOTOS * 500
    assert list(tmp_path.iterdir()) == []


def test_verify_lists_damaged_names_and_exits_with_one(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "cat" / "\x1b[31m.png").write_bytes((photos / "cat" / "0.png").read_bytes())
    pack_photos(photos, tmp_path / "a.gpk")
    assert invoke("verify", tmp_path / "a.gpk")[0] == 0
    content = (photos / "cat" / "0.png").read_bytes()
    (tmp_path / "a.gpk").write_bytes((tmp_path / "a.gpk").read_bytes().replace(content, content[:-1] + b"x"))
    code, out, err = invoke("verify", tmp_path / "a.gpk")
    assert (code, out) == (1, "")
    assert says(err, "bad-image", "cat/0.png (image 1)")
    assert "\\x1b[31m.png (image" in err
    assert "\x1b" not in err
    assert "2 images of 25 damaged" in err


@pytest.mark.parametrize(
    ("position", "code"),
    [(3, "wrong-format"), (8, "wrong-version"), (20, "damaged"), (-2, "damaged"), (None, "damaged")],
)
def test_verify_of_damaged_header_index_or_length_exits_with_one(
    packed: bytes, tmp_path: Path, position: int | None, code: str
) -> None:
    content = bytearray(packed)
    if position is None:
        content.append(0)
    else:
        content[position] ^= 1
    (tmp_path / "a.gpk").write_bytes(content)
    exit_code, out, err = invoke("verify", tmp_path / "a.gpk", "--json")
    assert (exit_code, json.loads(out)["images"], len(json.loads(out)["damaged"])) == (1, None, 1)
    assert says(err, code, "error: ", tmp_path / "a.gpk")


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of a packed set."""
    path = tmp_path_factory.mktemp("packed") / "a.gpk"
    pack_photos(photos, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "location", "value"),
    [
        (["pack"], "missing-value", "FOLDER", "`gputrain data pack ~/photos -o photos.gpk`"),
        (["pack", "photos"], "missing-value", "--output", "photos -o FILE"),
        (["pack", "/nowhere", "-o", "/tmp/a.gpk"], "not-found", "FOLDER", "/nowhere"),
        (["verify"], "missing-value", "FILE", "`gputrain data verify photos.gpk`"),
        (["verify", "/nowhere"], "not-readable", "FILE", "/nowhere"),
    ],
)
def test_invalid_arguments_are_one_sentence(arguments: list[str], code: str, location: str, value: str) -> None:
    exit_code, _, err = invoke(*arguments)
    assert exit_code == 2
    (line,) = [line for line in err.splitlines() if line != "Checking the image files"]
    assert line.startswith(f"error: {location}: ")
    assert says(line, code, value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_pack_with_sentence_and_it_continues(
    number: signal.Signals, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(progress: PackProgress) -> None:
        if progress.done == 9:
            signal.raise_signal(number)

    arguments = ("pack", photos, "-o", tmp_path / "a.gpk", "--max-side", 40)
    with monkeypatch.context() as patch:
        patch.setattr(pack._Progress, "show_pack", lambda _, progress: show(progress))
        code, out, err = invoke(*arguments)
    assert (code, out) == (3, "")
    assert f"9 of 24 images of {tmp_path / 'a.gpk'} are packed; run the same command again, which continues" in err
    assert json.loads(invoke(*arguments, "--json")[1])["kept"] == 9
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_scan_and_pack_show_progress(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PLAIN_SECONDS", 0.0)
    code, _, err = invoke("pack", photos, "-o", tmp_path / "a.gpk")
    assert code == 0
    lines = re.sub(r"  [\d,]+ images/s.*", "", err).splitlines()
    assert lines[0] == "Checking the image files"
    assert "2/2 class folders" in lines
    assert f"{NUM_PHOTOS}/{NUM_PHOTOS} images" in lines
