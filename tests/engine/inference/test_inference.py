"""What is done with a trained run: predict, evaluate and export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.data.augment.batch_ops import normalize
from engine.data.sources.base import ImageFormat
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.inference.evaluate import evaluate_checkpoint
from engine.inference.export import export_model, standalone_state_dict
from engine.inference.predict import find_input_files, predict
from engine.inference.trained_model import (
    config_from_checkpoint,
    load_trained_model,
    read_trained_checkpoint,
    resolve_device,
)
from engine.models.factory import build_model
from engine.models.transfer import load_weights
from engine.runs.folder import RunFolder
from engine.training.checkpoint import save_checkpoint
from engine.utils.errors import UsageError
from gputrain_command import FinishedRun, Gputrain, read_events
from tui.cli.main import app

DIGITS = validate_config({})


def call(*arguments: object) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(short_run: FinishedRun, tmp_path: Path) -> RunFolder:
    """A trained run of the test's own."""
    return RunFolder(Path(shutil.copytree(short_run.path, tmp_path / "runs" / "short")))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve of the digits' validation images six times as large, their labels at the end of their names, some of them
    in a folder below; with a text file, a hidden one and a broken image."""
    source, folder = open_source(DIGITS), tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    pixels, labels = source.load("val", np.arange(12))
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        place = folder / "more" if number >= 8 else folder
        Image.fromarray(np.kron(image[0], np.ones((6, 6), np.uint8))).save(place / f"{number:02d}-{label}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("not for others")
    (folder / "broken.png").write_bytes((folder / f"00-{labels[0]}.png").read_bytes()[:60])
    return folder


def saved_run(folder: Path, state: dict[str, Any] | None = None, **config: Any) -> RunFolder:
    """A run of nothing but a checkpoint, of a model with random weights where `state` brings no others."""
    checked = validate_config(
        {"data": {"dataset": "fake", "num_classes": 5, "image_size": 8}, "model": {"name": "linear"}} | config
    )
    images = model_input_format(checked, open_source(checked))
    told = {"size": images.size, "channels": images.channels, "mean": list(images.mean), "std": list(images.std)}
    classes = open_source(checked).classes
    made: dict[str, Any] = dict.fromkeys(
        ("optimizer", "scaler", "epoch", "batch", "skipped", "skipped_in_row", "global_batch", "images"), 0
    )
    made |= {
        "best_epoch": 1,
        "best_accuracy": 0.5,
        "ranks": [],
        "step": 7,
        "ema": None,
        "plateau": None,
        "image_format": told,
    }
    made |= {"config": as_dict(checked), "classes": list(classes)}
    made["model"] = build_model(checked, images.channels, len(classes), images.size).state_dict()
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.lock.touch()
    save_checkpoint(made | (state or {}), run.checkpoints, best=True, keep=1)
    return run


# Checkpoints


def test_read_saved_prefers_best_then_last_checkpoint(run: RunFolder) -> None:
    assert read_trained_checkpoint(run).path.name == "best.pt"
    assert read_trained_checkpoint(run, "last").path.name == "last.pt"
    (run.checkpoints / "best.pt").unlink()
    assert read_trained_checkpoint(run).path.name == "last.pt"
    file = next(run.checkpoints.glob("step-*.pt"))
    assert read_trained_checkpoint(run, str(file)).path == file


@pytest.mark.parametrize(("which", "told"), [("bset", "best, last or a file"), ("/nowhere.pt", "is no file")])
def test_read_saved_reports_missing_checkpoint(tmp_path: Path, which: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_trained_checkpoint(saved_run(tmp_path / "a"), which)


def test_read_saved_reports_run_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        read_trained_checkpoint(RunFolder(tmp_path))


def test_read_saved_reports_damaged_checkpoint_in_one_sentence(run: RunFolder) -> None:
    best = run.checkpoints / "best.pt"
    content = best.read_bytes()
    best.unlink()
    best.write_bytes(content[:-100])
    with pytest.raises(UsageError, match=r"best\.pt: is cut.*--checkpoint last"):
        read_trained_checkpoint(run)


def test_config_of_ignores_removed_keys() -> None:
    values = as_dict(validate_config({"model": {"name": "linear"}}))
    values["model"]["of_old"] = 3
    values["gone"] = {"key": 1}
    assert config_from_checkpoint(values).model.name == "linear"


def test_load_trained_uses_ema_unless_raw(tmp_path: Path) -> None:
    own = read_trained_checkpoint(saved_run(tmp_path / "a")).weights
    averaged = {name: value + 1 for name, value in own.items()}
    run = saved_run(tmp_path / "b", {"model": own, "ema": averaged})
    for raw, wanted in ((False, averaged), (True, own)):
        trained = load_trained_model(run, device="cpu", raw=raw)
        assert trained.checkpoint.ema is not raw
        assert all(torch.equal(value, wanted[name]) for name, value in trained.model.state_dict().items())


def test_load_trained_ignores_initial_weights(tmp_path: Path) -> None:
    load_trained_model(
        saved_run(tmp_path / "a", model={"name": "linear", "weights": "/nowhere/weights.pt"}), device="cpu"
    )


def test_load_trained_converts_half_weights_and_freezes_model(tmp_path: Path) -> None:
    own = read_trained_checkpoint(saved_run(tmp_path / "a")).weights
    trained = load_trained_model(saved_run(tmp_path / "b", {"model": {name: one.half() for name, one in own.items()}}))
    assert {value.dtype for value in trained.model.parameters()} == {torch.float32}
    assert not trained.model.training
    assert not any(value.requires_grad for value in trained.model.parameters())


def test_load_trained_rejects_weights_of_another_model(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", {"model": {"weight": torch.zeros(1)}})
    with pytest.raises(UsageError, match="do not fit the model linear"):
        load_trained_model(run)


def test_read_saved_takes_image_format_of_checkpoint(tmp_path: Path) -> None:
    told = {"size": 8, "channels": 3, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    saved = read_trained_checkpoint(saved_run(tmp_path / "a", {"image_format": told}))
    assert saved.image_format == ImageFormat(8, 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta", "cuda:99"])
def test_find_device_rejects_unavailable_device(name: str) -> None:
    with pytest.raises(UsageError, match="--device"):
        resolve_device(name)


def test_find_device_auto_falls_back_to_cpu() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# Predict


def test_predict_command_names_classes_of_files_and_folders(
    gputrain: Gputrain, short_run: FinishedRun, photos: Path
) -> None:
    done = gputrain(
        "predict", str(short_run.path), str(photos), str(photos / "notes.txt"), "gone.png", "--json", "--top", "3"
    )
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["format"], told["run"], Path(told["checkpoint"]).name) == (1, "short", "best.pt")
    names = [Path(image["path"]).relative_to(photos).as_posix() for image in told["images"]]
    assert names == sorted(names)
    assert len(names) == 12
    right = sum(image["classes"][0]["name"] == Path(image["path"]).stem[-1] for image in told["images"])
    assert right >= 10
    for image in told["images"]:
        shares = [one["probability"] for one in image["classes"]]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)
    assert done.stderr.splitlines() == [
        f"passed over: {photos}/broken.png cannot be read: image file is truncated",
        f"passed over: {photos}/notes.txt is not an image",
        f"error: {photos}/notes.txt is not an image",
        "error: gone.png does not exist",
    ]


def test_predict_command_prints_line_per_image(run: RunFolder, photos: Path) -> None:
    done = call("predict", run.path, photos / "more", "--top", 2)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [Path(line.split()[0]).parent for line in lines] == [photos / "more"] * 4
    for line in lines:
        _, best, share, other, less = line.split()
        assert {best, other} < set("0123456789")
        assert float(share) > float(less)


def test_probabilities_use_softmax_or_sigmoid_for_bce(tmp_path: Path) -> None:
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    for loss, function in (("cross_entropy", lambda logits: logits.softmax(1)), ("bce", torch.sigmoid)):
        trained = load_trained_model(saved_run(tmp_path / loss, loss={"name": loss}), device="cpu")
        own = trained.checkpoint.image_format
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (own.mean, own.std))
        logits = trained.model(normalize(images, mean, std))
        assert torch.equal(trained.probabilities(images), function(logits))


def test_predict_top_is_limited_to_class_count(tmp_path: Path, photos: Path) -> None:
    trained = load_trained_model(saved_run(tmp_path / "a"), device="cpu")
    answers = list(predict(trained, list(find_input_files([photos / "more"])), 99))
    assert [len(answer.classes) for answer in answers] == [5] * 4


def test_predict_reads_images_one_batch_at_a_time(tmp_path: Path) -> None:
    trained = load_trained_model(saved_run(tmp_path / "a"), device="cpu")
    files = [tmp_path / f"{number:03d}.png" for number in range(65)]
    for file in files[:64]:
        Image.new("RGB", (20, 10)).save(file)
    answers = predict(trained, list(find_input_files(files)), 1)
    assert next(answers).error is None
    Image.new("RGB", (20, 10)).save(files[64])
    assert [answer.error for answer in answers] == [None] * 64


def test_predict_command_escapes_control_characters(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", {"classes": ["\x1b[2J", "b", "c", "d", "e"]})
    Image.new("RGB", (20, 10)).save(tmp_path / "\x1b[31mred.png")
    done = call("predict", run.path, tmp_path / "\x1b[31mred.png")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred.png" in done.stdout


def test_predict_command_reports_empty_folder(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = call("predict", run.path, tmp_path / "empty")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no file" in done.stderr


def photo_folder(folder: Path) -> Path:
    """Photos of two classes, of many sizes and kinds, one of them turned by its EXIF data."""
    draw = np.random.default_rng(0)
    kinds = [("RGB", "jpg", (40, 30)), ("L", "png", (20, 31)), ("RGBA", "png", (16, 16)), ("P", "png", (50, 17))]
    for part in ("train", "val"):
        for label in ("left", "right"):
            (folder / part / label).mkdir(parents=True)
            for number, (mode, ending, (width, height)) in enumerate(kinds * 2):
                image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)
                exif = Image.Exif()
                exif[0x0112] = 6 if ending == "jpg" and number else 1
                image.save(folder / part / label / f"{number}.{ending}", exif=exif)
    return folder


def test_predict_preprocesses_images_like_validation(tmp_path: Path) -> None:
    photos = photo_folder(tmp_path / "photos")
    data = {"dataset": "folder", "path": str(photos), "image_size": 12, "workers": 0}
    run = saved_run(tmp_path / "a", data=data)
    answers = list(predict(load_trained_model(run, device="cpu"), list(find_input_files([photos / "val"])), 1))
    assert len(answers) == 16
    confusion = [[0, 0], [0, 0]]
    for answer in answers:
        true, taken = (("left", "right").index(name) for name in (answer.file.path.parent.name, answer.classes[0][0]))
        confusion[true][taken] += 1
    assert evaluate_checkpoint(read_trained_checkpoint(run), device="cpu").evaluation.confusion == confusion


# Evaluate


def test_evaluate_command_reproduces_best_epoch(gputrain: Gputrain, short_run: FinishedRun) -> None:
    done = gputrain("evaluate", str(short_run.path), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    epochs = [event for event in read_events(short_run.path) if event["type"] == "epoch"]
    best = max(epochs, key=lambda epoch: epoch["val_accuracy"])
    assert told["top1"] == best["val_accuracy"]
    assert told["loss"] == pytest.approx(best["val_loss"], rel=1e-6)
    assert told["images"] == sum(one["images"] for one in told["classes"]) == np.sum(told["confusion"])
    right = sum(row[number] for number, row in enumerate(told["confusion"]))
    assert told["top1"] == right / told["images"]


def test_evaluate_matches_plain_pytorch_loop(run: RunFolder) -> None:
    source, saved = open_source(DIGITS), read_trained_checkpoint(run)
    found = evaluate_checkpoint(saved, device="cpu").evaluation
    trained, own = load_trained_model(run, device="cpu"), saved.image_format
    pixels, labels = source.load("val", np.arange(source.num_images("val")))
    images = (torch.from_numpy(pixels).float() / 255 - own.mean[0]) / own.std[0]
    hits = in_top5 = 0
    for batch, wanted in DataLoader(TensorDataset(images, torch.from_numpy(labels)), 50):
        order = trained.model(batch).argsort(1, descending=True)
        hits += int((order[:, 0] == wanted).sum())
        in_top5 += int((order[:, :5] == wanted[:, None]).sum())
    assert found.metrics.accuracy == hits / len(labels)
    assert found.top5 == in_top5 / len(labels)


def test_evaluate_command_prints_classes_and_confusion_matrix(run: RunFolder) -> None:
    done = call("evaluate", run.path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "best.pt on digits, part val"
    assert lines[1].startswith("359 images  loss 0.")
    of_three = next(line for line in lines if line.startswith("3 ")).split()
    assert of_three[:2] == ["3", "37"]
    matrix = [line.split() for line in lines[-10:]]
    assert [row[0] for row in matrix] == list("0123456789")
    assert sum(int(count.replace(".", "0")) for row in matrix for count in row[1:]) == 359


def test_evaluate_counts_each_image_once_for_any_number_of_workers(run: RunFolder) -> None:
    saved = read_trained_checkpoint(run)
    found = [
        evaluate_checkpoint(saved, [f"data.workers={n}", "data.batch_size=100"], "all", "cpu").evaluation
        for n in (0, 2)
    ]
    assert np.sum(found[0].confusion) == 1797
    assert found[0].confusion == found[1].confusion


def digits_folder(folder: Path, names: Callable[[int], str], wanted: set[int]) -> Path:
    """The digits' validation images as files, one folder a class."""
    pixels, labels = (source := open_source(DIGITS)).load("val", np.arange(source.num_images("val")))
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        if label in wanted:
            place = folder / names(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(place / f"{number}.png")
    return folder


def test_evaluate_matches_classes_by_name(run: RunFolder, tmp_path: Path) -> None:
    folder = digits_folder(tmp_path / "some", str, {7, 3})
    saved = read_trained_checkpoint(run)
    before, found = (
        evaluate_checkpoint(saved, changes, part, "cpu")
        for changes, part in (([], "val"), (["data.dataset=folder", f"data.path={folder}"], "all"))
    )
    assert found.images_per_class == [before.images_per_class[n] if n in (3, 7) else 0 for n in range(10)]
    assert found.evaluation.per_class[3] == before.evaluation.per_class[3]
    assert found.evaluation.confusion[7] == before.evaluation.confusion[7]
    assert found.evaluation.per_class[0] is None


def test_evaluate_command_rejects_unknown_classes(run: RunFolder, tmp_path: Path) -> None:
    folder = digits_folder(tmp_path / "named", lambda label: f"digit {label}", {1, 2})
    done = call("evaluate", run.path, "data.dataset=folder", f"data.path={folder}")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: data.path: the model does not know digit 1, digit 2; its classes are 0, 1, 2")


def test_evaluate_command_reports_all_invalid_arguments_at_once(run: RunFolder) -> None:
    done = call("evaluate", run.path, "data.image_size=16", "optim.lr=1", "data.bathc_size=3", "much")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "error: data.image_size: is what the model was trained with, and stays so; leave it out",
        "error: optim.lr: is of training; only keys of data can be given here",
        "error: data.bathc_size: there is no such key; did you mean data.batch_size?",
        "error: much: give values as data.key=value",
    ]


