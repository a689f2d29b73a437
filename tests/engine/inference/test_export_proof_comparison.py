"""Proof of an export: how images, pixels and probabilities are compared, without a trained run."""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.config.code_trust import CodeTrust
from engine.inference import export_proof
from engine.inference.export import ExportOptions, export_model
from engine.inference.export_program import LoadedExport
from engine.inference.export_proof import (
    BATCH_SIZE,
    MAX_PIXEL_DIFFERENCE,
    MAX_PROGRAM_DIFFERENCE,
    MAX_STORED_CHANGES,
    Proof,
    proof_config,
    prove_export,
)
from engine.inference.model_json import ClassChange
from engine.inference.trained_model import TrainedModel, build_trained_model, read_trained_checkpoint
from engine.runs.folder import RunFolder
from engine.utils.codec import encode, finite
from engine.utils.errors import Problem, UsageError
from support.data.packed_photos import NUM_PHOTOS, pack_photos, write_photos
from support.runs.trained_run import saved_run

FILE = "model.safetensors"
Probabilities = NDArray[np.float32]


class Export(NamedTuple):
    """An exported model in a folder, and the model that it was exported from."""

    trained: TrainedModel
    folder: Path

    def prove(self, max_images: int = 8) -> Proof:
        return prove_export(self.trained, self.folder, FILE, max_images=max_images)


def export_run(run: RunFolder, folder: Path) -> Export:
    trained = build_trained_model(read_trained_checkpoint(run), "cpu")
    export_model(trained.checkpoint, run, folder, ExportOptions(max_images=0))
    return Export(trained, folder)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of a model with random weights for generated images. It reads no image files."""
    folder = tmp_path_factory.mktemp("export")
    return export_run(saved_run(folder / "run"), folder / "out")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the exported file return other probabilities, or have other classes."""

    def change(
        probabilities: Callable[[Probabilities], Probabilities] = lambda values: values,
        classes: list[str] | None = None,
    ) -> None:
        load = export_proof.load_export

        def load_changed(*arguments: Any) -> LoadedExport:
            loaded = load(*arguments)
            return LoadedExport(
                lambda pixels: probabilities(loaded.predict(pixels)), loaded.classes if classes is None else classes
            )

        monkeypatch.setattr(export_proof, "load_export", load_changed)

    return change


@pytest.fixture
def preprocessed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[NDArray[np.uint8]], NDArray[Any]]], None]:
    """Make preprocess.py return other pixels."""

    def change(pixels: Callable[[NDArray[np.uint8]], NDArray[Any]]) -> None:
        load_function = export_proof.load_function

        def load_changed(text: str) -> Callable[[Path], NDArray[Any]]:
            load = load_function(text)
            return lambda path: pixels(load(path))

        monkeypatch.setattr(export_proof, "load_function", load_changed)

    return change


def test_proof_compares_images_of_several_batches(export: Export) -> None:
    proof = export.prove(BATCH_SIZE + 8)
    assert (proof.images, proof.same_class, proof.files, proof.unread) == (BATCH_SIZE + 8, BATCH_SIZE + 8, False, 0)
    assert proof.samples > 20
    assert proof.max_difference == proof.max_program_difference < 1e-6
    assert proof.passed


def test_proof_runs_at_most_one_batch_at_a_time(export: Export, exported: Callable[..., None]) -> None:
    batches: list[int] = []

    def note(values: Probabilities) -> Probabilities:
        batches.append(len(values))
        return values

    exported(note)
    export.prove(2 * BATCH_SIZE)
    export.prove(BATCH_SIZE + 1)
    assert batches == [BATCH_SIZE, BATCH_SIZE, BATCH_SIZE, 1]


def test_proof_spreads_images_over_the_validation_set(export: Export, exported: Callable[..., None]) -> None:
    exported(lambda values: np.roll(values, 1, axis=1))
    last = export_proof.open_source(export.trained.checkpoint.config).num_images("val") - 1
    names = [change.image for change in export.prove(3).changes]
    assert [int(name.split()[-1]) for name in names] == [0, round(last / 2), last]


