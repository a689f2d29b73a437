"""Resolve the input keys of section `data` that are not set, and the precision of a resumed run, before the dataset is
opened.

A run with pretrained weights takes the input transform of the weights, a resumed one that of its first session.
`request`, `external`, `preflight` and `preflight_process` call it, and `engine.doctor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from engine.config.conflicts import config_conflicts
from engine.config.data_sections import DataConfig
from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict
from engine.config.training_sections import AmpLevel
from engine.data.inspection_process import find_item_format
from engine.models.pretrained_input import (
    INPUT_KEYS,
    describe_pretrained_input,
    find_pretrained_input,
    needs_items,
    with_pretrained_input,
)
from engine.runs.checkpoint_files import read_saved_config
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError

if TYPE_CHECKING:
    from engine.launch.request import RunRequest


def with_input_keys(request: RunRequest) -> RunRequest:
    """Return a request with the input keys that its pretrained weights, or the run that it resumes, supply, and with
    the precision of the latter.

    Keys that cannot be resolved stay unset; the preflight reports why."""
    config, folder = request.config, request.resumed_folder
    if folder is not None and (saved := saved_config(folder)) is not None:
        return replace(request, config=_with_saved_precision(_with_saved_input(config, saved), saved))
    try:
        pretrained = find_pretrained_input(config.model)
        if pretrained is None:
            return request
        items = None
        if needs_items(config) and not request.problems:
            # The code of the dataset runs.
            request.code_trust.check(config)
            items = find_item_format(config)
            if items.is_float:
                return request
        config = with_pretrained_input(config, pretrained, items)
    except UsageError:
        return request
    return replace(request, config=config, input_source=describe_pretrained_input(config, pretrained))


def saved_config(folder: RunFolder) -> Mapping[str, Any] | None:
    """Return the config of a run, by section; None if it has none. Raises UsageError if it cannot be read.

    That of the newest checkpoint is preferred, because `config.yaml` may have been edited."""
    saved = read_saved_config(folder.checkpoints)
    if saved is None and folder.config.exists():
        # Only compared: no code that it names runs.
        saved = as_dict(resolve_config(str(folder.config), trust_code=True).config)
    return saved


def _with_saved_precision(config: Config, saved: Mapping[str, Any]) -> Config:
    """Set `precision.amp` to the level that the run began with, if it is auto and other keys permit that level."""
    precision = saved.get("precision")
    if config.precision.amp != "auto" or not isinstance(precision, Mapping):
        return config
    levels: tuple[AmpLevel, ...] = get_args(AmpLevel)
    amp = next((level for level in levels if level == precision.get("amp")), "auto")
    resumed = config.with_values(precision={"amp": amp})
    return config if any(config_conflicts(resumed)) else resumed


def _with_saved_input(config: Config, saved: Mapping[str, Any]) -> Config:
    """Set the input keys that are not set to those of the run."""
    data, model = (saved.get(name) for name in ("data", "model"))
    if not isinstance(data, Mapping) or not isinstance(model, Mapping):
        return config
    if "pretrained" not in (config.model.weights, model.get("weights")):
        return config
    unset = {key: data[key] for key in INPUT_KEYS if getattr(config.data, key) is None and data.get(key) is not None}
    try:
        checked = DataConfig.model_validate({**config.data.model_dump(mode="json", exclude_unset=True), **unset})
    except ValidationError:
        return config
    return config.model_copy(update={"data": checked})
