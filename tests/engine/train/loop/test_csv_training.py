"""Training on labels from a CSV file: the losses of the same images in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.photo_folder import write_photo_folder
from support.runs.in_process import train_in_process

OPTIONS = ("data.image_size=16", "data.batch_size=4", "run.epochs=2", "augment.flip=true", "model.name=linear")


@pytest.mark.parametrize("pipeline", ["memory", "stream"])
def test_csv_file_gives_losses_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos = write_photo_folder(tmp_path / "photos")
    lines = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(photos.glob("*/*.png"))]
    (tmp_path / "labels.csv").write_text("\n".join(["image,label", *reversed(lines)]))
    options = (*OPTIONS, f"data.pipeline={pipeline}", "data.workers=0")
    of_folder, of_table = (
        train_in_process(tmp_path / name, f"data.path={path}", *options)
        for name, path in (("folder", photos), ("table", tmp_path / "labels.csv"))
    )
    assert [(epoch.train_loss, epoch.val_loss) for epoch in of_folder] == [
        (epoch.train_loss, epoch.val_loss) for epoch in of_table
    ]
