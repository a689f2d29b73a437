"""The Python code that loads an exported file and classifies an image, for the model card.

It runs in the folder of the export, without gputrain unless the architecture is one of gputrain or of the user.
"""

from __future__ import annotations

from engine.inference.export_program import INPUT_NAME
from engine.inference.model_json import ExportFormat
from engine.inference.trained_model import TrainedCheckpoint
from engine.models.factory import resolve_model_source, timm_img_size_kwargs, torchvision_kwargs

_ONNX = """\
import json, numpy, onnxruntime
from preprocess import load

session = onnxruntime.InferenceSession("{file}")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
[probabilities] = session.run(None, {{"{input}": numpy.stack([load("photo.jpg")])}})
for index in probabilities[0].argsort()[::-1][:5]:
    print(f"{{probabilities[0][index]:.4f}}  {{classes[index]}}")
"""
_TORCH_EXPORT = """\
import json, torch
from preprocess import load

files = {{"classes.json": ""}}
model = torch.export.load("{file}", extra_files=files).module()
classes = json.loads(files["classes.json"])
probabilities = model(torch.from_numpy(load("photo.jpg"))[None])[0]
for index in probabilities.argsort(descending=True)[:5]:
    print(f"{{probabilities[index]:.4f}}  {{classes[index]}}")
"""
_SAFETENSORS = """\
import json, torch{imports}
from preprocess import load
from safetensors.torch import load_file

info = json.load(open("model.json"))
model = {build}
model.load_state_dict(load_file("{file}"))
model.eval()
mean, std = (torch.tensor(info["image"][name]).view(-1, 1, 1) for name in ("mean", "std"))
with torch.inference_mode():
    image = ((torch.from_numpy(load("photo.jpg")) / 255 - mean) / std)[None]
    logits = {logits}
probabilities = logits.{activation}
for index in probabilities.argsort(descending=True)[:5]:
    print(f"{{probabilities[index]:.4f}}  {{info['classes'][index]}}")
"""
_GPUTRAIN_BUILD = 'build_model(validate_config({{"model": info["model"]}}), {channels}, {classes}, {size})'
_GPUTRAIN_IMPORTS = "\nfrom engine.config.loader import validate_config\nfrom engine.models.factory import build_model"


def loading_code(checkpoint: TrainedCheckpoint, file_name: str, file_format: ExportFormat) -> tuple[str, str]:
    """Return the packages to install, and code that prints the most likely classes of `photo.jpg`."""
    if file_format == "onnx":
        return "onnxruntime pillow numpy", _ONNX.format(file=file_name, input=INPUT_NAME)
    if file_format == "torch-export":
        return "torch pillow numpy", _TORCH_EXPORT.format(file=file_name)
    package, imports, build = _architecture(checkpoint)
    activation = "sigmoid()" if checkpoint.config.loss.name == "bce" else "softmax(0)"
    average = checkpoint.config.eval.tta == "flip"
    logits = "(model(image)[0] + model(image.flip(-1))[0]) / 2" if average else "model(image)[0]"
    text = _SAFETENSORS.format(file=file_name, imports=imports, build=build, logits=logits, activation=activation)
    return f"torch safetensors pillow numpy {package}", text


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
