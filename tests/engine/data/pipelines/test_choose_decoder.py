"""The decoder of a run: what the config decides, and what both decoders' measured rates decide."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.loader import ConfigError, resolve_config
from engine.config.pipeline import DecoderName, PipelineName
from engine.data.pipelines import choose_decoder as choosing
from engine.data.pipelines import measure_decoders as measuring
from engine.data.pipelines.batch import BatchDataset
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.choose_decoder import DecoderChoice, DecoderSwitch, choose_decoder, decoder_problems
from engine.data.pipelines.gpu_decoder import DecoderUnavailableError
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.pipelines.measure_decoders import measure_decoders
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageSource
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.utils.errors import not_installed
from support.data.packed_photos import write_photos
from support.messages import raises_problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "find_spec", lambda name: find_spec("torch"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), 48)


def choose(
    photos: Path,
    *keys: str,
    pipeline: PipelineName = "stream",
    on_gpu: bool = True,
    recorded: DecoderName | None = None,
) -> DecoderChoice:
    config = resolve_config(None, ["data.dataset=folder", f"data.path={photos}", *keys]).config
    source: ImageSource = open_source(config)
    image_format = model_input_format(config, source)
    return choose_decoder(config, source, image_format, pipeline, on_gpu=on_gpu, recorded=recorded)


def test_choose_decoder_leaves_auto_to_measurement_on_gpu(photos: Path) -> None:
    assert choose(photos) == DecoderChoice(None)
    assert choose(photos, on_gpu=False) == DecoderChoice("cpu")
    assert choose(photos, pipeline="memory") == DecoderChoice("cpu")


@pytest.mark.parametrize("key", ["augment.hue=0.1", "data.interpolation=lanczos", "device.parallel=dp"])
def test_choose_decoder_says_why_auto_is_cpu(photos: Path, key: str) -> None:
    choice = choose(photos, key)
    assert choice.decoder == "cpu"
    assert key.partition("=")[0] in choice.reason


def test_choose_decoder_is_cpu_without_torchcodec(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    assert choose(photos) == DecoderChoice("cpu", not_installed("torchcodec"))
    with raises_problem("not-supported", "data.decoder", not_installed("torchcodec")):
        choose(photos, "data.decoder=gpu")


def test_choose_decoder_takes_key(photos: Path) -> None:
    assert choose(photos, "data.decoder=cpu") == DecoderChoice("cpu")
    assert choose(photos, "data.decoder=gpu") == DecoderChoice("gpu", "set by data.decoder")
    assert choose(photos, "data.decoder=gpu", recorded="cpu").decoder == "gpu"


def test_choose_decoder_keeps_that_of_resumed_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(photos, recorded="gpu").decoder == "gpu"
    assert choose(photos, recorded="cpu").decoder == "cpu"
    on_cpu = choose(photos, recorded="gpu", on_gpu=False)
    assert on_cpu == DecoderChoice("cpu", "gpu before it was resumed; now this run is on the CPU")


def test_decoder_problems_names_missing_device(photos: Path) -> None:
    config = resolve_config(None, ["data.dataset=folder", f"data.path={photos}", "data.decoder=gpu"]).config
    assert decoder_problems(config, on_gpu=True) == []
    assert [problem.location for problem in decoder_problems(config, on_gpu=False)] == ["data.decoder"]


@pytest.mark.parametrize(
    "key",
    [
        "data.dataset=digits",
        "data.pipeline=memory",
        "data.pipeline=fixed",
        "device.gpus=cpu",
        "device.parallel=dp",
        "augment.policy=randaugment",
        "data.interpolation=nearest",
    ],
)
def test_gpu_decoder_conflicts_with(key: str) -> None:
    dataset = [] if "dataset" in key else ["data.dataset=folder", "data.path=photos"]
    with pytest.raises(ConfigError) as raised:
        resolve_config(None, [*dataset, "data.decoder=gpu", key])
    assert [problem.location for problem in raised.value.problems] == ["data.decoder"]


def test_decoder_switch_holds_other_threads_until_it_is_set() -> None:
    switch, received = DecoderSwitch(None), list[DecoderName]()
    thread = threading.Thread(target=lambda: received.append(switch.wait()))
    thread.start()
    thread.join(0.05)
    assert received == []
    switch.set("gpu")
    thread.join(10)
    assert received == ["gpu"]


def test_input_pipeline_decides_for_waiting_processes_after_an_error(photos: Path) -> None:
    config = resolve_config(None, ["data.dataset=folder", f"data.path={photos}"]).config
    source = open_source(config)
    pipeline = InputPipeline(
        PipelineChoice("stream", ""),
        source,
        config,
        model_input_format(config, source),
        [BatchRequest("train", 1, np.arange(2))],
        1,
        decoder_choice=DecoderChoice(None),
    )
    with pytest.raises(ValueError, match="no device"), pipeline.decided_afterwards():
        raise ValueError("no device")
    assert len(next(pipeline.device_loader(CPU)).labels) == 2


def open_photos(folder: Path) -> tuple[EncodedSource, BatchDataset]:
    config = resolve_config(None, ["data.dataset=folder", f"data.path={folder}", "data.image_size=32"]).config
    source = open_source(config)
    assert isinstance(source, EncodedSource)
    return source, BatchDataset(source, config, model_input_format(config, source))


def measure(photos: Path, monkeypatch: pytest.MonkeyPatch, cpu: float, gpu: float, prepare: float) -> DecoderChoice:
    """Measure with these seconds for a batch instead of those of a clock."""
    source, dataset = open_photos(photos)
    seconds = iter([cpu, prepare])
    load = measuring._load
    monkeypatch.setattr(measuring, "_load", lambda start: (next(seconds), load(start)[1]))
    monkeypatch.setattr(measuring, "_decode_seconds", lambda *_: gpu)
    monkeypatch.setattr(measuring, "check_nvjpeg", lambda _: None)
    return measure_decoders(source, dataset, BatchRequest("train", 1, np.arange(20)), CPU, 4)


@pytest.mark.parametrize(
    ("seconds", "decoder", "gpu_rate"),
    [
        ((1.0, 0.2, 0.1), "gpu", 100),
        # 4 threads prepare 40 images/s at most.
        ((1.0, 0.2, 2.0), "cpu", 40),
        # 1.1 times as fast is not enough.
        ((1.0, 0.227, 0.1), "cpu", 88),
    ],
)
def test_measure_decoders_takes_gpu_if_it_is_clearly_faster(
    photos: Path, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float, float], decoder: str, gpu_rate: int
) -> None:
    choice = measure(photos, monkeypatch, *seconds)
    assert choice.decoder == decoder
    assert choice.reason == f"nvJPEG decodes {gpu_rate} images/s, 4 CPU threads 80"


def test_measure_decoders_takes_cpu_if_nvjpeg_does_not_work(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise DecoderUnavailableError("nvJPEG does not work on cuda:0 (no driver)", code="driver-unavailable")

    source, dataset = open_photos(photos)
    monkeypatch.setattr(measuring, "check_nvjpeg", fail)
    choice = measure_decoders(source, dataset, BatchRequest("train", 1, np.arange(20)), CPU, 4)
    assert choice == DecoderChoice("cpu", "nvJPEG does not work on cuda:0 (no driver)")


def test_measure_decoders_takes_cpu_if_gpu_has_too_little_memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    source, dataset = open_photos(photos)
    monkeypatch.setattr(measuring, "check_nvjpeg", lambda _: None)
    monkeypatch.setattr(measuring, "_decode_seconds", run_out_of_memory)
    choice = measure_decoders(source, dataset, BatchRequest("train", 1, np.arange(4)), CPU, 4)
    assert choice == DecoderChoice("cpu", "nvJPEG needs more memory than the GPU has free")


def test_measure_decoders_takes_cpu_for_few_plain_files(photos: Path, tmp_path: Path) -> None:
    other = write_photos(tmp_path / "other", 12)
    source, dataset = open_photos(other)
    png = [row for row, name in enumerate(source.image_names("train")) if name.endswith("png")]
    choice = measure_decoders(source, dataset, BatchRequest("train", 1, np.array(png)), CPU, 4)
    assert choice == DecoderChoice("cpu", f"only 0 of the first {len(png)} images are baseline JPEG files")


def test_measure_decoders_takes_cpu_for_files_larger_than_their_pixels(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MAX_SIZE_RATIO", 0.1)
    choice = measure(photos, monkeypatch, 1.0, 0.2, 0.1)
    assert choice.decoder == "cpu"
    assert "gputrain data pack makes them smaller" in choice.reason
