"""Which subfolders of an image folder are splits and classes; each refusal goes away with what it advises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.base.errors import Problem, UsageError
from engine.train.data.sources.folder_layout import FolderLayout, find_layout
from support.messages import has_problem


def make_folders(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).mkdir(parents=True)
    return root


def layout_of(root: Path, *paths: str) -> FolderLayout:
    return find_layout(make_folders(root, *paths))


def refusal(root: Path) -> Problem:
    with pytest.raises(UsageError) as caught:
        find_layout(root)
    [problem] = caught.value.problems
    return problem


def names(layout: FolderLayout) -> dict[str, str]:
    return {part: folder.name for part, folder in layout.parts.items()}


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        (("train/a", "train/b"), {"train": "train"}),
        (("train/a", "train/b", "valid/a"), {"train": "train", "val": "valid"}),
        (("train/a", "train/b", "val/b", "test/a"), {"train": "train", "val": "val", "test": "test"}),
        (("Training/a", "Training/b", "Testing/a"), {"train": "Training", "test": "Testing"}),
        (("TRAIN/a", "TRAIN/b", "validation/a"), {"train": "TRAIN", "val": "validation"}),
    ],
)
def test_layout_finds_splits_by_their_usual_names(
    tmp_path: Path, folders: Sequence[str], parts: dict[str, str]
) -> None:
    layout = layout_of(tmp_path, *folders)
    assert (names(layout), layout.classes, layout.ignored) == (parts, ("a", "b"), ())


@pytest.mark.parametrize(
    ("folders", "ignored"),
    [
        (("a", "b", "__MACOSX/a", "lost+found", "@eaDir/a", ".hidden"), ["@eaDir", "__MACOSX", "lost+found"]),
        (("train/a", "train/b", "train/#recycle", "val/a"), ["train/#recycle"]),
        (("train/a", "train/b", "val/a", "val/@eaDir"), ["val/@eaDir"]),
        (("train/a", "train/b", "val/a", "labels"), ["labels"]),
        (("train/a", "train/b", "test"), ["test"]),
        (("train/a", "train/b", "test/a", "test/c"), ["test"]),
    ],
)
def test_layout_names_folders_that_are_not_used(tmp_path: Path, folders: Sequence[str], ignored: list[str]) -> None:
    layout = layout_of(tmp_path, *folders)
    assert layout.classes == ("a", "b") and "test" not in layout.parts
    assert [name.partition(" (")[0] for name in layout.ignored] == ignored


def test_layout_follows_links_except_to_folder_that_contains_them(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "data", "a")
    make_folders(tmp_path / "elsewhere", "b")
    (root / "b").symlink_to(tmp_path / "elsewhere" / "b")
    (root / "self").symlink_to(root)
    (root / "up").symlink_to("..")
    layout = find_layout(root)
    assert layout.classes == ("a", "b")
    assert [name.partition(" (")[0] for name in layout.ignored] == ["self", "up"]


def test_layout_takes_folder_named_like_a_split_for_a_class(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, "plane", "train")
    assert (names(layout), layout.classes) == ({"train": tmp_path.name}, ("plane", "train"))


def test_layout_refuses_train_with_subfolders_beside_classes(tmp_path: Path) -> None:
    problem = refusal(make_folders(tmp_path, "plane", "train/steam", "train/diesel"))
    assert has_problem([problem], "ambiguous-name", "data.path", "plane", f"data.path to {tmp_path / 'train'}")
    assert find_layout(tmp_path / "train").classes == ("diesel", "steam")
    (tmp_path / "train").rename(tmp_path / "trains")
    assert find_layout(tmp_path).classes == ("plane", "trains")


def test_layout_refuses_two_folders_of_one_split(tmp_path: Path) -> None:
    problem = refusal(make_folders(tmp_path / "data", "train/a", "train/b", "val/a", "valid/a"))
    assert has_problem([problem], "ambiguous-name", "data.path", " val and valid, ", "elsewhere")
    (tmp_path / "data" / "valid").rename(tmp_path / "valid")
    assert names(find_layout(tmp_path / "data")) == {"train": "train", "val": "val"}


@pytest.mark.parametrize("folders", [("train", "val"), ("valid/a", "valid/b", "test/a")])
def test_layout_refuses_splits_without_class_folders(tmp_path: Path, folders: Sequence[str]) -> None:
    problem = refusal(make_folders(tmp_path, *folders))
    assert has_problem([problem], "wrong-format", "data.path", f"{tmp_path} ", "train/CLASS")
    make_folders(tmp_path, "train/x", "train/y")
    assert find_layout(tmp_path).classes == ("x", "y")


def test_layout_of_single_folder_names_the_one_below(tmp_path: Path) -> None:
    problem = refusal(make_folders(tmp_path, "photos/a", "photos/b"))
    assert has_problem([problem], "too-few-classes", "data.path", f"data.path to {tmp_path / 'photos'} ")
    assert find_layout(tmp_path / "photos").classes == ("a", "b")


@pytest.mark.parametrize(
    ("paths", "labels", "advice"),
    [
        (("train/images/a.jpg", "train/labels/a.txt"), "labels", "gputrain run -- "),
        (("Annotations/a.xml", "ImageSets/Main/train.txt", "JPEGImages/a.jpg"), "Annotations", "gputrain run -- "),
        (("a.jpg", "photos.csv"), "photos.csv", "/photos.csv"),
    ],
    ids=["YOLO", "Pascal VOC", "table"],
)
def test_layout_of_other_labels_names_them_and_what_is_built_in(
    tmp_path: Path, paths: Sequence[str], labels: str, advice: str
) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert has_problem([refusal(tmp_path)], "wrong-format", "data.path", f"its labels in {labels},", advice)
