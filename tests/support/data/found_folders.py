"""Image folders as people find them: an export of Roboflow, a download from Kaggle, and the disk of a camera."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")
SIZE = (32, 24)


def write_photo(path: Path, seed: int) -> Path:
    """Write an image whose content depends on the seed alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIZE[::-1], 3), np.uint8)
    Image.fromarray(pixels).save(path, "PNG" if path.suffix == ".png" else "JPEG")
    return path


def write_photos(folder: Path, count: int, seed: int, ending: str = "jpg") -> None:
    for number in range(count):
        write_photo(folder / f"{number}.{ending}", seed + number)


def write_roboflow(root: Path) -> Path:
    """Write train/, valid/ and test/ with notes beside them. Two validation images are also in training."""
    for place, (part, count) in enumerate((("train", 12), ("valid", 4), ("test", 3))):
        for label, name in enumerate(CLASSES):
            write_photos(root / part / name, count, 1000 * place + 100 * label)
    for number in range(2):
        copy = (root / "train" / "cat" / f"{number}.jpg").read_bytes()
        (root / "valid" / "cat" / f"copy{number}.jpg").write_bytes(copy)
    (root / "README.roboflow.txt").write_text("exported")
    return root


def write_kaggle(root: Path) -> Path:
    """Write Training/ and validation/, test images without labels, and what a zip of a Mac leaves."""
    for place, (part, count) in enumerate((("Training", 12), ("validation", 4))):
        for label, name in enumerate(CLASSES):
            write_photos(root / part / name, count, 1000 * place + 100 * label)
            (root / "__MACOSX" / part / name).mkdir(parents=True)
            (root / "__MACOSX" / part / name / "._0.jpg").write_bytes(b"\0\5\x16\7")
        (root / part / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    write_photos(root / "test", 3, 5000)
    (root / "sample_submission.csv").write_text("id,label\n0,cat\n")
    return root


def write_kaggle_table(root: Path) -> Path:
    """Write images without class folders, and a table of their names without extension. Return the table."""
    lines = ["id,age,class,set"]
    for number in range(40):
        part, name = ("train", "train", "train", "Validation", "test")[number % 5], CLASSES[number // 5 % 2]
        write_photo(root / ("test" if part == "test" else "train") / f"{number:04d}.jpg", number)
        lines.append(f"{number:04d},{number},{name},{part}")
    table = root / "labels.csv"
    table.write_text("\n".join(lines))
    return table


def write_camera(root: Path) -> Path:
    """Write one folder per class with folders of the camera in it, and what disks, servers and phones leave."""
    for label, (name, count) in enumerate((("Cat", 3), ("cat", 40), ("dog", 24))):
        for half, folder in enumerate(("100CANON", "101CANON")):
            write_photos(root / name / folder, count // 2 + (count % 2) * half, 1000 * label + 500 * half, "JPG")
    (root / "dog" / "100CANON" / "MVI_1.MOV").write_bytes(b"\0\0\0\x14ftypqt  \0\0\0\0qt  ")
    (root / "dog" / "100CANON" / "IMG_9.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    write_photo(root / "@eaDir" / "cat" / "SYNOPHOTO_THUMB_M.jpg", 1)
    (root / "lost+found").mkdir()
    (root / "all").symlink_to(root)
    (root / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    return root
