"""Values of config keys that conflict with those of other keys, or break a rule of their own: one table of rules.

`engine.config.loader` reports them; `engine.config.effects` has the rules of keys without effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from engine.base.errors import Problem
from engine.config.data_sections import ENCODED_DATASETS, IMAGE_FILE_DATASETS
from engine.config.monitor import monitor_problem
from engine.config.optimizer_options import torch_optimizer_problems
from engine.config.rules import (
    ORIGINAL_SIZE_REASONS,
    PACK_ADVICE,
    PACKED_PROBLEM,
    PACKED_SUFFIX,
    Rule,
    broken_if,
    key_of_original_size,
    val_resize_problem,
)
from engine.config.schema import Config, fields
from engine.config.tasks import TASK_FACTS, loss_name, task_facts
from engine.config.training_sections import BUILTIN_MODELS, by_epoch
from engine.config.user_code import is_user_code

# Smallest positive alpha of mixup and CutMix: below it, the Beta distribution yields practically only 0 and 1.
MIN_MIX_ALPHA = 1e-3
# What `data.path` must name, by dataset.
_NEEDED_PATHS = {
    "csv": "a file of labels, such as labels.csv",
    "webdataset": "its tar shards",
    **dict.fromkeys((*IMAGE_FILE_DATASETS, "folder"), "the folder of the dataset"),
}


def config_conflicts(config: Config) -> Iterator[Problem]:
    """Yield the values that conflict with the value of another key or break a rule of their own."""
    for rule in _CONFLICTS:
        if why := rule.why(config):
            missing = rule.is_missing
            yield Problem(rule.key, why, rule.advice, others=rule.others, is_missing=missing, code=rule.code)
    yield from torch_optimizer_problems(config.optim)


def _streams_only(config: Config) -> str:
    """Return why `data.pipeline=memory` cannot hold the images of a folder or of shards; "" if it can."""
    key, data = key_of_original_size(config), config.data
    if key is None or data.pipeline != "memory" or data.dataset not in ENCODED_DATASETS:
        return ""
    return f"memory holds images at the model's input size, but {key} {ORIGINAL_SIZE_REASONS[key]}; use stream or auto"


def _unknown_monitor(config: Config) -> str:
    """Return why the run does not have its monitor; "" if it has, or if only its user code can tell."""
    return "" if any(map(is_user_code, config.eval.metrics)) else monitor_problem(config)


def _own_source(config: Config) -> str:
    """Return why a model must not be named with its source, as in timm:resnet50; "" if it is not."""
    found = re.fullmatch(r"(builtin|torchvision|timm):(.+)", config.model.name)
    return f"{found[0]} is not allowed; set model.name={found[2]} model.source={found[1]}" if found else ""


def _lacks_pretrained(config: Config) -> bool:
    model = config.model
    is_builtin = model.source in ("auto", "builtin") and model.name in BUILTIN_MODELS
    return model.weights == "pretrained" and (is_builtin or (model.source == "auto" and is_user_code(model.name)))


def _negative(noun: str, factors: Mapping[str, float]) -> str:
    negative = ((name, factor) for name, factor in factors.items() if factor < 0)
    return ", and ".join(f"the {noun} of {name} must be at least 0, not {factor:g}" for name, factor in negative)


def _decays_exempt(config: Config) -> str:
    groups = sorted({"bias", "norm"} & config.optim.weight_decay_groups.keys())
    if config.optim.decay_norms or not groups:
        return ""
    exempt = "exempts biases and normalization layers, but optim.weight_decay_groups sets"
    return f"{exempt} {' and '.join(groups)}; keep one"


def _are_unordered(numbers: Sequence[int]) -> bool:
    return list(numbers) != sorted(set(numbers)) or min(numbers, default=1) < 1


def _size_epochs(config: Config) -> list[int]:
    return [epoch for epoch, _ in config.data.epoch_sizes]


def _channel_rules(key: str) -> Rule:
    def why(config: Config) -> str:
        values, channels = getattr(config.data, key), config.data.channels
        if values is None or channels is None or len(values) == channels:
            return ""
        return f"has {len(values)} values for data.channels={channels}; use one value per channel"

    return Rule(f"data.{key}", ("data.channels",), why, code="conflict")


def _range_rule(key: str, maximum: float, limit: str) -> Rule:
    def is_broken(config: Config) -> bool:
        low, high = getattr(config.augment, key)
        return not 0 < low <= high <= maximum

    reason = f"must be two numbers greater than 0{limit}, the smaller first"
    return Rule(f"augment.{key}", (), broken_if(is_broken, reason), code="out-of-range")


def _alpha_rule(key: str) -> Rule:
    why = broken_if(
        lambda config: 0 < getattr(config.augment, key) < MIN_MIX_ALPHA,
        f"must be 0 (disabled) or at least {MIN_MIX_ALPHA:g}",
    )
    return Rule(f"augment.{key}", (), why, code="out-of-range")


def _foreign_loss(config: Config) -> str:
    """Return why the task does not have the loss; "" if it has."""
    name, losses = loss_name(config), task_facts(config).losses
    if name in losses or is_user_code(name):
        return ""
    return f"{name} is no loss of task {config.task.name}; use auto, {', '.join(losses)} or your own"


def _foreign_metrics(config: Config) -> str:
    """Return why the task does not have the metrics; "" if it has."""
    known = task_facts(config).metrics
    foreign = [name for name in config.eval.metrics if name not in known and not is_user_code(name)]
    return f"{' and '.join(foreign)} is no metric of task {config.task.name}" if foreign else ""


def _task_rule(key: str) -> Rule:
    section, _, name = key.partition(".")
    default = dict(fields())[key].default

    def why(config: Config) -> str:
        is_set = getattr(getattr(config, section), name) != default
        return task_facts(config).refused.get(key, "") if is_set else ""

    return Rule(key, ("task.name",), why, code="conflict")


def _named_rule(key: str) -> Rule:
    why = broken_if(
        lambda config: getattr(config.run, key) and config.run.name is None,
        "needs the name of the run to resume; set run.name (--name)",
    )
    return Rule(f"run.{key}", ("run.name",), why, code="needs-key")


_CONFLICTS = (
    *map(_named_rule, ("resume", "requeue")),
    Rule("loss.name", ("task.name",), _foreign_loss, code="conflict"),
    Rule("eval.metrics", ("task.name",), _foreign_metrics, code="conflict"),
    *map(_task_rule, sorted({key for facts in TASK_FACTS.values() for key in facts.refused})),
    Rule(
        "device.static_graph",
        ("optim.accumulate",),
        broken_if(
            # pytorch#143580: DDP treats the backward passes under no_sync() as the whole graph.
            lambda config: (
                config.device.static_graph and config.device.parallel == "ddp" and config.optim.accumulate > 1
            ),
            "does not support gradient accumulation; set device.static_graph=false or optim.accumulate=1",
        ),
        code="conflict",
    ),
    Rule(
        "device.compress",
        ("precision.amp",),
        broken_if(
            lambda config: config.device.compress == "bf16" and config.precision.amp in ("O2", "O3"),
            "bf16 does not make the float16 gradients of precision.amp={precision.amp} smaller; use off",
        ),
        code="conflict",
    ),
    Rule(
        "precision.amp",
        ("device.parallel",),
        broken_if(
            # DataParallel enters autocast in its threads without a dtype, which means float16.
            lambda config: config.device.parallel == "dp" and config.precision.amp == "bf16",
            "device.parallel=dp does not support bf16; use fp16 or off, or set device.parallel=ddp",
        ),
        code="conflict",
    ),
    Rule(
        "data.path",
        ("data.dataset",),
        lambda config: (
            f"{config.data.dataset} needs {needed}; set data.path (--data-path)"
            if (needed := _NEEDED_PATHS.get(config.data.dataset)) and config.data.default_path is None
            else ""
        ),
        is_missing=True,
        code="missing-value",
    ),
    Rule(
        "task.name",
        ("data.dataset",),
        broken_if(
            lambda config: config.task.name != "classification" and config.data.dataset != "csv",
            "{task.name} needs the labels of a CSV file, not {data.dataset}; set data.path (--data-path) to it",
        ),
        code="conflict",
    ),
    Rule(
        "data.pipeline",
        ("data.dataset",),
        broken_if(
            lambda config: config.data.pipeline == "memory" and is_user_code(config.data.dataset),
            "memory does not support {data.dataset}: user datasets may generate items at random; use stream or auto",
        ),
        code="conflict",
    ),
    Rule(
        "data.pipeline",
        ("data.dataset", *ORIGINAL_SIZE_REASONS),
        _streams_only,
        code="conflict",
    ),
    Rule(
        "data.path",
        (),
        broken_if(
            lambda config: (config.data.path or "").endswith(PACKED_SUFFIX), f"{{data.path}} is a {PACKED_PROBLEM}"
        ),
        PACK_ADVICE,
        code="not-supported",
    ),
    Rule(
        "data.worker_type",
        ("data.dataset",),
        broken_if(
            lambda config: config.data.worker_type == "threads" and config.data.dataset not in ENCODED_DATASETS,
            f"threads load image files ({', '.join(ENCODED_DATASETS)}), not {{data.dataset}}; use processes or auto",
        ),
        code="conflict",
    ),
    Rule(
        "data.size_schedule",
        (),
        lambda config: (
            f"must begin with the size of epoch 1, such as 160@1, not with that of epoch {epochs[0]}"
            if (epochs := _size_epochs(config)) and epochs[0] != 1
            else ""
        ),
        code="invalid-value",
    ),
    Rule(
        "data.size_schedule",
        (),
        broken_if(
            lambda config: _are_unordered(_size_epochs(config)),
            "must have its epochs in increasing order, such as [160@1, 192@13]",
        ),
        code="invalid-value",
    ),
    Rule(
        "data.size_schedule",
        ("run.epochs",),
        lambda config: (
            f"epoch {epochs[-1]} is not reached: run.epochs is {config.run.epochs}; use smaller epochs"
            if not _are_unordered(epochs := _size_epochs(config)) and max(epochs, default=0) > config.run.epochs
            else ""
        ),
        code="conflict",
    ),
    Rule(
        "data.val_resize",
        ("data.val_crop", "data.image_size"),
        lambda config: val_resize_problem(
            config.data.val_resize, config.data.val_crop or config.data.image_size or config.data.max_train_size
        ),
        code="conflict",
    ),
    *map(_channel_rules, ("mean", "std")),
    Rule(
        "data.std",
        (),
        broken_if(lambda config: min(config.data.std or (1,)) <= 0, "must be greater than 0 for each channel"),
        code="out-of-range",
    ),
    _range_rule("crop_scale", 1.0, " and at most 1"),
    _range_rule("crop_ratio", math.inf, ""),
    _range_rule("scale", math.inf, ""),
    *map(_alpha_rule, ("mixup", "cutmix")),
    Rule(
        "augment.crop_padding",
        ("augment.resized_crop",),
        broken_if(
            lambda config: config.augment.resized_crop and config.augment.crop_padding,
            "conflicts with augment.resized_crop; set one of the two",
        ),
        code="conflict",
    ),
    Rule(
        "model.name",
        (),
        _own_source,
        code="invalid-value",
    ),
    Rule(
        "model.weights",
        ("model.name", "model.source"),
        broken_if(
            _lacks_pretrained, "there are no pretrained weights for {model.name}; set model.weights=null, or to a file"
        ),
        code="not-found",
    ),
    Rule(
        "model.compile",
        ("device.parallel",),
        broken_if(
            lambda config: config.model.compile and config.device.parallel == "dp",
            "does not support device.parallel=dp, which replicates the model in every step; use ddp",
        ),
        code="conflict",
    ),
    Rule(
        "model.compile_mode",
        ("model.compile", "optim.accumulate"),
        broken_if(
            lambda config: (
                config.model.compile and config.model.compile_mode != "default" and config.optim.accumulate > 1
            ),
            "{model.compile_mode} replays CUDA graphs, which overwrite the gradients that optim.accumulate sums; use "
            "default",
        ),
        code="conflict",
    ),
    Rule(
        "optim.betas",
        (),
        broken_if(
            lambda config: not all(0 <= beta < 1 for beta in config.optim.betas or ()),
            "must be two numbers of at least 0 and less than 1",
        ),
        code="out-of-range",
    ),
    Rule(
        "optim.layer_lr",
        (),
        lambda config: _negative("factor", config.optim.layer_lr),
        code="out-of-range",
    ),
    Rule(
        "optim.weight_decay_groups",
        (),
        lambda config: _negative("weight decay", config.optim.weight_decay_groups),
        code="out-of-range",
    ),
    Rule(
        "optim.decay_norms",
        ("optim.weight_decay_groups",),
        _decays_exempt,
        code="conflict",
    ),
    Rule(
        "schedule.warmup_epochs",
        ("run.epochs",),
        broken_if(
            lambda config: config.schedule.name != "onecycle" and config.schedule.warmup_epochs > config.run.epochs,
            "must be at most run.epochs ({run.epochs})",
        ),
        code="out-of-range",
    ),
    Rule(
        "schedule.warmup_steps",
        ("schedule.warmup_epochs",),
        broken_if(
            lambda config: (
                config.schedule.name != "onecycle" and config.schedule.warmup_epochs and config.schedule.warmup_steps
            ),
            "conflicts with schedule.warmup_epochs={schedule.warmup_epochs:g}; set one of the two to 0",
        ),
        code="conflict",
    ),
    Rule(
        "schedule.milestones",
        (),
        broken_if(
            lambda config: _are_unordered(config.schedule.milestones),
            "must be integers of at least 1 in increasing order",
        ),
        code="invalid-value",
    ),
    Rule(
        "schedule.milestones",
        ("schedule.name",),
        broken_if(
            lambda config: config.schedule.name == "multistep" and not config.schedule.milestones,
            "schedule multistep needs at least one milestone, such as [30, 60]",
        ),
        code="missing-value",
    ),
    Rule(
        "schedule.milestones",
        ("schedule.name", "schedule.by", "run.epochs"),
        broken_if(
            lambda config: (
                config.schedule.name == "multistep"
                and by_epoch(config.schedule)
                and not _are_unordered(config.schedule.milestones)
                and min(config.schedule.milestones, default=0) >= config.run.epochs
            ),
            "no milestone is reached: run.epochs is {run.epochs}; use smaller milestones",
        ),
        code="conflict",
    ),
    Rule(
        "schedule.by",
        ("schedule.name", "run.epochs"),
        broken_if(
            lambda config: config.schedule.name == "onecycle" and by_epoch(config.schedule) and config.run.epochs < 2,
            "schedule onecycle by epoch needs at least two epochs; use step",
        ),
        code="conflict",
    ),
    Rule(
        "schedule.by",
        ("schedule.name",),
        broken_if(
            lambda config: config.schedule.name == "plateau" and config.schedule.by == "step",
            "schedule plateau reads the validation loss once per epoch; use epoch or auto",
        ),
        code="conflict",
    ),
    Rule("run.monitor", ("eval.metrics", "task.name"), _unknown_monitor, code="unknown-value"),
    Rule(
        "schedule.gamma",
        ("schedule.name",),
        broken_if(
            lambda config: config.schedule.name == "plateau" and config.schedule.gamma == 1,
            "must be less than 1 for schedule plateau",
        ),
        code="out-of-range",
    ),
)
