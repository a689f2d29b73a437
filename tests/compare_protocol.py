"""Compare gputrain's evaluation with those of torchvision and timm: `python tests/compare_protocol.py [MODEL...]`.

Writes photos of twelve kinds, gives five models random weights, and runs `gputrain run`, `evaluate`, `predict` and
`export` as a user does. Then torchvision (`weights.transforms()` on an `ImageFolder`) and timm (`create_transform` of
its data config on its `ImageDataset`) evaluate the same weights on the same files with their own code. Every photo is a
class of its own, so that a confusion matrix holds the class that was predicted for each photo. Prints Markdown, and
exits with 1 if gputrain contradicts itself, or the library on photos that both handle alike.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from engine.config.training_sections import ModelConfig
from engine.data.sources.base import ImageFormat
from engine.data.sources.image import read_image
from engine.models.pretrained_input import PretrainedInput, find_pretrained_input
from engine.runs.evaluations import read_evaluations
from engine.training.checkpoint import load_checkpoint
from support.data.protocol_photos import DIFFERENT_ON_PURPOSE, TRUNCATED, write_photos

GPUTRAIN = str(Path(sys.executable).with_name("gputrain"))
# One of each protocol: resize 256 bilinear and bicubic, resize 232, timm's center crop and its squash.
MODELS = (
    ("torchvision", "resnet18"),
    ("torchvision", "efficientnet_b0"),
    ("torchvision", "resnet50"),
    ("timm", "convnext_atto.d2_in1k"),
    ("timm", "dm_nfnet_f0.dm_in1k"),
)
# gputrain resizes some JPEGs with torch, which rounds once; Pillow rounds between its two passes.
MAX_GRAY_LEVELS = 1
# Too small to change a float32 weight.
NO_LEARNING = "optim.lr=1e-30"


@dataclass(frozen=True)
class KindResult:
    """The photos of one kind: differences of their pixels in gray levels, and how many get the same class as by the
    other library (`same_top1`), and by all commands of gputrain (`agreeing`)."""

    kind: str
    photos: int
    greatest: float
    mean: float
    same_top1: int
    agreeing: int

    @property
    def is_consistent(self) -> bool:
        """Whether all commands agree with each other, and with the library where it does not differ on purpose."""
        alike = self.greatest <= MAX_GRAY_LEVELS and self.same_top1 == self.photos
        return self.agreeing == self.photos and (alike or self.kind in DIFFERENT_ON_PURPOSE)


@dataclass(frozen=True)
class Library:
    """The other library's own evaluation: its network for `classes`, and its preprocessing of a file."""

    build: Callable[[int], nn.Module]
    transform: Callable[[Image.Image], Tensor]
    dataset: Callable[[Path], Any]
    """Opens a folder with a folder for each class, as the library's own scripts do."""


def open_library(source: str, name: str) -> Library:
    if source == "torchvision":
        from torchvision import datasets, models

        transforms = models.get_model_weights(name)["DEFAULT"].transforms()
        return Library(
            lambda classes: models.get_model(name, num_classes=classes),
            transforms,
            lambda folder: datasets.ImageFolder(str(folder), transforms),
        )
    import timm
    from timm.data import ImageDataset, create_transform, resolve_data_config
    from timm.data.readers import add_img_extensions

    add_img_extensions(".webp")
    pretrained_cfg = vars(timm.get_pretrained_cfg(name))
    transform = create_transform(**resolve_data_config(pretrained_cfg=pretrained_cfg, use_test_size=True))
    return Library(
        lambda classes: timm.create_model(name, num_classes=classes),
        transform,
        lambda folder: ImageDataset(str(folder), transform=transform),
    )


def write_dataset(folder: Path, photos: dict[str, list[Path]]) -> dict[str, Path]:
    """Link every readable photo into a class folder of its own for training and for validation; return the files."""
    files = {}
    for kind, paths in photos.items():
        for path in paths if kind != TRUNCATED else ():
            for part in ("train", "val"):
                target = folder / part / path.stem / path.name
                target.parent.mkdir(parents=True)
                os.link(path, target)
            files[path.stem] = folder / "val" / path.stem / path.name
    return dict(sorted(files.items()))


