"""Write the file of an exported model: safetensors, a torch.export program or ONNX; and load it again to run it.

The programs contain the normalization, the network and what follows from its logits, and take uint8 images. safetensors
files contain the weights alone. `engine.train.inference.export` writes, `engine.train.inference.export_proof` loads and
runs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.base.codec import decode, encode
from engine.base.errors import UsageError
from engine.base.files import replace_file
from engine.base.libraries import import_library
from engine.config.training_sections import EvalConfig
from engine.config.user_code import is_user_code
from engine.config.user_errors import describe_exception
from engine.train.data.augment.batch_ops import normalize
from engine.train.data.sources.base import Images
from engine.train.inference.model_json import ExportFormat, ModelDescription
from engine.train.inference.trained_model import TrainedCheckpoint, TrainedModel, build_architecture
from engine.train.models.tta import augmented_logits

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MODEL_FILES: dict[ExportFormat, str] = {
    "safetensors": "model.safetensors",
    "torch-export": "model.pt2",
    "onnx": "model.onnx",
}
ONNX_LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
# A protobuf message is limited to 2 GiB; the rest of the graph takes a few MB.
MAX_ONNX_WEIGHT_BYTES = (1 << 31) - (1 << 26)
INPUT_NAME, BATCH_NAME = "images", "batch"
# What a program says about itself, each as JSON: the keys of model.json.
METADATA = ("classes", "run", "task")
FORMAT_KEY = "--format"
SAFETENSORS_ADVICE = "use --format safetensors"
# A batch of one could be specialized: torch.export treats sizes 0 and 1 as constants.
EXAMPLE_BATCH = 2

# Maps uint8 images, N x C x H x W, to probabilities or numbers, N x classes, float32.
Predict = Callable[[Images], NDArray[np.float32]]


class ExportedNetwork(nn.Module):
    """Maps uint8 images, N x C x H x W, to probabilities or numbers, N x classes, float32, as model.json says."""

    def __init__(self, network: nn.Module, description: ModelDescription) -> None:
        super().__init__()
        self.network = network
        self.evaluation = EvalConfig(tta=description.tta)
        self.output = description.output
        image, task = description.image, description.task
        stats = torch.tensor((image.mean, image.std), dtype=torch.float32).view(2, 1, -1, 1, 1)
        self.mean, self.std = map(nn.Buffer, stats)
        if self.output == "unscale":
            self.scale, self.offset = map(nn.Buffer, torch.tensor((task.std, task.mean), dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        logits = augmented_logits(self.network, normalize(images, self.mean, self.std), self.evaluation).float()
        if self.output == "unscale":
            return logits * self.scale + self.offset
        return logits.sigmoid() if self.output == "sigmoid" else logits.softmax(1)


def output_name(description: ModelDescription) -> str:
    """Return the name of the output of a program."""
    return "numbers" if description.output == "unscale" else "probabilities"


def require_libraries(file_format: ExportFormat) -> None:
    """Raise UsageError if the libraries of an export format are missing."""
    if file_format == "onnx":
        for library in ONNX_LIBRARIES:
            import_library(library, FORMAT_KEY)


def write_model_file(
    trained: TrainedModel, file_format: ExportFormat, path: Path, description: ModelDescription
) -> None:
    """Write a model on the CPU. `description` is the content of its model.json.

    Raises UsageError if the model cannot be exported in this format, and OSError.
    """
    metadata = {name: encode(getattr(description, name)).decode() for name in METADATA}
    if file_format == "safetensors":
        from safetensors.torch import save

        weights = standalone_state_dict(trained.model.state_dict())
        content = save(weights, {"format": "pt", "classes": metadata["classes"], "task": metadata["task"]})
        replace_file(path, lambda file: file.write(content), durable=True)
        return
    program = _trace(trained, description)
    if file_format == "torch-export":
        with _quiet():
            files = {f"{name}.json": text for name, text in metadata.items()}
            replace_file(path, lambda file: torch.export.save(program, file, extra_files=files), durable=True)
    else:
        content = _to_onnx(program, trained, output_name(description), metadata)
        replace_file(path, lambda file: file.write(content), durable=True)


def standalone_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy each tensor to contiguous CPU memory of its own, floating-point tensors as float32.

    safetensors cannot save tensors that share memory.
    """
    return {
        name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype).contiguous().clone()
        for name, value in state.items()
    }


