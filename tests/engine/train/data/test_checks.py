"""Warnings and refusals of a dataset by its classes, the same for `gputrain data` and for runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import Problem, UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.data.checks import check_dataset, dataset_warnings
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.open import open_source
from support.data.found_folders import write_photos
from support.data.tar_shards import write_shard
from support.messages import has_problem
from support.runs.trained_run import call


def open_classes(root: Path, counts: dict[str, int], *overrides: str) -> tuple[Config, ImageSource]:
    """Open a folder with this number of images of each class for training, and one for validation."""
    for label, (name, count) in enumerate(counts.items()):
        write_photos(root / "train" / name, count, 1000 * label)
        write_photos(root / "val" / name, 1, 1000 * label + 999)
    options = ["data.dataset=folder", f"data.path={root}", "data.image_size=16"]
    config = resolve_config(None, [*options, *overrides]).config
    return config, open_source(config)


@pytest.mark.parametrize(
    ("counts", "override", "warned"),
    [
        ({"a": 20, "b": 2}, "", True),
        ({"a": 19, "b": 2}, "", False),
        ({"a": 20, "b": 2}, "loss.class_weights=balanced", False),
        ({"a": 20, "b": 2}, "data.sampler=balanced", False),
    ],
)
def test_dataset_warnings_name_imbalance(tmp_path: Path, counts: dict[str, int], override: str, warned: bool) -> None:
    config, source = open_classes(tmp_path, counts, *filter(None, [override]))
    warnings = dataset_warnings(config, source)
    assert has_problem(warnings, "imbalanced-classes", "data", "a has 20 ", "b 2,", "class_weights=balanced") is warned
    assert len(warnings) == warned


def refusals(config: Config, source: ImageSource) -> list[Problem]:
    with pytest.raises(UsageError) as caught:
        check_dataset(config, source)
    return caught.value.problems


def test_check_dataset_refuses_class_without_image(tmp_path: Path) -> None:
    (tmp_path / "train" / "eel").mkdir(parents=True)
    (tmp_path / "train" / "eel" / "notes.txt").write_text("no eels yet")
    config, source = open_classes(tmp_path, {"cat": 1, "dog": 1})
    values = (": eel (", "train/eel/notes.txt (", "data.allow_empty=true")
    assert has_problem(refusals(config, source), "empty-class", "data", *values)
    assert not has_problem(dataset_warnings(config, source), "empty-class")


def test_dataset_warnings_name_class_without_image_if_allowed(tmp_path: Path) -> None:
    (tmp_path / "train" / "eel").mkdir(parents=True)
    config, source = open_classes(tmp_path, {"cat": 1, "dog": 1}, "data.allow_empty=true")
    check_dataset(config, source)
    assert has_problem(dataset_warnings(config, source), "empty-class", "data", ": eel")


def test_check_dataset_refuses_shards_with_gaps_in_labels(tmp_path: Path) -> None:
    members = [(f"{number}.{kind}", data) for number in range(4) for kind, data in (("png", b""), ("cls", b"2"))]
    config = resolve_config(None, ["data.dataset=webdataset", f"data.path={write_shard(tmp_path / 'x.tar', members)}"])
    assert has_problem(refusals(config.config, open_source(config.config)), "empty-class", "data", ": 0, 1")


def test_check_dataset_refuses_shards_without_training_image(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", [])
    members = [(f"{number}.{kind}", data) for number in range(4) for kind, data in (("png", b""), ("cls", b"1"))]
    write_shard(tmp_path / "val-0.tar", members)
    config = resolve_config(None, ["data.dataset=webdataset", f"data.path={tmp_path}"]).config
    problems = refusals(config, open_source(config))
    assert has_problem(problems, "no-images", "data", "no training images")
    assert not has_problem(problems, "too-large")


@pytest.mark.parametrize(
    ("content", "task", "outputs"),
    [("cat", "classification", "classes"), ("cat;cat", "multilabel", "labels")],
)
def test_check_dataset_refuses_single_class(tmp_path: Path, content: str, task: str, outputs: str) -> None:
    write_photos(tmp_path, 2, 0)
    rows = "".join(f"{path.name},{content}\n" for path in tmp_path.iterdir())
    (tmp_path / "labels.csv").write_text(f"image,label\n{rows}")
    config = resolve_config(str(tmp_path / "labels.csv"), [f"task.name={task}"]).config
    assert has_problem(refusals(config, open_source(config)), "too-few-classes", "data", f" {outputs}")


def test_dataset_warnings_name_classes_that_differ_in_case_only(tmp_path: Path) -> None:
    config, source = open_classes(tmp_path, {"Cat": 1, "cat": 1, "dog": 1})
    [warning] = dataset_warnings(config, source)
    assert has_problem([warning], "similar-classes", "data", ": Cat and cat")


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        (("animals/cat", "animals/dog", "cars"), "animals/cat, animals/dog"),
        (("animals", "animals/dog", "animals/cat", "cars"), ""),
        (("animals/2024", "cars"), ""),
    ],
    ids=["only subfolders", "also images", "one subfolder"],
)
def test_dataset_warnings_name_subfolders_of_classes(tmp_path: Path, folders: tuple[str, ...], named: str) -> None:
    for place, folder in enumerate(folders):
        write_photos(tmp_path / folder, 2, 100 * place)
    config = resolve_config(None, ["data.dataset=folder", f"data.path={tmp_path}", "data.image_size=16"]).config
    warnings = dataset_warnings(config, open_source(config))
    assert has_problem(warnings, "nested-classes", "data.path", named) is bool(named)
    assert len(warnings) == bool(named)


def test_dataset_of_single_images_is_refused_until_a_class_has_two(tmp_path: Path) -> None:
    for label, name in enumerate(("a", "b")):
        write_photos(tmp_path / name, 1, 100 * label)
    config = resolve_config(None, ["data.dataset=folder", f"data.path={tmp_path}", "data.image_size=16"]).config
    source = open_source(config)
    assert dataset_warnings(config, source) == []
    assert has_problem(refusals(config, source), "no-images", "data", "two or more")
    done = call("data", "--data-path", tmp_path, "--image-size", "16")
    assert done.exit_code == 2 and "there are no validation images" in done.stderr
    write_photos(tmp_path / "a", 2, 0)
    check_dataset(config, open_source(config))


def test_check_dataset_leaves_batch_size_to_the_run(tmp_path: Path) -> None:
    config, source = open_classes(tmp_path, {"a": 2, "b": 2}, "data.batch_size=64")
    check_dataset(config, source)
    config, source = open_classes(tmp_path, {"a": 2, "b": 2}, "data.num_classes=3")
    assert has_problem(refusals(config, source), "conflict", "data.num_classes", "2 classes")
