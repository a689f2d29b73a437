"""Schema of a run's config: the source for YAML, command line, form, validation and reference documentation.

A config is frozen and does not record where its values came from; `engine.config.loader` merges the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from engine.config.command_line import format_value
from engine.config.data_sections import AugmentConfig, DataConfig
from engine.config.notify_section import NotifyConfig
from engine.config.queue_section import QueueConfig
from engine.config.run_sections import CheckpointConfig, DeviceConfig, RunConfig
from engine.config.section import Section
from engine.config.task_section import TaskConfig
from engine.config.training_sections import (
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
)


def _section(model: type[Section], title: str, description: str) -> Any:
    # Validators of a section are built when one is validated: the run of a command needs those of few.
    return Field(model.model_construct(), title=title, description=description)


class Config(Section):
    """Config of a run: all sections."""

    run: RunConfig = _section(RunConfig, "Run", "Name, length and lifecycle of the run.")
    device: DeviceConfig = _section(DeviceConfig, "Hardware", "GPUs, ranks and how they communicate.")
    data: DataConfig = _section(DataConfig, "Data", "Dataset and input pipeline.")
    augment: AugmentConfig = _section(AugmentConfig, "Augmentation", "Augmentation of training images.")
    task: TaskConfig = _section(TaskConfig, "Task", "What the model predicts for an image.")
    model: ModelConfig = _section(ModelConfig, "Model", "Model, initial weights and compilation.")
    loss: LossConfig = _section(LossConfig, "Loss", "Loss function.")
    optim: OptimConfig = _section(OptimConfig, "Optimization", "Optimizer and gradient handling.")
    schedule: ScheduleConfig = _section(ScheduleConfig, "Schedule", "LR schedule and warmup.")
    precision: PrecisionConfig = _section(PrecisionConfig, "Precision", "Mixed precision.")
    eval: EvalConfig = _section(EvalConfig, "Evaluation", "Evaluation of the model.")
    checkpoint: CheckpointConfig = _section(
        CheckpointConfig, "Checkpoints", "When checkpoints are saved and how many are kept."
    )
    notify: NotifyConfig = _section(NotifyConfig, "Notifications", "Messages about a run, sent through apprise.")
    queue: QueueConfig = _section(QueueConfig, "Queue", "Order, dependencies and sharing of runs that wait for GPUs.")

    @property
    def waits(self) -> bool:
        """Whether the run waits for GPUs that are not free, for other runs or for a time."""
        return self.device.wait or bool(self.queue.after or self.queue.begin)

    def with_values(self, **sections: Mapping[str, Any]) -> Config:
        """Return a config that also sets these values, by section. They are not validated."""
        update = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=update)


def sections() -> dict[str, type[Section]]:
    """Map each section's name to its model, in schema order."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key as `section.key`, with its pydantic field."""
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            yield f"{section}.{name}", field


def is_text_field(field: FieldInfo) -> bool:
    """Whether a field holds free text (a name, path or selection), not a number or one of fixed choices."""
    either = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else ()
    kinds = [field.annotation, *either]
    return any(kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str) for kind in kinds)


def first_sentence(description: str) -> str:
    """Return the first sentence of a description."""
    first, dot, _ = description.partition(". ")
    return f"{first}." if dot else first


def summarize_key(key: str, *, with_default: bool = True) -> str:
    """Return the first sentence about `section.key`, the key and its default if it has one: `… [optim.lr=0.05]`."""
    section, _, name = key.partition(".")
    field = sections()[section].model_fields[name]
    has_default = with_default and field.default is not False and field.default not in (None, (), {})
    default = f"={format_value(field.default)}" if has_default else ""
    return f"{first_sentence(str(field.description))} [{key}{default}]"


# Keys that no config file may set, and none holds: a setting of the user, and what one start of a run waits for.
UNSTORED_KEYS = ("run.code_packages", "queue.after", "queue.begin")


def as_dict(config: Config, *, only_changed: bool = False) -> dict[str, dict[str, Any]]:
    """Return plain values by section, for YAML and JSON. `only_changed` omits the defaults."""
    values = {name: section.model_dump(mode="json", exclude_defaults=only_changed) for name, section in config}
    return {section: keys for section, keys in values.items() if keys or not only_changed}


@cache
def default_section(name: str) -> Mapping[str, Any]:
    """Return the plain default values of a section."""
    return sections()[name].model_construct().model_dump(mode="json")


def as_stored(config: Config, *, only_changed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the values that a config file or a checkpoint holds: those of `as_dict` without the `UNSTORED_KEYS`, and
    without a default that the run may still reduce."""
    return without_unstored(without_default_batch_size(config, as_dict(config, only_changed=only_changed)))


def without_default_batch_size(config: Config, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values of a config without `data.batch_size` if it is not set: the preflight reduces the default to
    small datasets, and refuses a size that is set. The config of a run that has started sets it."""
    is_set = "batch_size" in config.data.model_fields_set
    return {
        section: {key: value for key, value in keys.items() if is_set or (section, key) != ("data", "batch_size")}
        for section, keys in values.items()
    }


def without_unstored(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return values by section without the `UNSTORED_KEYS`, and without the sections that this empties."""
    kept = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in UNSTORED_KEYS}
        for section, keys in values.items()
    }
    return {section: keys for section, keys in kept.items() if keys}
