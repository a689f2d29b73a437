"""The README.md of an export: how to use the model, and how it agrees with `gputrain predict`.

Called by `engine.train.inference.export`. The code runs in the folder of the export, without gputrain unless the
architecture is one of gputrain or of the user. Text from outside, such as the name of the run, is shown in Markdown
code spans, in which neither HTML nor Markdown has a meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.base.text import printable
from engine.config.tasks import task_facts
from engine.train.inference.export_program import INPUT_NAME
from engine.train.inference.export_proof import Proof
from engine.train.inference.model_json import ExportFormat, ModelDescription
from engine.train.inference.trained_model import TrainedCheckpoint
from engine.train.loop.tasks.base import Activation, Task
from engine.train.models.catalog import resolve_model_source
from engine.train.models.factory import timm_img_size_kwargs, torchvision_kwargs

MAX_VALUE_CHARACTERS = 200

_ONNX = """\
import json, numpy, onnxruntime
from preprocess import load

session = onnxruntime.InferenceSession("{file}")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
task = json.loads(session.get_modelmeta().custom_metadata_map["task"])
outputs = session.run(None, {{"{input}": numpy.stack([load("photo.jpg")])}})[0][0]
"""
_TORCH_EXPORT = """\
import json, torch
from preprocess import load

files = {{"classes.json": "", "task.json": ""}}
model = torch.export.load("{file}", extra_files=files).module()
classes, task = json.loads(files["classes.json"]), json.loads(files["task.json"])
outputs = model(torch.from_numpy(load("photo.jpg"))[None])[0].numpy()
"""
_SAFETENSORS = """\
import json, torch{imports}
from preprocess import load
from safetensors.torch import load_file

info = json.load(open("model.json"))
classes, task = info["classes"], info["task"]
model = {build}
model.load_state_dict(load_file("{file}"))
model.eval()
mean, std = (torch.tensor(info["image"][name]).view(-1, 1, 1) for name in ("mean", "std"))
with torch.inference_mode():
    image = ((torch.from_numpy(load("photo.jpg")) / 255 - mean) / std)[None]
    logits = {logits}
outputs = {activation}
"""
_ACTIVATIONS: Mapping[Activation, str] = {
    "softmax": "logits.softmax(0).numpy()",
    "sigmoid": "logits.sigmoid().numpy()",
    "unscale": 'logits.numpy() * task["std"] + task["mean"]',
}
_GPUTRAIN_BUILD = 'build_model(validate_config({{"model": info["model"]}}), {channels}, {classes}, {size})'
_GPUTRAIN_IMPORTS = (
    "\nfrom engine.config.loader import validate_config\nfrom engine.train.models.factory import build_model"
)


def model_card(
    checkpoint: TrainedCheckpoint, description: ModelDescription, proof: Proof, file_name: str, task: Task
) -> str:
    """Return the README.md of an export. `description` is the content of its model.json with the written file."""
    packages, lines = loading_code(checkpoint, file_name, description.files[file_name].format, task)
    model, facts, count = code(checkpoint.config.model.name), task_facts(checkpoint.config), len(checkpoint.classes)
    return (
        f"# {code(description.run)}\n\n{facts.model} with {count} {facts.outputs}: {model}, trained with gputrain. "
        f"`model.json` has its {facts.outputs}, its input, its {facts.per_output} and where it comes from."
        "\n\n## Use\n\n"
        f"In the folder of {code(file_name)} and `preprocess.py`, with `pip install {packages}`:\n\n"
        f"```python\n{lines}```\n\n## Agreement\n\n{code(proof.describe(file_name))}\n"
    )


def code(value: str) -> str:
    """Return text from outside as a Markdown code span, without control characters and shortened."""
    text = printable(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    # A span ends at a run of as many backticks as it began with, and loses one space at each end (CommonMark 6.1).
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    text = f" {text} " if not text.strip() or text[0] in "` " or text[-1] in "` " else text
    return f"{fence}{text}{fence}"


def loading_code(
    checkpoint: TrainedCheckpoint, file_name: str, file_format: ExportFormat, task: Task
) -> tuple[str, str]:
    """Return the packages to install, and code that prints the prediction for `photo.jpg`."""
    if file_format == "onnx":
        return "onnxruntime pillow numpy", _ONNX.format(file=file_name, input=INPUT_NAME) + task.example
    if file_format == "torch-export":
        return "torch pillow numpy", _TORCH_EXPORT.format(file=file_name) + task.example
    package, imports, build = _architecture(checkpoint)
    activation = _ACTIVATIONS[task.activation]
    average = checkpoint.config.eval.tta == "flip"
    logits = "(model(image)[0] + model(image.flip(-1))[0]) / 2" if average else "model(image)[0]"
    text = _SAFETENSORS.format(file=file_name, imports=imports, build=build, logits=logits, activation=activation)
    return f"torch safetensors pillow numpy {package}", text + task.example


def _architecture(checkpoint: TrainedCheckpoint) -> tuple[str, str, str]:
    """Return the package that has the architecture, its imports, and the expression that builds it."""
    model, images, classes = checkpoint.config.model, checkpoint.image_format, len(checkpoint.classes)
    source = resolve_model_source(model)
    options: dict[str, object] = {"num_classes": classes}
    if source == "timm":
        options |= {"in_chans": images.channels, **timm_img_size_kwargs(model.name, images.size), **model.options}
        return "timm", ", timm", _call("timm.create_model", model.name, options)
    if source == "torchvision" and images.channels == 3:
        options |= {**torchvision_kwargs(model.name, images.size, init_weights=False), **model.options}
        return "torchvision", ", torchvision", _call("torchvision.models.get_model", model.name, options)
    build = _GPUTRAIN_BUILD.format(channels=images.channels, classes=classes, size=images.size)
    return "gputrain", _GPUTRAIN_IMPORTS, build


def _call(function: str, name: str, options: dict[str, object]) -> str:
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"{function}({name!r}{arguments})"
