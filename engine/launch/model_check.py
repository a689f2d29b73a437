"""What only a built model shows to be wrong with a config: its weights, frozen parts, loss, optimizer, image size.

The ranks find the same when they build their model; the form calls `check_model` in a helper
process instead, because it imports torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from engine.config.data_sections import ENCODED_DATASETS
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageSource
from engine.data.sources.builtin import FakeSource
from engine.data.sources.open import open_source, read_class_names
from engine.distributed.failures import find_cause, has_known_cause
from engine.distributed.node_plan import plan_node
from engine.launch.preflight_process import ModelCheck
from engine.models.factory import weight_bytes
from engine.models.summary import input_spec
from engine.optim.param_groups import summarize_param_groups
from engine.training.trial import MIN_TRIAL_BATCH_SIZE, build_trial_state, trial_config
from engine.utils.errors import Problem, UsageError

TORCH_BUILD_ADVICE = "install a build of torch for this driver (https://pytorch.org/get-started)"


def check_model(config: Config, *, on_gpu: bool) -> ModelCheck:
    """Build the training state of a rank on the CPU, with random instead of pretrained weights."""
    if is_user_code(config.data.dataset):
        return ModelCheck(error=f"only opening {config.data.dataset} shows its image size and classes")
    trial = trial_config(
        config,
        # Whether a layer has a deterministic kernel depends on the device.
        device={
            "parallel": "ddp",
            "backend": "auto",
            "ranks": 1,
            "deterministic": config.device.deterministic and not on_gpu,
        },
        data={"batch_size": min(config.data.numeric_batch_size, MIN_TRIAL_BATCH_SIZE), "drop_last": True},
        optim={"accumulate": 1},
        precision={"amp": "off", "tf32": "auto"} if on_gpu else {},
        model={"weights": None} if config.model.weights == "pretrained" or config.run.resume else {},
    )
    try:
        state = build_trial_state(trial, plan_node(trial, []), _stand_in_source(trial))
        parameters = sum(parameter.numel() for parameter in state.model.parameters())
        decays = Counter[float]()
        for group in summarize_param_groups(config.optim, state.optimized_model):
            decays[group.weight_decay] += group.tensors
        return ModelCheck(
            parameters=parameters,
            weight_bytes=weight_bytes(state.model),
            weight_decay=tuple(sorted(decays.items(), reverse=True)),
        )
    except UsageError as error:
        return ModelCheck(problems=error.problems)
    except Exception as error:
        return ModelCheck(error=find_cause(error, config).reason)


def torch_gpu_problems() -> list[Problem]:
    """Return why torch cannot train on the GPUs of this host, which NVML lists."""
    advice = f"{TORCH_BUILD_ADVICE}, or train on the CPU with --gpus cpu"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        return [Problem("device.gpus", reason, advice, code="not-supported")]
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        cause = find_cause(error)
        reason = f"torch {torch.__version__} cannot use the GPUs of this host: {cause.reason}"
        return [Problem("device.gpus", reason, advice, code=cause.code if has_known_cause(error) else "not-supported")]
    return []


def _stand_in_source(config: Config) -> ImageSource:
    """Return a source with the format and the classes of the dataset.

    The dataset is not opened, which may download, decode or scan it. Raises UsageError if there is no such folder."""
    data = config.data
    if data.dataset in ("digits", "fake"):
        return open_source(config)
    image_format, num_classes = input_spec(config)
    neutral = replace(image_format, mean=(0.0,) * image_format.channels, std=(1.0,) * image_format.channels)
    # The names of the folder, because a checkpoint of other classes loses its classification head.
    classes = read_class_names(data) if data.dataset in ENCODED_DATASETS else tuple(map(str, range(num_classes)))
    return FakeSource(neutral, classes, {"train": MIN_TRIAL_BATCH_SIZE * len(classes), "val": 1}, seed=0)
