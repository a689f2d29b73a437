"""Build a model by name: built-in, torchvision, timm, or user code. `engine.train.loop.model` calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.errors import Problem, UsageError, did_you_mean, raise_if_any
from engine.base.text import pluralize
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.config.user_code import describe_value, is_user_code, load_user_code, user_failures
from engine.config.user_errors import describe_exception
from engine.train.data.sources.base import ImageFormat
from engine.train.models.builtin import BUILTIN_BUILDERS
from engine.train.models.catalog import resolve_model_source

# Options with which timm's builders load weights. Reserved, because model.weights does this.
_TIMM_WEIGHT_OPTIONS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")


def build_model(config: Config, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build the model with random weights for `channels` x `image_size` x `image_size` images. Raises UsageError for an
    unknown name, wrong options or unsuitable images."""
    model = config.model
    source = resolve_model_source(model)
    if source == "user":
        built = build_user_model(config, channels, num_classes, image_size)
    elif source == "builtin":
        try:
            built = call_builder(model, BUILTIN_BUILDERS[model.name], channels, num_classes, image_size)
        except (TypeError, ValueError) as error:
            raise UsageError.one(
                "model.options", f"{model.name} cannot be built with {model.options}: {error}", code="invalid-value"
            ) from error
    elif source == "torchvision":
        built = build_torchvision_model(model, channels, num_classes, image_size)
    else:
        built = build_timm_model(model, channels, num_classes, image_size)
    if model.init == "normal":
        init_normal(built, model.init_std)
    return built