def test_proof_names_both_classes_and_their_probabilities(export: Export, exported: Callable[..., None]) -> None:
    exported(lambda values: np.roll(values, 1, axis=1))
    proof = export.prove(1)
    (change,) = proof.changes
    classes = export.trained.checkpoint.classes
    assert classes.index(change.exported) == (classes.index(change.expected) + 1) % len(classes)
    assert change.expected_probability == change.exported_probability > 1 / len(classes)
    assert (proof.same_class, proof.ties, proof.passed) == (0, 0, False)


def test_proof_finds_class_that_the_run_does_not_have(export: Export, exported: Callable[..., None]) -> None:
    classes = list(export.trained.checkpoint.classes)
    exported(lambda values: np.roll(values, 1, axis=1), classes=classes[:1])
    changes = export.prove().changes
    assert {change.exported for change in changes} <= {"", classes[0]}
    assert "" in {change.exported for change in changes}


def test_proof_finds_other_number_of_classes(export: Export, exported: Callable[..., None]) -> None:
    exported(lambda values: values[:, :-1])
    proof = export.prove()
    (fault,) = proof.faults
    assert proof.images == 0
    assert "(8, 4)" in str(fault) and "(8, 5)" in str(fault)


def test_proof_finds_program_that_fails(export: Export, exported: Callable[..., None]) -> None:
    def fail(values: Probabilities) -> Probabilities:
        raise RuntimeError("first line\nsecond line")

    exported(fail)
    (fault,) = export.prove().faults
    assert str(fault).startswith(FILE) and "first line" in str(fault) and "second" not in str(fault)


@pytest.mark.parametrize(
    ("difference", "passed"), [(MAX_PROGRAM_DIFFERENCE * 0.9, True), (MAX_PROGRAM_DIFFERENCE * 1.1, False)]
)
def test_proof_limits_difference_of_a_probability(
    difference: float, passed: bool, export: Export, exported: Callable[..., None]
) -> None:
    exported(lambda values: values + np.float32(difference) * np.eye(1, values.shape[1], dtype=np.float32))
    proof = export.prove()
    assert proof.max_difference == proof.max_program_difference == pytest.approx(difference, rel=1e-3)
    assert proof.passed is passed
    assert (f"{difference:.2g}" in str(proof.faults)) is not passed


def test_proof_counts_probability_of_one_side_that_is_not_finite(export: Export, exported: Callable[..., None]) -> None:
    exported(lambda values: values * np.float32("nan"))
    proof = export.prove()
    assert proof.max_difference == proof.max_program_difference == float("inf")
    assert not proof.passed


def test_proof_accepts_probabilities_that_are_not_finite_on_both_sides(
    export: Export, exported: Callable[..., None]
) -> None:
    weights = {name: value * torch.nan for name, value in export.trained.checkpoint.weights.items()}
    trained = build_trained_model(replace(export.trained.checkpoint, weights=weights), "cpu")
    exported(lambda values: values * np.float32("nan"))
    proof = Export(trained, export.folder).prove()
    assert (proof.images, proof.same_class, proof.max_difference) == (8, 8, 0.0)


def test_proof_runs_program_again_on_pixels_of_gputrain_where_those_of_script_differ(
    photos: Path, tmp_path: Path, exported: Callable[..., None], preprocessed: Callable[..., None]
) -> None:
    export = export_run(photo_run(photos, tmp_path), tmp_path / "out")
    batches: list[int] = []

    def note(values: Probabilities) -> Probabilities:
        batches.append(len(values))
        return values

    exported(note)
    preprocessed(lambda pixels: pixels ^ 1)
    proof = export.prove(4)
    assert batches == [4, 4]
    assert 0.0 == proof.max_program_difference < proof.max_difference
    assert (proof.max_pixel_difference, proof.passed) == (1, True)