@torch.inference_mode()
def random_network(library: Library, folder: Path, classes: int) -> nn.Module:
    """Return a network with random weights, whose classes are about equally frequent among the photos."""
    torch.manual_seed(0)
    network = library.build(classes)
    images = torch.stack([image for image, _ in library.dataset(folder / "val")])
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    if has_batch_norm:
        network.train()
        for batch in images.split(16):
            network(batch)
    logits = torch.cat([network.eval()(batch) for batch in images.split(16)])
    [*_, head] = [module for module in network.modules() if isinstance(module, nn.Linear)]
    spread = logits.std(0)
    head.bias.copy_((head.bias - logits.mean(0)) / spread)
    head.weight.div_(spread[:, None])
    return network


def gputrain(*arguments: object) -> str:
    done = subprocess.run([GPUTRAIN, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"gputrain {' '.join(map(str, arguments))}:\n{done.stderr}")
    return done.stdout


def run_overrides(pretrained: PretrainedInput) -> Iterator[str]:
    """Yield the input keys that `model.weights=pretrained` would set; the weights of this benchmark are a file."""
    for key in ("image_size", "val_crop", "val_resize", "fit", "interpolation"):
        yield f"data.{key}={getattr(pretrained, key)}"
    for key in ("mean", "std"):
        yield f"data.{key}={json.dumps(getattr(pretrained, key))}"


def train_run(source: str, name: str, work: Path, dataset: Path, weights: Path) -> Path:
    """Run one epoch that changes no weight, and return the run's folder."""
    pretrained = find_pretrained_input(ModelConfig(name=name, source=source, weights="pretrained"))  # type: ignore[arg-type]
    assert pretrained is not None
    runs = work / "runs"
    gputrain(
        *("run", "--headless", "--gpus", "cpu", "--runs-dir", runs, "--name", "run", "--epochs", 1),
        *("--dataset", "folder", "--data-path", dataset, "--batch-size", 8, "--model", name, f"model.source={source}"),
        *(f"model.weights={weights}", "model.freeze=backbone", NO_LEARNING, "data.pipeline=stream", "data.workers=1"),
        *run_overrides(pretrained),
    )
    return runs / "run"


def predicted_classes(confusion: list[list[int]]) -> list[int]:
    return [row.index(1) for row in confusion]


def commands_top1(run: Path, files: dict[str, Path]) -> dict[str, list[int]]:
    """Return the class of each photo, as an index, by the way in which gputrain predicts it."""
    runs, names = run.parent, list(files)
    found = {"train": predicted_classes(read_evaluations(run / "evaluation.json").last.counts.tolist())}
    evaluated = json.loads(gputrain("evaluate", run.name, "--runs-dir", runs, "--gpus", "cpu", "--json"))
    found["evaluate"] = predicted_classes(evaluated["confusion"])
    predicted = json.loads(
        gputrain("predict", run.name, *files.values(), "--runs-dir", runs, "--gpus", "cpu", "--top", 1, "--json")
    )
    found["predict"] = [names.index(image["classes"][0]["name"]) for image in predicted["images"]]
    found["export"] = exported_top1(run, files)
    return found


def exported_top1(run: Path, files: dict[str, Path]) -> list[int]:
    """Return the classes that the exported ONNX program predicts for what the exported preprocess.py reads."""
    import onnxruntime

    folder = run.parent / "exported"
    gputrain("export", run.name, "--runs-dir", run.parent, "--format", "onnx", "--output", folder)
    load = runpy.run_path(str(folder / "preprocess.py"))["load"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    [images] = session.get_inputs()
    return [int(session.run(None, {images.name: load(path)[None]})[0].argmax()) for path in files.values()]


@torch.inference_mode()
def library_top1(network: nn.Module, dataset: Any) -> list[int]:
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    return [int(index) for images, _ in loader for index in network.eval()(images).argmax(1)]


def pixel_difference(path: Path, image_format: ImageFormat, library: Library) -> NDArray[np.float64]:
    """Return the absolute differences between our input of a file and the library's, in gray levels."""
    with Image.open(path) as image:
        theirs = library.transform(image.convert("RGB"))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (image_format.mean, image_format.std))
    levels = ((theirs * std + mean) * 255).numpy().astype(np.float64)
    return np.abs(levels.round() - read_image(path, image_format))


def compare(source: str, name: str, work: Path, photos: dict[str, list[Path]]) -> list[KindResult]:
    """Compare gputrain with the library that has this model, for each kind of readable photos."""
    library, dataset, weights = open_library(source, name), work / "photos", work / "weights.pt"
    files = write_dataset(dataset, photos)
    network = random_network(library, dataset, len(files))
    torch.save(network.state_dict(), weights)
    run = train_run(source, name, work, dataset, weights)
    checkpoint = load_checkpoint(run / "checkpoints" / "last.pt")
    assert all(torch.equal(value, checkpoint["model"][key]) for key, value in network.state_dict().items())
    image_format = ImageFormat.from_checkpoint(checkpoint["image_format"])
    ours, theirs = commands_top1(run, files), library_top1(network, library.dataset(dataset / "val"))
    print(f"{len(set(theirs))} different classes among {len(theirs)} photos", file=sys.stderr)
    results = []
    names = list(files)
    for kind, paths in photos.items():
        if kind == TRUNCATED:
            continue
        rows = [names.index(path.stem) for path in paths]
        differences = [pixel_difference(path, image_format, library) for path in paths]
        results.append(
            KindResult(
                kind,
                len(paths),
                max(float(part.max()) for part in differences),
                float(np.mean([part.mean() for part in differences])),
                sum(ours["predict"][row] == theirs[row] for row in rows),
                sum(len({classes[row] for classes in ours.values()}) == 1 for row in rows),
            )
        )
    return results


def refusals(source: str, name: str, photos: dict[str, list[Path]], run: Path) -> tuple[int, int]:
    """Return how many truncated photos the library, and `gputrain predict`, refuse."""
    library, refused = open_library(source, name), 0
    for path in photos[TRUNCATED]:
        try:
            with Image.open(path) as image:
                library.transform(image.convert("RGB"))
        except OSError:
            refused += 1
    done = json.loads(gputrain("predict", run.name, *photos[TRUNCATED], "--runs-dir", run.parent, "--json"))
    return refused, len(photos[TRUNCATED]) - len(done["images"])


def table(results: list[KindResult], library: str) -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    yield f"| photos | number | greatest difference | mean difference | same top-1 as {library} | all commands agree |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        other = " (handled differently on purpose)" if result.kind in DIFFERENT_ON_PURPOSE else ""
        yield (
            f"| {result.kind}{other} | {result.photos} | {result.greatest:.0f} | {result.mean:.4f} | "
            f"{result.same_top1} of {result.photos} | {result.agreeing} of {result.photos} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of MODELS, by default all")
    parser.add_argument("--photos", type=int, default=8, help="number of photos of each kind")
    arguments = parser.parse_args()
    is_consistent = True
    root = Path(tempfile.mkdtemp(prefix="protocol-"))
    try:
        (root / "originals").mkdir()
        photos = write_photos(root / "originals", arguments.photos)
        for source, name in MODELS:
            if arguments.models and name not in arguments.models:
                continue
            work = root / name
            work.mkdir()
            results = compare(source, name, work, photos)
            is_consistent = is_consistent and all(result.is_consistent for result in results)
            theirs, ours = refusals(source, name, photos, work / "runs" / "run")
            print(f"\n**{name}** of {source}\n")
            print("\n".join(table(results, source)))
            print(f"| {TRUNCATED} | {len(photos[TRUNCATED])} | refused by {source}: {theirs}, by gputrain: {ours} ||||")
            sys.stdout.flush()
    finally:
        shutil.rmtree(root)
    sys.exit(0 if is_consistent else 1)


if __name__ == "__main__":
    main()