# Export


def test_export_reproduces_logits_bit_for_bit(short_run: FinishedRun, tmp_path: Path) -> None:
    done = call("export", short_run.path, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "out" / name) for name in ("model.safetensors", "model.json")]
    told = json.loads((tmp_path / "out" / "model.json").read_text())
    config, image = validate_config({"model": told["model"]}), told["image"]
    model = build_model(config, image["channels"], len(told["classes"]), image["size"]).eval()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    trained = load_trained_model(RunFolder(short_run.path), device="cpu")
    images = torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(image[name]).view(1, 1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        assert torch.equal(model(normalize(images, mean, std)), trained.logits(images))
    best = max(
        (one for one in read_events(short_run.path) if one["type"] == "epoch"), key=lambda one: one["val_accuracy"]
    )
    assert (told["epoch"], told["val_accuracy"]) == (best["epoch"], best["val_accuracy"])
    assert told["classes"] == list("0123456789")


def test_export_can_initialize_another_run(run: RunFolder, tmp_path: Path) -> None:
    file = export_model(read_trained_checkpoint(run), run, tmp_path / "out")[0]
    config = validate_config({"model": {"weights": str(file)}})
    fresh = build_model(config, 1, 10, 8)
    load_weights(fresh, config, 8, read_trained_checkpoint(run).classes)
    trained = load_trained_model(run, device="cpu").model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in fresh.state_dict().items())
    loaded = load_weights(build_model(config, 1, 10, 8), config, 8, [f"other-{number}" for number in range(10)])
    assert loaded is not None
    assert set(loaded.skipped) == {"9.weight (of other classes)", "9.bias (of other classes)"}