@pytest.mark.parametrize("difference", [MAX_PIXEL_DIFFERENCE, MAX_PIXEL_DIFFERENCE + 1])
def test_proof_limits_difference_of_a_pixel(difference: int, export: Export, preprocessed: Callable[..., None]) -> None:
    preprocessed(lambda pixels: np.where(pixels < 128, pixels + difference, pixels - difference).astype(np.uint8))
    proof = export.prove(0)
    assert proof.max_pixel_difference == difference
    assert proof.passed is (difference == MAX_PIXEL_DIFFERENCE)
    assert proof.passed or str(difference) in str(proof.faults)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda pixels: pixels[:, 1:], ["uint8", "(3, 7, 8)", "(3, 8, 8)"]),
        (lambda pixels: pixels.astype(np.int32), ["int32"]),
        (lambda pixels: pixels.missing, ["rgb.png", "missing"]),
    ],
)
def test_proof_finds_script_that_returns_no_image(
    change: Callable[[NDArray[np.uint8]], NDArray[Any]],
    values: list[str],
    export: Export,
    preprocessed: Callable[..., None],
) -> None:
    preprocessed(change)
    proof = export.prove(0)
    assert len(proof.faults) == proof.samples > 20
    assert [value for value in values if value not in str(proof.faults[0])] == []


def test_proof_names_type_of_error_without_message(export: Export, preprocessed: Callable[..., None]) -> None:
    def fail(pixels: NDArray[np.uint8]) -> NDArray[Any]:
        raise ValueError

    preprocessed(fail)
    assert "ValueError" in str(export.prove(0).faults[0])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", validation=True)


def photo_run(photos: Path, tmp_path: Path) -> RunFolder:
    return saved_run(tmp_path / "run", data={"dataset": "folder", "path": str(photos), "image_size": 8})


def test_proof_reads_files_of_a_folder_through_the_script(photos: Path, tmp_path: Path) -> None:
    proof = export_run(photo_run(photos, tmp_path), tmp_path / "out").prove()
    files = NUM_PHOTOS // 4
    assert (proof.images, proof.same_class, proof.files, proof.passed) == (files, files, True, True)


def test_proof_names_file_of_a_folder(photos: Path, tmp_path: Path, exported: Callable[..., None]) -> None:
    exported(lambda values: values[:, ::-1])
    proof = export_run(photo_run(photos, tmp_path), tmp_path / "out").prove()
    names = {change.image for change in proof.changes}
    assert len(names) == NUM_PHOTOS // 4
    assert names <= {str(path) for path in (photos / "val").rglob("*.*")}


@pytest.fixture
def packed_export(photos: Path, tmp_path: Path) -> Export:
    pack_photos(photos, tmp_path / "shards")
    run = saved_run(tmp_path / "run", data={"dataset": "webdataset", "path": str(tmp_path / "shards"), "image_size": 8})
    return export_run(run, tmp_path / "out")


def test_proof_reads_packed_images_through_the_script(
    photos: Path, packed_export: Export, exported: Callable[..., None]
) -> None:
    proof = packed_export.prove()
    files = NUM_PHOTOS // 4
    assert (proof.images, proof.same_class, proof.files, proof.passed) == (files, files, True, True)
    exported(lambda values: values[:, ::-1])
    named = " ".join(change.image for change in packed_export.prove().changes)
    assert [path.name for path in (photos / "val").rglob("*.*") if f"-{path.name}" not in named] == []


