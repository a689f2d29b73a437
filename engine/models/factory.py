"""Models by name: our own networks for small images, torchvision's, timm's, and what the user's own code builds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.config.user_code import describe_exception, is_user_code, load_user_code
from engine.models.builtin import BUILTIN_BUILDERS
from engine.utils.errors import Problem, UsageError, did_you_mean, not_installed

ModelSource = Literal["own", "builtin", "torchvision", "timm"]

# Options of torchvision's MobileNetV3 that the signature of its class does not tell.
_MOBILENET_V3_OPTIONS = ("width_mult", "reduced_tail", "dilated")

# Of the options of timm's builders those that would bring in weights; model.weights does.
_TIMM_WEIGHT_OPTIONS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")


def build_model(config: Config, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The model for images of C x size x size, with random weights. Raises UsageError for an unknown name, wrong
    options, or images that do not suit."""
    model = config.model
    source = resolve_model_source(model)
    if source == "own":
        built = build_user_model(config, channels, num_classes, image_size)
    elif source == "builtin":
        try:
            built = call_builder(model, BUILTIN_BUILDERS[model.name], channels, num_classes, image_size)
        except (TypeError, ValueError) as error:
            raise UsageError.one(
                "model.options", f"{model.name} cannot be made with {model.options}: {error}"
            ) from error
    elif source == "torchvision":
        built = build_torchvision_model(model, channels, num_classes, image_size)
    else:
        built = build_timm_model(model, channels, num_classes, image_size)
    if model.init == "normal":
        init_normal(built, model.init_std)
    return built


def resolve_model_source(model: ModelConfig) -> ModelSource:
    """Whose model it is: the user's own, or of the first of ours, torchvision's and timm's to have one of that name.
    Raises UsageError."""
    name, wanted = model.name, model.source
    if wanted == "auto" and is_user_code(name):
        return "own"
    known: list[str] = []
    if wanted in ("auto", "builtin"):
        if name in BUILTIN_BUILDERS:
            return "builtin"
        known += BUILTIN_BUILDERS
    if wanted in ("auto", "torchvision"):
        names = torchvision_model_names()
        if name in names:
            return "torchvision"
        known += names
    if wanted in ("auto", "timm"):
        if find_spec("timm") is None:
            if wanted == "timm":
                raise UsageError.one("model.source", not_installed("timm"))
            hint = f"{did_you_mean(name, known)} ({not_installed('timm')})"
            raise UsageError.one("model.name", f"there is no model {name!r}{hint}")
        import timm

        if timm.is_model(name):
            return "timm"
        known += timm.list_models()
    whose = "" if wanted == "auto" else f" {wanted}"
    raise UsageError.one("model.name", f"there is no{whose} model {name!r}{did_you_mean(name, known)}")


def torchvision_model_names() -> list[str]:
    """torchvision's classification models."""
    from torchvision import models

    return [str(name) for name in models.list_models(module=models)]


