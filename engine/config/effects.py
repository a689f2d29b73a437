"""Config keys that are set and have no effect, such as a momentum of adamw: always a warning, never an error.

`engine.config.loader` finds those that follow from other keys, `engine.jobs.launch.preflight` those that follow from
the devices of the run. Every front end shows the same messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from engine.base.errors import Problem
from engine.config.begin_time import begin_time
from engine.config.command_line import shown_value
from engine.config.data_sections import IMAGE_FILE_DATASETS
from engine.config.key_names import REMOVED_KEYS
from engine.config.monitor import monitored_name, task_scores
from engine.config.optimizer_options import COMMON_OPTIONS, OPTIMIZERS, accepts_key
from engine.config.rules import ANY_USER_CODE, DEPENDS_ON, Rule, broken_if, key_of_original_size
from engine.config.schema import UNSTORED_KEYS, Config, fields, sections
from engine.config.tasks import TASK_FACTS, task_facts
from engine.config.user_code import is_user_code, user_code_names

SQUARE_DATASETS = ("digits", *IMAGE_FILE_DATASETS, "fake")
GRAYSCALE_DATASETS = ("digits", "mnist", "fashion-mnist")
# Longer lists of the values with which a key has an effect do not help.
MAX_LISTED_VALUES = 4


class NoEffect(NamedTuple):
    """A key that is set and has no effect, and the warning that says so, which names the key itself."""

    key: str
    warning: Problem


def keys_without_effect(config: Config, layers: Sequence[Mapping[str, Any]]) -> list[NoEffect]:
    """Return the keys that the layers of a config set, and that have no effect because of other keys.

    A key does not count if it has its default, or if a later layer changed the key that controls it: a preset for
    another schedule is no mistake. Nor does one of a stored config, which sets every key of its sections.
    """
    set_at: dict[str, int] = {}
    stored: set[str] = set()
    for number, layer in enumerate(layers):
        for section, keys in layer.items():
            names = set(keys) if isinstance(keys, Mapping) else set()
            keys_set = {f"{section}.{name}" for name in names}
            set_at |= dict.fromkeys(keys_set, number)
            stored = stored | keys_set if _is_complete(section, names) else stored - keys_set
    found = []
    for rule in _RULES:
        decided_at = max((set_at.get(other, -1) for other in rule.others), default=-1)
        if rule.key not in set_at or rule.key in stored or set_at[rule.key] < decided_at:
            continue
        if not _is_default(config, rule.key) and (why := rule.why(config)):
            found.append(_no_effect(config, rule.key, why))
    return found


def keys_without_effect_on_devices(
    config: Config, typed: frozenset[str], world_size: int, *, on_gpu: bool, external: bool = False
) -> list[NoEffect]:
    """Return the typed keys that have no effect on the devices of a run. A file may be meant for other hosts, so of its
    keys only `model.sync_bn` counts, which is off by default and changes what a run learns.

    `external` means that torchrun or srun started the ranks."""
    why: dict[str, str] = {}
    if on_gpu:
        why["device.ranks"] = "on GPUs, which have one rank each; select GPUs with device.gpus (--gpus)"
    else:
        why |= dict.fromkeys(("device.cudnn_benchmark", "device.empty_cache"), "on the CPU")
        if config.device.parallel == "ddp":
            why["model.sync_bn"] = "on the CPU, which torch's SyncBatchNorm does not support"
    if world_size == 1 and config.device.parallel == "ddp":
        keys = ("device.bucket_view", "device.bucket_cap_mb", "device.compress", "device.static_graph")
        why |= dict.fromkeys((*keys, "optim.lr_scaling", "model.sync_bn"), "with one rank")
    if external:
        why["run.max_restarts"] = "under torchrun and srun; use the --max-restarts of torchrun"
        why["device.start_method"] = "under torchrun and srun, which start the ranks"
        why["device.wait"] = "under torchrun and srun; start the run with gputrain"
    return [
        _no_effect(config, key, reason)
        for key, reason in why.items()
        if key in typed | {"model.sync_bn"} and not _is_default(config, key)
    ]


def typed_without_effect(typed: Mapping[str, Any], unused: Mapping[str, str]) -> list[NoEffect]:
    """Return the typed keys that a command does not use. `unused` maps these to the reason."""
    return [
        _value_without_effect(key, value, unused[key])
        for key, value in typed.items()
        if key in unused and value != _DEFAULTS[key]
    ]


def lr_without_effect(config: Config, value: Any) -> NoEffect:
    """Return that a learning rate is not used, because a later layer than the one that set it changed the optimizer."""
    why = f"with optim.name={config.optim.name}, whose default {config.optim.lr:g} is used; set it with --lr"
    return _value_without_effect("optim.lr", value, why)


def removed_key(key: str, value: Any) -> NoEffect:
    """Return that a key of an earlier version, which the config of a run sets, is not used."""
    return _value_without_effect(key, value, f"in this version: {REMOVED_KEYS[key].reason}")


def section_keys(name: str) -> list[str]:
    """Return the keys of a section."""
    return [f"{name}.{key}" for key in sections()[name].model_fields]


def optimizer_keys_without_effect(config: Config, accepted: Mapping[str, Any]) -> list[NoEffect]:
    """Return the optimizer keys that are set and that an optimizer with these options does not have."""
    name = config.optim.name
    return [
        _no_effect(config, f"optim.{key}", f"with optim.name={name}{_own_form(key, accepted)}")
        for key in COMMON_OPTIONS
        if getattr(config.optim, key) and not accepts_key(accepted, key)
    ]


def _own_form(key: str, options: Mapping[str, Any]) -> str:
    """Return where to set a key that an optimizer takes in a form of its own, as a clause."""
    return f", whose {key} is set in optim.options" if key in options else ""


def _no_effect(config: Config, key: str, why: str) -> NoEffect:
    return _value_without_effect(key, _value(config, key), why)


def _value_without_effect(key: str, value: Any, why: str) -> NoEffect:
    return NoEffect(key, Problem("", f"{key}={shown_value(value)} has no effect {why}", code="no-effect"))


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _is_default(config: Config, key: str) -> bool:
    value = _value(config, key)
    # 0 and false turn a feature of an optimizer off.
    return value == _DEFAULTS[key] or (key.startswith("optim.") and _DEFAULTS[key] is None and not value)


def _is_complete(section: str, names: set[str]) -> bool:
    model = sections().get(section)
    unstored = {key.partition(".")[2] for key in UNSTORED_KEYS if key.startswith(f"{section}.")}
    return model is not None and names >= set(model.model_fields) - unstored


def _dependency(key: str, other: str, enabling: set[str], config: Config) -> str:
    value = _value(config, other)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    is_enabled = text in enabling or (ANY_USER_CODE in enabling and is_user_code(text))
    # What an optimizer of timm accepts is in its catalog, see `engine.train.optim.timm_optimizers`.
    if is_enabled or (other == "optim.name" and text not in OPTIMIZERS):
        return ""
    if own_form := _own_form(key.partition(".")[2], OPTIMIZERS.get(text, {})):
        return f"with {other}={text}{own_form}"
    *most, last = sorted(enabling)
    listed = f", only with {', '.join(most)} and {last}" if most else f", only with {last}"
    return f"with {other}={text}{listed if len(enabling) <= MAX_LISTED_VALUES else ''}"


def _without_weight_decay(config: Config) -> str:
    options = OPTIMIZERS.get(config.optim.name)
    if options is None or accepts_key(options, "weight_decay"):
        return ""
    return f"with optim.name={config.optim.name}"


def _on_user_loss(config: Config) -> str:
    name = config.loss.name
    return f"with loss.name={name}; implement it there" if is_user_code(name) else ""


def _outside_task(key: str, config: Config) -> str:
    return f"with task.name={config.task.name}" if key in task_facts(config).unused else ""


def _without_resize(config: Config) -> str:
    data, sizes = config.data, {config.data.val_crop, config.data.val_resize}
    if data.dataset not in SQUARE_DATASETS or key_of_original_size(config) is not None:
        return ""
    # The images of the dataset fake are generated in the training size.
    own_size = None if data.dataset != "fake" else data.image_size
    is_resized = data.image_size != own_size or not sizes <= {None, own_size}
    return "" if is_resized else f"on images of {data.dataset}, which are not resized"


def _past_begin(text: str | None) -> str:
    """Return that a begin time is in the past: as with sbatch, the run then starts at once."""
    now = time.time()
    seconds = begin_time(text or "now", now)
    return f"because {text} is in the past" if seconds is not None and seconds < now else ""


_DEFAULTS = {key: field.default for key, field in fields()}
_RULES = (
    *(Rule(key, (other,), partial(_dependency, key, other, enabling)) for key, (other, enabling) in DEPENDS_ON.items()),
    *(Rule(key, ("optim.name",), _without_weight_decay) for key in ("optim.weight_decay", "optim.weight_decay_groups")),
    Rule(
        "model.min_match",
        ("model.weights",),
        broken_if(lambda config: not config.model.weights, "without model.weights"),
    ),
    Rule(
        "run.early_stop_min_delta",
        ("run.early_stop",),
        broken_if(lambda config: not config.run.early_stop, "without run.early_stop"),
    ),
    Rule(
        "run.monitor_mode",
        ("run.monitor",),
        broken_if(
            lambda config: monitored_name(config) in task_scores(config),
            "with a run.monitor that is none of your own metrics",
        ),
    ),
    *(
        Rule(
            key,
            (
                *("model.name", "data.dataset", "loss.name", "augment.transform"),
                *("optim.name", "schedule.name", "eval.metrics"),
            ),
            broken_if(lambda config: not user_code_names(config), "without user code (module:name)"),
        )
        for key in ("run.code", "run.snapshot")
    ),
    *(
        Rule(key, ("data.workers",), broken_if(lambda config: config.data.workers == 0, "with data.workers=0"))
        for key in ("data.prefetch", "data.worker_type")
    ),
    Rule(
        "data.download",
        ("data.dataset", "data.archive"),
        broken_if(
            lambda config: config.data.dataset == "folder" and not config.data.archive,
            "with data.dataset=folder without data.archive",
        ),
    ),
    Rule("data.val_split", ("data.val_path",), broken_if(lambda config: config.data.val_path, "with data.val_path")),
    Rule(
        "data.fit",
        ("data.dataset",),
        broken_if(lambda config: config.data.dataset in SQUARE_DATASETS, "on square images"),
    ),
    Rule(
        "data.image_size",
        ("data.size_schedule", "data.val_crop"),
        broken_if(
            lambda config: config.data.size_schedule and config.data.val_crop,
            "with data.size_schedule and data.val_crop",
        ),
    ),
    Rule(
        "data.interpolation",
        (
            *("data.dataset", "data.image_size", "data.val_crop", "data.val_resize"),
            *("augment.resized_crop", "data.size_schedule"),
        ),
        _without_resize,
    ),
    *(
        Rule(
            key,
            ("data.dataset", "data.channels"),
            broken_if(
                lambda config: config.data.channels == 1 or config.data.dataset in GRAYSCALE_DATASETS,
                "on grayscale images",
            ),
        )
        for key in ("augment.saturation", "augment.hue", "augment.grayscale")
    ),
    *(
        Rule(
            key,
            ("augment.mixup", "augment.cutmix"),
            broken_if(
                lambda config: not (config.augment.mixup or config.augment.cutmix),
                "without augment.mixup and augment.cutmix",
            ),
        )
        for key in ("augment.mix_probability", "augment.mix_epochs")
    ),
    *(
        Rule(key, ("task.name",), partial(_outside_task, key))
        for key in sorted({key for facts in TASK_FACTS.values() for key in facts.unused})
    ),
    Rule("loss.label_smoothing", ("loss.name",), _on_user_loss),
    Rule("loss.class_weights", ("loss.name",), _on_user_loss),
    Rule(
        "loss.class_weights",
        ("loss.name",),
        broken_if(
            lambda config: config.loss.name == "asl", "with loss.name=asl, which weighs labels by its own factors"
        ),
    ),
    Rule(
        "optim.clip_norm_type",
        ("optim.clip_norm",),
        broken_if(lambda config: not config.optim.clip_norm, "without optim.clip_norm"),
    ),
    Rule(
        "optim.decay_norms",
        ("optim.weight_decay",),
        broken_if(
            lambda config: not (config.optim.weight_decay or any(config.optim.weight_decay_groups.values())),
            "without optim.weight_decay",
        ),
    ),
    Rule(
        "device.ranks",
        ("device.gpus",),
        broken_if(
            lambda config: config.device.gpus not in ("auto", "cpu"),
            "on GPUs, which have one rank each; select GPUs with device.gpus (--gpus)",
        ),
    ),
    Rule(
        "queue.priority",
        ("device.wait", "queue.after"),
        broken_if(lambda config: not config.waits, "without device.wait (--queue)"),
    ),
    Rule(
        "queue.min_free",
        ("device.gpus",),
        broken_if(lambda config: config.device.gpus == "cpu", "on the CPU (device.gpus=cpu)"),
    ),
    Rule("queue.begin", (), lambda config: _past_begin(config.queue.begin)),
)