def test_proof_counts_images_that_cannot_be_read(packed_export: Export, tmp_path: Path) -> None:
    shard = tmp_path / "shards" / "val-00000.tar"
    with tarfile.open(shard) as archive:
        offset = archive.getmembers()[0].offset_data
    content = bytearray(shard.read_bytes())
    content[offset] ^= 1
    shard.write_bytes(content)
    proof = packed_export.prove()
    assert (proof.unread, proof.images, proof.passed) == (1, NUM_PHOTOS // 4 - 1, True)


def test_proof_without_images_says_why(export: Export) -> None:
    proof = export.prove(0)
    assert (proof.images, proof.passed, proof.to_record().top1_agreement) == (0, True, None)
    assert proof.not_proved == export_proof.NOT_REQUESTED


def test_proof_does_not_import_dataset_that_somebody_else_named(export: Export) -> None:
    checkpoint = export.trained.checkpoint
    config = checkpoint.config.model_copy(
        update={"data": checkpoint.config.data.model_copy(update={"dataset": "theirs:Images"})}
    )
    trust = CodeTrust(foreign={"data.dataset": "planted"})
    trained = replace(export.trained, checkpoint=replace(checkpoint, config=config, code_trust=trust))
    proof = Export(trained, export.folder).prove()
    assert proof.images == 0
    assert "theirs:Images" in str(proof.not_proved) and "planted" in str(proof.not_proved)


@pytest.mark.parametrize("key", ["eval.tta", "data.val_resize", "data.val_crop", "data.fit", "data.interpolation"])
def test_proof_refuses_override_that_changes_the_export(key: str, export: Export) -> None:
    with pytest.raises(UsageError) as error:
        proof_config(export.trained.checkpoint, ["data.val_images=5", f" {key} =flip"])
    assert [problem.location for problem in error.value.problems] == [key]


def test_proof_description_names_the_script_only_if_it_read_files() -> None:
    proof = Proof(images=3, same_class=1, max_difference=0.0123)
    assert "preprocess.py" not in proof.describe(FILE)
    proof.files = True
    described = proof.describe(FILE)
    assert [part for part in (FILE, "3", "preprocess.py", "1 of 3", "0.012") if part not in described] == []


def test_proof_description_counts_ties_only_if_there_are_some() -> None:
    proof = Proof(images=3, same_class=3)
    without = proof.describe(FILE)
    proof.ties = 2
    assert proof.describe(FILE).startswith(without)
    assert "2 images" in proof.describe(FILE).removeprefix(without)


def test_proof_description_marks_text_from_outside_as_code(export: Export, exported: Callable[..., None]) -> None:
    exported(lambda values: np.roll(values, 1, axis=1))
    proof = export.prove(1)
    marked = [f"<{fault}>." for fault in proof.faults]
    assert marked
    assert proof.describe(FILE, lambda text: f"<{text}>").endswith(" ".join(marked))
    unproved = export.prove(0)
    assert f"<{unproved.not_proved}>." in unproved.describe(FILE, lambda text: f"<{text}>")


def test_proof_stores_faults_and_missing_comparison_with_their_codes() -> None:
    proof = Proof(not_proved=Problem("data.path", "is gone", code="not-found"))
    proof.add_fault("a class is missing", code="conflict")
    values = json.loads(encode(proof.to_record()))
    assert values["not_proved"] == {"code": "not-found", "message": "data.path: is gone"}
    assert values["faults"] == [{"code": "conflict", "message": "a class is missing"}]


def test_proof_stores_a_bounded_number_of_changes_and_no_nan() -> None:
    change = ClassChange(
        image="a.jpg", expected="cat", expected_probability=0.75, exported="dog", exported_probability=finite(math.nan)
    )
    count = MAX_STORED_CHANGES + 1
    proof = Proof(images=50, same_class=10, max_difference=float("inf"), changes=[change] * count)
    values = json.loads(encode(proof.to_record()))
    assert (values["another_class"], len(values["changes"])) == (count, MAX_STORED_CHANGES)
    assert (values["passed"], values["top1_agreement"], values["max_difference"]) == (True, 0.2, None)
    assert values["changes"][0] == {
        "image": "a.jpg",
        "expected": "cat",
        "expected_probability": 0.75,
        "exported": "dog",
        "exported_probability": None,
    }
    json.dumps(values, allow_nan=False)