def _trace(trained: TrainedModel, description: ModelDescription) -> ExportedProgram:
    """Trace the program of a model with a batch of any size. Raises UsageError."""
    checkpoint = trained.checkpoint
    image, program = description.image, ExportedNetwork(trained.model, description).eval()
    example = torch.zeros(EXAMPLE_BATCH, image.channels, image.size, image.size, dtype=torch.uint8)
    try:
        with _quiet():
            traced = torch.export.export(
                program, (example,), dynamic_shapes={INPUT_NAME: {0: torch.export.Dim(BATCH_NAME)}}
            )
    except Exception as error:
        # The tracer raises many types, also those of the user's model.
        reason = f"torch.export cannot trace {_describe_failure(checkpoint, error)}"
        raise UsageError.one(FORMAT_KEY, reason, SAFETENSORS_ADVICE, code="not-supported") from error
    for node in traced.graph.nodes:
        # The paths of this machine are no part of the model.
        node.meta.pop("stack_trace", None)
    return traced


def _to_onnx(program: ExportedProgram, trained: TrainedModel, output: str, metadata: Mapping[str, str]) -> bytes:
    """Return a traced program as ONNX. Raises UsageError."""
    size = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    if size > MAX_ONNX_WEIGHT_BYTES:
        reason = f"the weights take {size / (1 << 30):.1f} GiB, but an ONNX file has at most 2 GiB"
        raise UsageError.one(FORMAT_KEY, reason, "use --format torch-export", code="too-large")
    try:
        with _quiet():
            exported: Any = torch.onnx.export(
                program,
                (),
                dynamo=True,
                input_names=[INPUT_NAME],
                output_names=[output],
                dynamic_shapes={INPUT_NAME: {0: BATCH_NAME}},
                verbose=False,
            )
            model = exported.model_proto
    except Exception as error:
        reason = f"ONNX has no operators for {_describe_failure(trained.checkpoint, error)}"
        raise UsageError.one(FORMAT_KEY, reason, SAFETENSORS_ADVICE, code="not-supported") from error
    for name, text in metadata.items():
        model.metadata_props.add(key=name, value=text)
    graph = model.graph
    nodes = (*graph.node, *(node for function in model.functions for node in function.node))
    for part in (*graph.input, *graph.output, *graph.value_info, *nodes):
        # The paths of this machine are no part of the model.
        del part.metadata_props[:]
    content: bytes = model.SerializeToString()
    return content


def _describe_failure(checkpoint: TrainedCheckpoint, error: Exception) -> str:
    """Return the name of the model, and why it cannot be exported."""
    name, run = checkpoint.config.model.name, checkpoint.config.run
    if is_user_code(name):
        reason = describe_exception(error, run.code, run.code_packages)
    else:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{name}: {reason.rstrip('. ')}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporters of torch print, log and warn about from the user's terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def load_export(
    path: Path, description: ModelDescription, checkpoint: TrainedCheckpoint
) -> tuple[Predict, Sequence[str]]:
    """Load an exported file as another program does, from the file and `description`, the content of its model.json.
    Return its function, and the class names in the file.

    `checkpoint` names the architecture of a safetensors file. Raises UsageError for code of somebody else, and any
    exception of the libraries for a file that is damaged or does not match.
    """
    if path.suffix == ".onnx":
        return _load_onnx(path)
    if path.suffix == ".pt2":
        files = {"classes.json": ""}
        with _quiet():
            program: Any = torch.export.load(str(path), extra_files=files).module()
        return _as_predict(program), decode(files["classes.json"], list[str])
    from safetensors import safe_open
    from safetensors.torch import load_file

    network = build_architecture(checkpoint)
    network.load_state_dict(load_file(path))
    program = ExportedNetwork(network.float().eval(), description)
    with safe_open(path, "pt") as file:
        return _as_predict(program), decode(file.metadata()["classes"], list[str])


def _load_onnx(path: Path) -> tuple[Predict, Sequence[str]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # It prints warnings about its own graph optimizations on stderr.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def predict(images: Images) -> NDArray[np.float32]:
        probabilities: NDArray[np.float32] = session.run(None, {INPUT_NAME: images})[0]
        return probabilities

    return predict, decode(session.get_modelmeta().custom_metadata_map["classes"], list[str])


def _as_predict(program: nn.Module) -> Predict:
    def predict(images: Images) -> NDArray[np.float32]:
        with torch.inference_mode():
            probabilities: Tensor = program(torch.from_numpy(images))
        return np.asarray(probabilities.numpy(), np.float32)

    return predict
