"""Labels from a CSV file: the forms that are read, the order of the images, and the tables that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.train.data.checks import class_counts, dataset_warnings
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.folder import FolderSource
from engine.train.data.sources.open import open_source, read_class_names
from support.messages import has_problem, raises_problem

NAMES = [f"{name}{number}" for name in ("cat", "dog") for number in range(4)]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the images cat0.png to cat3.png and dog0.png to dog3.png."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "photos").mkdir()
    for number, name in enumerate(NAMES):
        Image.new("RGB", (20, 16), (20 * number, 0, 0)).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path / "photos"


def rows(*labels: str, names: Sequence[str] = NAMES, ending: str = ".png") -> str:
    """Return a line for each image. Behind the last label follows the first one again."""
    return "".join(f"{name}{ending},{labels[number % len(labels)]}\n" for number, name in enumerate(names))


def by_name(label: str = "label") -> str:
    return f"image,{label}\n" + "".join(f"{name}.png,{name[:3]}\n" for name in NAMES)


def open_table(photos: Path, content: str | bytes, *overrides: str, file: str = "labels.csv") -> FolderSource:
    table = photos / file
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = open_source(resolve_config(str(table), ("data.image_size=16", *overrides)).config)
    assert isinstance(source, FolderSource)
    return source


def refusal(photos: Path, content: str | bytes, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        open_table(photos, content, *overrides)
    [problem] = caught.value.problems
    assert str(photos) in problem.reason
    return f"{problem.code}: {problem.message}"


def labels_by_image(source: ImageSource) -> dict[str, object]:
    assert isinstance(source, FolderSource)
    return {
        path: source.labels[part][row].tolist()
        for part, paths in source.paths.items()
        for row, path in enumerate(paths)
    }


@pytest.mark.parametrize(
    "content",
    [
        by_name(),
        by_name().replace(",", ";"),
        by_name().replace(",", "\t").replace("\n", "\r\n"),
        by_name().replace("image", "File Name").replace("label", "breed"),
        by_name().replace(".png", ""),
        b"\xef\xbb\xbf" + by_name().encode(),
        by_name().encode("utf-16"),
        "".join(f"{number - 1 if number else ''},{line}\n" for number, line in enumerate(by_name().splitlines())),
    ],
    ids=["plain", "semicolons", "tabs", "other names", "no extensions", "UTF-8 BOM", "UTF-16", "index of pandas"],
)
def test_csv_source_reads_classes_of_common_tables(photos: Path, content: str | bytes) -> None:
    source = open_table(photos, content)
    assert source.classes == ("cat", "dog")
    assert labels_by_image(source) == {f"{name}.png": int(name.startswith("dog")) for name in NAMES}
    assert (class_counts(source).tolist(), class_counts(source, "val").tolist()) == ([3, 3], [1, 1])
    assert source.skipped == ()


def test_csv_source_has_the_images_of_a_folder_in_its_order(photos: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "folder" / name[:3]).mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / f"{name}.png", tmp_path / "folder" / name[:3])
    folder = open_source(resolve_config(str(tmp_path / "folder"), ("data.image_size=16",)).config)
    lines = by_name().splitlines()
    table = open_table(photos, "\n".join([lines[0], *reversed(lines[1:])]))
    for part in ("train", "val"):
        images, labels = folder.load(part, np.arange(folder.num_images(part)))
        of_table, labels_of_table = table.load(part, np.arange(table.num_images(part)))
        assert (images == of_table).all()
        assert labels.tolist() == labels_of_table.tolist()


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("image,tags\n" + rows("a;b", "", "b"), ("a", "b")),
        ("Image Index,Finding Labels\n" + rows("a|b", "", "b"), ("a", "b")),
        ("image,tags\n" + rows("a b", "", "b"), ("a", "b")),
        ("image,labels\n" + rows("\"['a', 'b']\"", "[]", "['b']"), ("a", "b")),
        ("image,a,note,b\n" + rows("1,x,1", "0,y,0", "0,z,1"), ("a", "b")),
    ],
    ids=["semicolons", "bars", "spaces", "lists of pandas", "a column per label"],
)
def test_csv_source_reads_several_labels(photos: Path, content: str, names: tuple[str, ...]) -> None:
    source = open_table(photos, content, "task.name=multilabel")
    assert source.classes == names
    expected = ([1, 1], [0, 0], [0, 1])
    assert labels_by_image(source) == {f"{name}.png": expected[number % 3] for number, name in enumerate(NAMES)}
    assert source.get_labels("train").dtype == np.uint8
    assert source.num_images("val") == 2
    assert source.skipped == (("column note (not used)",) if "note" in content else ())


def test_csv_source_reads_numbers(photos: Path) -> None:
    content = "image,x,y\n" + rows("1,-2.5", "1e3,0")
    source = open_table(photos, content, "task.name=regression")
    assert source.classes == ("x", "y")
    labels = source.get_labels("train")
    assert (labels.dtype, labels.shape) == (np.float32, (6, 2))
    assert labels_by_image(source)["cat0.png"] == [1, -2.5]
    only_y = open_table(photos, content, "task.name=regression", "data.label_columns=y")
    assert (only_y.classes, only_y.skipped) == (("y",), ("column x (not used)",))


def test_csv_source_takes_no_number_of_a_row_as_target(photos: Path) -> None:
    content = "image,id,y\n" + rows("1,0.5", "2,1.5")
    source = open_table(photos, content, "task.name=regression")
    assert (source.classes, source.skipped) == (("y",), ("column id (not used)",))
    chosen = open_table(photos, content, "task.name=regression", "data.label_columns=id")
    assert (chosen.classes, chosen.skipped) == (("id",), ("column y (not used)",))


def test_csv_source_refuses_several_columns_of_a_class_by_name(photos: Path) -> None:
    message = refusal(photos, "image,x,y\n" + rows("a,b", "b,a"), "data.label_columns=x,y")
    assert "name only one column with data.label_columns" in message


def test_csv_source_takes_parts_of_split_column(photos: Path) -> None:
    parts = ("train", "Validation", "TRAIN", "test")
    content = "split,image,label\n" + "".join(
        f"{parts[number % 4]},{name}.png,{name[:3]}\n" for number, name in enumerate(NAMES)
    )
    source = open_table(photos, content)
    assert source.paths == {
        "train": ["cat0.png", "cat2.png", "dog0.png", "dog2.png"],
        "val": ["cat1.png", "dog1.png"],
        "test": ["cat3.png", "dog3.png"],
    }
    without_val = open_table(photos, content.replace("Validation", "train"), "data.val_split=0.3")
    assert {part: len(paths) for part, paths in without_val.paths.items()} == {"train": 4, "val": 2, "test": 2}


def test_csv_source_finds_files_in_subfolders_and_by_absolute_paths(photos: Path) -> None:
    (photos / "images").mkdir()
    for name in NAMES[1:]:
        (photos / f"{name}.png").rename(photos / "images" / f"{name}.png")
    content = f"id,class\n{photos}/cat0.png,cat\nimages\\cat1.png,cat\n" + rows("dog", names=NAMES[2:], ending="")
    source = open_table(photos, content, "data.val_split=0.2")
    assert set(labels_by_image(source)) == {"cat0.png", *(f"images/{name}.png" for name in NAMES[1:])}


def test_csv_source_skips_missing_and_unreadable_images_and_repeated_lines(photos: Path) -> None:
    (photos / "dog3.png").write_bytes(b"broken")
    content = f"{by_name()}gone.png,cat\ncat0.png,cat\n"
    source = open_table(photos, content, "data.on_bad=skip")
    assert [line.split(" ")[0] for line in source.skipped] == ["gone.png", "line", "dog3.png"]
    assert len(labels_by_image(source)) == 7


def test_csv_source_warns_of_labels_that_no_validation_image_has(photos: Path) -> None:
    content = "image,tags,split\n" + rows("a;b,train", "b,train", "a,train", ",val")
    table = photos / "labels.csv"
    table.write_text(content)
    config = resolve_config(str(table), ["task.name=multilabel", "data.image_size=16"]).config
    warnings = dataset_warnings(config, open_source(config))
    assert has_problem(warnings, "empty-class", "data", "2 classes have no validation image", "a, b")


def test_csv_source_warns_of_label_without_image(photos: Path) -> None:
    overrides = ("data.image_size=16", "task.name=multilabel")
    source = open_table(photos, "image,a,b\n" + rows("1,0", "0,0"), *overrides)
    config = resolve_config(str(photos / "labels.csv"), overrides).config
    assert has_problem(dataset_warnings(config, source), "empty-class", None, ": b")


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        ("", "wrong-format", ("no columns",)),
        ("image,label\n", "wrong-format", ("no rows",)),
        (rows("cat", "dog"), "wrong-format", ("image,label",)),
        ("image,label\ncat0.png,cat,1\n", "wrong-format", ("line 2", " 3", " 2")),
        ('image,label\n"cat0.png,cat\n', "wrong-format", ("quotes",)),
        ("image,image\ncat0.png,cat\n", "wrong-format", ("name image",)),
        (b"image,label\ncat0.png,caf\xe9\n", "wrong-format", ("line 2", "UTF-8")),
        (b"PK\0\0", "wrong-format", ("text file",)),
    ],
    ids=["empty", "no rows", "no header", "cells", "quote", "names", "latin-1", "Excel"],
)
def test_csv_source_refuses_files_that_are_no_table(
    photos: Path, content: str | bytes, code: str, values: Sequence[str]
) -> None:
    message = refusal(photos, content)
    assert message.startswith(f"{code}: ")
    assert all(value in message for value in values), message


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        (f"{by_name()}gone.png,cat\nlost.png,dog\n", "not-found", ("lines 10, 11", "2 of 10", "gone.png, lost.png")),
        ("photo,label\n" + rows("cat", "dog", ending=".jpg"), "not-found", ("8 of 8", "cat0.jpg")),
        ("what,label\n" + rows("cat", "dog", ending=".jpg"), "not-found", ("what, label", "column image")),
        (f"{by_name()}../secret.png,cat\n", "not-supported", ("line 10", "../secret.png is outside")),
        (f"{by_name()}/etc/secret.png,cat\n", "not-supported", ("line 10", "/etc/secret.png is outside")),
        (f"{by_name()}cat0.png,dog\n", "conflict", ("lines 2, 10", "cat0.png", "labels")),
        ("image,label,split\n" + rows("a,train", "b,later"), "bad-label", ("lines 3, 5, 7 and 1 more", "later")),
        ("image,label,split\n" + rows("a,val", "b,test"), "no-images", ("split is train in no line",)),
    ],
    ids=["few missing", "all missing", "no images", "parent", "absolute", "duplicate", "split", "no training"],
)
def test_csv_source_refuses_images(photos: Path, content: str, code: str, values: Sequence[str]) -> None:
    message = refusal(photos, content)
    assert message.startswith(f"{code}: ")
    assert all(value in message for value in values), message


def test_csv_source_refuses_name_of_several_files(photos: Path) -> None:
    for folder in ("a", "b"):
        (photos / folder).mkdir()
        shutil.copy(photos / "cat0.png", photos / folder / "x.png")
    message = refusal(photos, f"{by_name()}x,cat\n")
    assert message.startswith("ambiguous-name: ")
    assert "line 10: x may be a/x.png, b/x.png" in message


@pytest.mark.parametrize(
    ("content", "task", "values"),
    [
        (by_name().replace("cat0.png,cat", "cat0.png,"), "classification", ("line 2", "empty")),
        (by_name().replace("cat0.png,cat", "cat0.png,NaN"), "classification", ("line 2", "NaN")),
        ("image,label\n" + rows("cat;dog", "cat"), "classification", ("line", "--task multilabel")),
        ("image,label\n" + rows("0.5", "1.5"), "classification", ("0.5", "--task regression")),
        ("image,label\n" + rows(*"12345678"), "classification", ("--task regression",)),
        ("image,x,y\n" + rows("1,0", "0,1"), "classification", ("x, y", "label_columns", "--task multilabel")),
        ("image,label,split\n" + rows("a,train", "b,train") + "dog3.jpg,c,val", "classification", ("line 10", "'c'")),
    ],
    ids=["empty", "NaN", "several", "float", "ids", "columns", "unknown"],
)
def test_csv_source_refuses_classes(photos: Path, content: str, task: str, values: Sequence[str]) -> None:
    message = refusal(photos, content, f"task.name={task}")
    assert all(value in message for value in values), message


@pytest.mark.parametrize(
    ("content", "task", "values"),
    [
        ("image,x\n" + rows("1", ""), "regression", ("lines 3, 5, 7 and 1 more", "x is empty", "add the number")),
        ("image,x\n" + rows("1", "nan"), "regression", ("x is 'nan'", "add the number")),
        ("image,x\n" + rows("1", '"1,5"'), "regression", ("x is '1,5'", "decimal point")),
        ("image,x\n" + rows("1", "1e99"), "regression", ("x is '1e99'",)),
        ("image,x,y\n" + rows("1,low", "2,high"), "regression", ("y is 'low'", "data.label_columns")),
        ("image,x,y\n" + rows("1,0", "0,2"), "multilabel", ("y is '2'", "data.label_columns")),
        ("image,cat\n" + rows("1", "0"), "multilabel", ("cat", "0 and 1", "--task classification")),
        ("image,tags,split\n" + rows("a;b,train", "a;c,val"), "multilabel", ("lines 3, 5", "'c'")),
    ],
    ids=["empty", "NaN", "comma", "large", "text", "not binary", "one column", "unknown"],
)
def test_csv_source_refuses_labels_and_numbers(photos: Path, content: str, task: str, values: Sequence[str]) -> None:
    message = refusal(photos, content, f"task.name={task}")
    assert all(value in message for value in values), message


def test_csv_source_refuses_unknown_label_column(photos: Path) -> None:
    with raises_problem("not-found", "data.label_columns", "breed", "image, label"):
        open_table(photos, by_name(), "data.label_columns=breed")


def test_class_names_of_csv_need_no_image(photos: Path) -> None:
    open_table(photos, by_name())
    for name in NAMES:
        (photos / f"{name}.png").unlink()
    assert read_class_names(resolve_config(str(photos / "labels.csv")).config) == ("cat", "dog")
