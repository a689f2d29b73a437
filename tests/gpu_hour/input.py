"""Stage d: the input of ResNet-50 from made-up photos of 500x375, and the memory pipeline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from speed import epoch_row
from stage import ROOT, Context, Row, Step, StepFailedError, last_line

BENCH = ROOT / "tests" / "bench"
REPEATS = 8  # links to each photo, so that an epoch is not all start and end
RESNET50 = (
    "--model",
    "resnet50",
    "--amp",
    "bf16",
    "data.image_size=224",
    "augment.resized_crop=true",
    "augment.flip=true",
)
MAKE_PHOTOS = """
import sys
from pathlib import Path
import made_photos
from task import Task
made_photos.make_photos(Task(Path(sys.argv[1]), 1, 1), int(sys.argv[2]))
"""


def photos_folder(context: Context) -> Path:
    return context.folder.parent / "photos"


def make_photos(context: Context) -> list[Row]:
    root, count = photos_folder(context), context.size(1500, 40)
    path = os.pathsep.join([str(BENCH / "loaders"), os.environ["PYTHONPATH"]])
    made = context.run([sys.executable, "-c", MAKE_PHOTOS, root, str(count)], PYTHONPATH=path)
    if made.returncode != 0:
        raise StepFailedError(f"made_photos.py: {last_line(made.stderr)}")
    for photo in sorted((root / "folder").rglob("*.jpg")):
        for repeat in range(REPEATS):
            link = root / "many" / photo.parent.name / f"{photo.stem}-{repeat}.jpg"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.hardlink_to(photo)
    packed = root / "many-shards"
    if not packed.exists():
        done = context.gputrain("data", "pack", str(root / "many"), "-o", str(packed))
        if done.returncode != 0:
            raise StepFailedError(f"gputrain data pack: {last_line(done.stderr)}")
    return [Row("photos", f"{count} photos, {REPEATS} links to each, also in shards")]


def train(context: Context, title: str, dataset: str, *keys: str) -> list[Row]:
    root = photos_folder(context)
    path = root / ("many-shards" if dataset == "webdataset" else "many")
    if not path.exists():
        raise StepFailedError(f"no {path.name}: the step that makes the photos failed")
    sizes = (
        ("--batch-size", "256", "--epochs", "3")
        if context.machine.has_card
        else ("--batch-size", "4", "--epochs", "2", "--model", "linear")
    )
    options = ("--dataset", dataset, "--data-path", str(path), "--gpus", "free:1")
    return [epoch_row(title, context.train("run", *options, *RESNET50[context.size(0, 2) :], *sizes, *keys))]


def step(title: str, dataset: str, *keys: str) -> Step:
    title = f"ResNet-50, {title}"
    return Step(title, lambda context: train(context, title, dataset, *keys), 75)


def rows_of_bench(context: Context, *command: object) -> list[Row]:
    """Run a benchmark that prints rows of a Markdown table."""
    done = context.run([sys.executable, *map(str, command)])
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [Row(name, result) for name, result in cells if name != "GPU"]
    if done.returncode != 0:
        rows.append(Row(Path(str(command[0])).name, last_line(done.stderr), state="failed"))
    return rows


def compare_memory_pipeline(context: Context) -> list[Row]:
    sizes = context.size(3, 1), "--images", context.size(50_000, 256), "--batch-size", context.size(1024, 64)
    return rows_of_bench(context, BENCH / "memory_pipeline.py", *sizes)


STEPS = [
    Step("photos", make_photos, 120),
    step("on a fixed batch", "folder", "data.pipeline=fixed"),
    step("folder, threads of auto", "folder"),
    step("shards, threads of auto", "webdataset"),
    step("shards, 4 threads", "webdataset", "data.workers=4"),
    step("shards, 16 threads", "webdataset", "data.workers=16"),
    Step("memory pipeline", compare_memory_pipeline, 60),
]