def build_user_model(config: Config, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Call the user's builder with the sizes that its signature names and with `model.options`. Raises UsageError."""
    name, folder = config.model.name, config.run.code
    builder = load_user_code("model.name", name, folder, config.run.code_packages)
    if isinstance(builder, nn.Module):
        raise UsageError.one(
            "model.name", f"{name} is a model instance; use a function or class that builds one", code="invalid-value"
        )
    with user_failures("model.name", f"{name} failed", folder, config.run.code_packages):
        built = call_builder(config.model, builder, channels, num_classes, image_size)
    if not isinstance(built, nn.Module):
        raise UsageError.one(
            "model.name", f"{name} must return a torch.nn.Module, not {describe_value(built)}", code="invalid-value"
        )
    return built


def call_builder(
    model: ModelConfig, builder: Callable[..., Any], channels: int, num_classes: int, image_size: int
) -> Any:
    """Call `builder` with the sizes that its signature names, under any of their usual names, and with `model.options`.
    Raises UsageError for unknown and missing options."""
    numbers = {
        **dict.fromkeys(("channels", "in_channels", "in_chans"), channels),
        **dict.fromkeys(("classes", "num_classes"), num_classes),
        **dict.fromkeys(("size", "image_size", "img_size"), image_size),
    }
    parameters = inspect.signature(builder).parameters
    size_kwargs = {name: number for name, number in numbers.items() if name in parameters}
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    option_names = [
        name for name, parameter in parameters.items() if parameter.kind in keyword_kinds and name not in size_kwargs
    ]
    problems = _reserved_option_problems(model, size_kwargs)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        others = f"; it has {', '.join(option_names)}" if option_names else "; it has no options"
        for name in (name for name in model.options if name not in parameters):
            reason = f"{model.name} has no option {name!r}{did_you_mean(name, option_names) or others}"
            problems.append(Problem("model.options", reason, code="unknown-key"))
    for name in option_names:
        if parameters[name].default is inspect.Parameter.empty and name not in model.options:
            problems.append(
                Problem("model.options", f"{model.name} requires {name}; set it here", code="missing-value")
            )
    raise_if_any(problems)
    return builder(**size_kwargs, **model.options)


def build_torchvision_model(model: ModelConfig, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build torchvision's model with random weights, a head for `num_classes` and a stem for `channels`."""
    from torchvision import models

    derived_kwargs: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    derived_kwargs |= torchvision_kwargs(model.name, image_size)
    built = _build_library_model(model, models.get_model, derived_kwargs, image_size)
    if channels != 3:
        replace_stem(built, channels)
    if hasattr(built, "transform_input"):
        setattr(built, "transform_input", False)  # noqa: B010 - a module types its attributes as modules
    return built


def torchvision_kwargs(name: str, image_size: int, *, init_weights: bool = True) -> dict[str, Any]:
    """Return the keywords that some models of torchvision need for random weights and for the image size."""
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": init_weights}
    if name.startswith("vit_"):
        return {"image_size": image_size}
    return {"input_size": (image_size, image_size)} if name == "maxvit_t" else {}


def build_timm_model(model: ModelConfig, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build timm's model with random weights for `num_classes`, `channels` and, if its input size is fixed,
    `image_size`."""
    import timm

    derived_kwargs: dict[str, Any] = {"pretrained": False, "num_classes": num_classes, "in_chans": channels}
    derived_kwargs |= timm_img_size_kwargs(model.name, image_size)
    return _build_library_model(
        model, timm.create_model, derived_kwargs, image_size, forbidden_options=_TIMM_WEIGHT_OPTIONS
    )


def timm_img_size_kwargs(name: str, image_size: int) -> dict[str, Any]:
    """Return the keyword for the image size if the timm model has a fixed input size. Raises UsageError for an unknown
    tag."""
    import timm

    try:
        pretrained_cfg = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = sorted(timm.list_pretrained(f"{name.partition('.')[0]}.*"))
        raise UsageError.one(
            "model.name", f"timm has no weights {name!r}{did_you_mean(name, tags)}", code="unknown-value"
        ) from error
    return {"img_size": image_size} if pretrained_cfg is not None and pretrained_cfg.fixed_input_size else {}


def _build_library_model(
    model: ModelConfig,
    builder: Callable[..., nn.Module],
    derived_kwargs: dict[str, Any],
    image_size: int,
    forbidden_options: Iterable[str] = (),
) -> nn.Module:
    raise_if_any(_reserved_option_problems(model, [*derived_kwargs, *forbidden_options]))
    try:
        return builder(model.name, **derived_kwargs, **model.options)
    except Exception as error:
        # The libraries validate little, so a wrong option can raise any error.
        text = str(error).partition("\n")[0] or type(error).__name__
        options = f" with {model.options}" if model.options else ""
        key = "model.options" if model.options else "model.name"
        raise UsageError.one(
            key,
            f"{model.name} cannot be built for {image_size}x{image_size} images{options}: {text}",
            code="invalid-value",
        ) from error


def _reserved_option_problems(model: ModelConfig, reserved: Iterable[str]) -> list[Problem]:
    """Return a problem per option that gputrain sets itself."""
    return [
        Problem("model.options", f"{name} is derived from the data and other keys; remove it", code="fixed-value")
        for name in reserved
        if name in model.options
    ]


def first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """Return the first convolution in order of definition with its path, None if there is none."""
    return next(((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d)), None)


def replace_stem(model: nn.Module, channels: int) -> None:
    """Replace the model's first convolution by an untrained one with `channels` input channels."""
    first = first_convolution(model)
    assert first is not None  # noqa: S101 - each of torchvision's models begins with one
    path, stem = first
    fresh = nn.Conv2d(
        channels,
        stem.out_channels,
        stem.kernel_size,  # type: ignore[arg-type]
        stem.stride,  # type: ignore[arg-type]
        stem.padding,  # type: ignore[arg-type]
        bias=stem.bias is not None,
    )
    model.set_submodule(path, fresh)


def init_normal(model: nn.Module, std: float) -> None:
    """Initialize the weights of convolutions and linear layers from N(0, std), their biases with 0."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def weight_bytes(model: nn.Module) -> int:
    """Size of parameters and buffers in bytes."""
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))


def check_model(
    model: nn.Module,
    config: Config,
    images: ImageFormat,
    image_size: int,
    num_classes: int,
    *,
    size_key: str = "data.image_size",
) -> None:
    """Raise UsageError unless the model of a config maps a 1 x C x H x W image to 1 x `num_classes` logits.

    `images` has the channels, and `size_key` is the config key of `image_size`.
    """
    name, run = config.model.name, config.run
    training, deterministic = model.training, torch.are_deterministic_algorithms_enabled()
    model.eval()
    if deterministic:
        # The warmup names a layer without a deterministic kernel on the device of the run.
        torch.use_deterministic_algorithms(False)
    try:
        out = _forward_zeros(model, images.channels, image_size)
    except Exception as error:
        # User code can raise anything.
        other = 1 if images.channels == 3 else 3
        if not images.is_float and _accepts(model, other, image_size, num_classes):
            reason = f"{name} takes {pluralize(other, 'channel')}, but the images have {images.channels}"
            raise UsageError.one("model.name", reason, f"set data.channels={other}", code="not-supported") from error
        if is_user_code(name):
            text = describe_exception(error, run.code, run.code_packages)
        else:
            text = str(error).partition("\n")[0] or type(error).__name__
            text += f"; change model.name or {size_key}"
        raise UsageError.one(
            "model.name",
            f"{name} does not accept {images.channels}x{image_size}x{image_size} images: {text}",
            code="not-supported",
        ) from error
    finally:
        model.train(training)
        if deterministic:
            torch.use_deterministic_algorithms(True)
    check_logits(name, out, 1, num_classes)


def _forward_zeros(model: nn.Module, channels: int, image_size: int) -> object:
    device = next((parameter.device for parameter in model.parameters()), None)
    with torch.no_grad():
        return model(torch.zeros(1, channels, image_size, image_size, device=device))


def check_logits(name: str, out: object, num_images: int, num_classes: int, *, training: bool = False) -> None:
    """Raise UsageError unless a model returned logits: a floating-point tensor, N x classes, in training with a
    gradient."""
    got = describe_value(out)
    if isinstance(out, Tensor) and _are_logits(out, num_images, num_classes):
        if not training or out.requires_grad:
            return
        got = "logits without a gradient"
    when = " in training" if training else ""
    expected = f"logits of {pluralize(num_images, 'image')}, a floating-point tensor of {num_images} x {num_classes}"
    raise UsageError.one("model.name", f"{name} returns {got}{when}; it must return {expected}", code="invalid-value")


def _are_logits(out: object, num_images: int, num_classes: int) -> bool:
    return isinstance(out, Tensor) and out.is_floating_point() and tuple(out.shape) == (num_images, num_classes)


def _accepts(model: nn.Module, channels: int, image_size: int, num_classes: int) -> bool:
    """Whether a model accepts images with another number of channels than those of the dataset."""
    try:
        return _are_logits(_forward_zeros(model, channels, image_size), 1, num_classes)
    except Exception:
        return False