def test_export_describes_preprocessing_completely(run: RunFolder, tmp_path: Path) -> None:
    export_model(read_trained_checkpoint(run), run, tmp_path / "out")
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 100, 3), np.uint8))
    image.save(tmp_path / "one.png")
    steps = {one["name"]: one for one in json.loads((tmp_path / "out" / "model.json").read_text())["transforms"]}
    assert list(steps) == ["exif_transpose", "convert", "resize", "divide", "normalize"]
    grey, size = image.convert(steps["convert"]["mode"]), steps["resize"]["size"]
    assert steps["resize"]["box"] == "central_square"
    small = grey.crop((18, 0, 82, 64)).resize(size, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(small).copy())[None, None].float() / steps["divide"]["by"]
    pixels = (pixels - steps["normalize"]["mean"][0]) / steps["normalize"]["std"][0]
    trained = load_trained_model(run, device="cpu")
    shares = trained.model(pixels).softmax(1)[0]
    answer = next(predict(trained, list(find_input_files([tmp_path / "one.png"])), 10))
    for name, share in answer.classes:
        assert share == shares[int(name)].item()


def test_export_command_defaults_to_run_folder_and_replaces_own_files(run: RunFolder) -> None:
    for _ in range(2):
        assert call("export", run.path).exit_code == 0
    assert sorted(path.name for path in (run.path / "export").iterdir()) == ["model.json", "model.safetensors"]