def build_user_model(config: Config, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """What the user's own code makes of the numbers that its signature names, and of `model.options`."""
    name, folder = config.model.name, config.run.code
    builder = load_user_code("model.name", name, folder)
    if isinstance(builder, nn.Module):
        raise UsageError.one("model.name", f"{name} is a model, and must be a function or a class that makes one")
    try:
        built = call_builder(config.model, builder, channels, num_classes, image_size)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError.one("model.name", f"{name} failed: {describe_exception(error, folder)}") from error
    if not isinstance(built, nn.Module):
        raise UsageError.one("model.name", f"{name} must return a torch.nn.Module, not {type(built).__name__}")
    return built


def call_builder(
    model: ModelConfig, builder: Callable[..., Any], channels: int, num_classes: int, image_size: int
) -> Any:
    """Call with the numbers that the signature names, by any of their usual names, and with `model.options`. Raises
    UsageError for options that the signature does not know or lacks."""
    numbers = {
        **dict.fromkeys(("channels", "in_channels", "in_chans"), channels),
        **dict.fromkeys(("classes", "num_classes"), num_classes),
        **dict.fromkeys(("size", "image_size", "img_size"), image_size),
    }
    parameters = inspect.signature(builder).parameters
    ours = {name: number for name, number in numbers.items() if name in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [name for name, parameter in parameters.items() if parameter.kind in named and name not in ours]
    problems = _reserved_option_problems(model, ours)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = [name for name in model.options if name not in parameters]
        problems += [_unknown_option_problem(model.name, name, takes) for name in unknown]
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in model.options:
            problems.append(Problem("model.options", f"{model.name} needs {name}; give it here"))
    if problems:
        raise UsageError(problems)
    return builder(**ours, **model.options)


def build_torchvision_model(model: ModelConfig, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """torchvision's model with random weights, its head made for `num_classes` and its stem for `channels`."""
    from torchvision import models

    ours: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if model.name in ("googlenet", "inception_v3"):
        ours |= {"aux_logits": False, "init_weights": True}
    elif model.name.startswith("vit_"):
        ours |= {"image_size": image_size}
    elif model.name == "maxvit_t":
        ours |= {"input_size": (image_size, image_size)}
    built = _build_library_model(model, models.get_model, ours, image_size)
    takes = inspect.signature(type(built)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        # ConvNeXt and MobileNetV3 take any option in silence.
        known = [
            *_optional_arguments(built, ours),
            *(_MOBILENET_V3_OPTIONS if model.name.startswith("mobilenet_v3") else ()),
        ]
        if unknown := [name for name in model.options if name not in (*takes, *known)]:
            raise UsageError([_unknown_option_problem(model.name, name, known) for name in unknown])
    if channels != 3:
        replace_stem(built, channels)
    if hasattr(built, "transform_input"):
        setattr(built, "transform_input", False)  # noqa: B010 - a module types its attributes as modules
    return built


def build_timm_model(model: ModelConfig, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """timm's model with random weights, made for `num_classes`, `channels` and, where it is made for one size,
    `image_size`."""
    import timm

    ours: dict[str, Any] = {"pretrained": False, "num_classes": num_classes, "in_chans": channels}
    ours |= timm_img_size_kwargs(model.name, image_size)
    return _build_library_model(model, timm.create_model, ours, image_size, forbidden_options=_TIMM_WEIGHT_OPTIONS)


def timm_img_size_kwargs(name: str, image_size: int) -> dict[str, Any]:
    """The argument for the size of images, for those of timm's models that are made for one."""
    import timm

    try:
        known = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = sorted(timm.list_pretrained(f"{name.partition('.')[0]}.*"))
        raise UsageError.one("model.name", f"timm knows no weights {name!r}{did_you_mean(name, tags)}") from error
    return {"img_size": image_size} if known is not None and known.fixed_input_size else {}


def _build_library_model(
    model: ModelConfig,
    builder: Callable[..., nn.Module],
    derived_kwargs: dict[str, Any],
    image_size: int,
    forbidden_options: Iterable[str] = (),
) -> nn.Module:
    if problems := _reserved_option_problems(model, [*derived_kwargs, *forbidden_options]):
        raise UsageError(problems)
    try:
        return builder(model.name, **derived_kwargs, **model.options)
    except Exception as error:
        # The libraries check little, so a wrong option ends in any error.
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found and found[1] in model.options:
            known = _optional_arguments(builder(model.name, **derived_kwargs), derived_kwargs)
            raise UsageError([_unknown_option_problem(model.name, found[1], known)]) from error
        text = str(error).partition("\n")[0] or type(error).__name__
        options = f" with {model.options}" if model.options else ""
        key = "model.options" if model.options else "model.name"
        raise UsageError.one(
            key, f"{model.name} cannot be made for images of {image_size}x{image_size}{options}: {text}"
        ) from error


def _optional_arguments(model: nn.Module, reserved: Iterable[str]) -> list[str]:
    """Arguments of a model's class that may be left out; those that may not its library gives itself."""
    takes = inspect.signature(type(model)).parameters.values()
    return [one.name for one in takes if one.default is not one.empty and one.name not in reserved]


def _reserved_option_problems(model: ModelConfig, reserved: Iterable[str]) -> list[Problem]:
    """Options that are not the user's to give."""
    taken = [name for name in reserved if name in model.options]
    return [
        Problem("model.options", f"{name} follows from the data and the other keys; leave it out") for name in taken
    ]


def _unknown_option_problem(model_name: str, option: str, known: list[str]) -> Problem:
    takes = did_you_mean(option, known) or (f"; it takes {', '.join(known)}" if known else "; it takes none")
    return Problem("model.options", f"{model_name} takes no {option!r}{takes}")


def first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """The one that sees the images, by order of definition, and its name."""
    return next(((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d)), None)


def replace_stem(model: nn.Module, channels: int) -> None:
    """Put a fresh convolution that takes `channels` in the place of the model's first."""
    found = first_convolution(model)
    assert found is not None  # noqa: S101 - each of torchvision's models begins with one
    path, stem = found
    fresh = nn.Conv2d(
        channels,
        stem.out_channels,
        stem.kernel_size,  # type: ignore[arg-type]
        stem.stride,  # type: ignore[arg-type]
        stem.padding,  # type: ignore[arg-type]
        bias=stem.bias is not None,
    )
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)


def init_normal(model: nn.Module, std: float) -> None:
    """Weights of convolutions and linear layers from a normal distribution around 0, their biases 0."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))


def check_model(model: nn.Module, name: str, channels: int, image_size: int, num_classes: int) -> None:
    """Raises UsageError where the model cannot take the images, or does not give one value a class for each."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = model(torch.zeros(1, channels, image_size, image_size))
    except Exception as error:
        # Code of the user's own can fail in any way.
        text = str(error).partition("\n")[0] or type(error).__name__
        text = describe_exception(error) if is_user_code(name) else f"{text}; change model.name or data.image_size"
        raise UsageError.one(
            "model.name", f"{name} cannot take images of {channels}x{image_size}x{image_size}: {text}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(out, Tensor) or tuple(out.shape) != (1, num_classes):
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UsageError.one("model.name", f"{name} gives {shape} for one image where {(1, num_classes)} is wanted")
