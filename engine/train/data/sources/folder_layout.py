"""Which subfolders of an image folder are its splits and classes, and which are neither.

`engine.train.data.sources.folder` scans the images in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import Problem, UsageError
from engine.base.text import list_names
from engine.config.data_sections import CSV_SUFFIXES, OTHER_LABELS_ADVICE
from engine.train.data.sampler import Part

CLASS_FOLDERS_ADVICE = "set data.path to a folder with one subfolder per class"
# Names of dataset splits, in lower case: those of torchvision and timm, Keras, Roboflow and Kaggle.
PART_NAMES: dict[str, Part] = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
PART_NOUNS: dict[Part, str] = {"train": "training", "val": "validation", "test": "test"}
# Folders, in lower case, that macOS, file systems, Windows, and the NAS of Synology and QNAP create.
SYSTEM_FOLDERS = {
    "__macosx", "lost+found", "$recycle.bin", "system volume information", "@eadir", "#recycle", "#snapshot",
    "@recycle", "@recently-snapshot",
}  # fmt: skip
# Folders and files beside the images that hold their labels: those of YOLO, COCO, Pascal VOC, of masks and of tables.
LABEL_FOLDERS = {"labels", "annotations", "masks"}
LABEL_SUFFIXES = {".csv", ".json", ".jsonl", ".parquet", ".tsv", ".xml"}
SYSTEM_REASON = "a folder of the system"
LINK_REASON = "a link to a folder that contains it"


@dataclass(frozen=True)
class FolderLayout:
    """The folder of each part, the class names, and the subfolders that are not used, each with the reason.

    Without a part val, that of training is split."""

    parts: dict[Part, Path]
    classes: tuple[str, ...]
    ignored: tuple[str, ...]


def find_layout(root: Path) -> FolderLayout:
    """Return the layout of a dataset. Without a training split, `root` itself holds the classes.

    Raises UsageError, and OSError if a folder cannot be listed."""
    if not root.is_dir():
        if root.is_file():
            others = ", or data.dataset to webdataset for tar shards"
            raise UsageError.one("data.path", f"{root} is a file", CLASS_FOLDERS_ADVICE + others, code="not-a-folder")
        raise UsageError.one(
            "data.path", f"{root} does not exist or is not a folder", CLASS_FOLDERS_ADVICE, code="not-found"
        )
    ignored: dict[str, str] = {}
    names = list_folders(root, ignored)
    splits = [name for name in names if name.casefold() in PART_NAMES]
    trained = [name for name in splits if PART_NAMES[name.casefold()] == "train" and list_folders(root / name)]
    parts: dict[Part, Path] = {"train": root}
    if trained:
        parts = _find_parts(root, names, splits, ignored)
    elif splits and len(splits) == len(names):
        reason = f"{root} contains splits ({', '.join(names)}), but no folder train with one subfolder per class"
        raise UsageError.one("data.path", reason, "move the images to train/CLASS, val/CLASS", code="wrong-format")
    classes = list_folders(parts["train"])
    if len(classes) < 2 or (_label_folders(classes) and any(name.casefold().endswith("images") for name in classes)):
        raise UsageError([_unusable_classes(parts["train"], classes)])
    for part, folder in list(parts.items()) if trained else ():
        inner: dict[str, str] = {}
        found = list_folders(folder, inner)
        unknown = sorted(set(found) - set(classes))
        if part == "test" and (unknown or not found):
            reason = f"{list_names(unknown)} is no class of {parts['train'].name}" if unknown else "no class folders"
            ignored[folder.name] = f"not evaluated: {reason}"
            del parts[part]
        else:
            ignored |= {f"{folder.name}/{name}": reason for name, reason in inner.items()}
    return FolderLayout(parts, classes, tuple(f"{name} ({reason})" for name, reason in sorted(ignored.items())))


def _find_parts(root: Path, names: tuple[str, ...], splits: list[str], ignored: dict[str, str]) -> dict[Part, Path]:
    """Return the folder of each part, and add the folders beside them to `ignored`. Raises UsageError."""
    parts: dict[Part, Path] = {}
    for name in splits:
        part = PART_NAMES[name.casefold()]
        if part in parts:
            reason = f"{root} contains {parts[part].name} and {name}, which both name {PART_NOUNS[part]} images"
            raise UsageError.one("data.path", reason, "move one of them elsewhere", code="ambiguous-name")
        parts[part] = root / name
    others = [name for name in names if name not in splits]
    if others and parts.keys() == {"train"}:
        train = parts["train"]
        reason = f"{train} has subfolders, so it may be a class beside {list_names(others)} or the training split"
        advice = f"rename it if it is a class, or set data.path to {train}"
        raise UsageError.one("data.path", reason, advice, code="ambiguous-name")
    ignored |= dict.fromkeys(others, f"not used beside {parts['train'].name}")
    return {part: parts[part] for part in PART_NOUNS if part in parts}


def _unusable_classes(folder: Path, classes: tuple[str, ...]) -> Problem:
    """Return what is wrong with a folder of images that has no two class folders, or folders of labels instead."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in LABEL_SUFFIXES and path.is_file())
    if labels := _label_folders(classes) or names:
        reason = f"{folder} has its labels in {list_names(labels)}, not one folder per class"
        tables = [name for name in names if name.casefold().endswith(CSV_SUFFIXES)]
        advice = f"set data.path to {folder / tables[0]}" if tables else OTHER_LABELS_ADVICE
        return Problem("data.path", reason, advice, code="wrong-format")
    advice = CLASS_FOLDERS_ADVICE
    if classes and list_folders(folder / classes[0]):
        advice = f"set data.path to {folder / classes[0]} if its subfolders are the classes"
    elif any(folder.glob("*.tar")):
        advice += ", or train on the tar shards with data.dataset=webdataset"
    contents = f"only the folder {classes[0]}" if classes else "no folder"
    return Problem("data.path", f"{folder} contains {contents}", advice, code="too-few-classes")


def _label_folders(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.casefold() in LABEL_FOLDERS]


def list_folders(folder: Path, ignored: dict[str, str] | None = None) -> tuple[str, ...]:
    """Return the sorted names of the subfolders that may be classes or splits, without hidden ones.

    Those of a system, and links to a folder that contains them, are added to `ignored` with the reason. Raises OSError.
    """
    names, left_out = list[str](), {} if ignored is None else ignored
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir() or entry.name.startswith("."):
                continue
            if entry.name.casefold() in SYSTEM_FOLDERS:
                left_out[entry.name] = SYSTEM_REASON
            elif entry.is_symlink() and folder.resolve().is_relative_to(Path(entry.path).resolve()):
                left_out[entry.name] = LINK_REASON
            else:
                names.append(entry.name)
    return tuple(sorted(names))


def walk_files(folder: Path, ignore: Callable[[Path], object] = lambda _: None) -> Iterator[Path]:
    """Yield all files below a folder, except hidden ones and those in hidden folders.

    Follows symbolic links, but visits each folder once: a link to a parent folder would otherwise repeat its images.
    `ignore` is called with the folders of a system, which are not visited.
    """
    seen = {_identity(parent) for parent in (*folder.absolute().parents, *folder.resolve().parents)}
    for current, folders, names in os.walk(folder, followlinks=True):
        system = [name for name in sorted(folders) if name.casefold() in SYSTEM_FOLDERS]
        for name in system:
            ignore(Path(current, name))
        folders[:] = sorted(name for name in folders if name not in system and not name.startswith("."))
        if (identity := _identity(Path(current))) in seen:
            folders.clear()
            continue
        seen.add(identity)
        yield from (Path(current, name) for name in names if not name.startswith("."))


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