def test_export_command_overwrites_foreign_files_only_with_force(run: RunFolder, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "model.json").write_text('{"of": "another"}')
    done = call("export", run.path, "--output", place)
    assert done.exit_code == 2
    assert "model.json: is not of short; give another --output, or overwrite with --force" in done.stderr
    assert [path.name for path in place.iterdir()] == ["model.json"]
    assert call("export", run.path, "--output", place, "--force").exit_code == 0
    assert json.loads((place / "model.json").read_text())["run"] == "short"


def test_export_command_reports_unwritable_folder(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("export", run.path, "--output", tmp_path / "file" / "below")
    assert done.exit_code == 2
    assert "cannot be written to: Not a directory" in done.stderr


def test_export_writes_shared_and_half_tensors_as_separate_float32(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    state = standalone_state_dict({"a": tied, "b": tied.t(), "half": tied.half(), "count": torch.tensor(3)})
    assert len({value.data_ptr() for value in state.values()}) == 4
    assert all(value.is_contiguous() for value in state.values())
    assert torch.equal(state["b"], tied.t())
    assert (state["half"].dtype, state["count"].dtype) == (torch.float32, torch.int64)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_inference_on_gpu_matches_cpu(run: RunFolder) -> None:
    images = torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8)
    on_gpu, on_cpu = (load_trained_model(run, device=name) for name in ("auto", "cpu"))
    assert on_gpu.device.type == "cuda"
    assert torch.allclose(on_gpu.probabilities(images).cpu(), on_cpu.probabilities(images), atol=1e-2)
    measured = [
        evaluate_checkpoint(on_cpu.checkpoint, ["data.workers=2"], "val", name).evaluation for name in ("cuda", "cpu")
    ]
    assert measured[0].metrics.accuracy == pytest.approx(measured[1].metrics.accuracy, abs=0.01)
