"""Completions of the form: choices of a field, and the names of models and optimizers in the installed libraries.

The libraries' names come from catalogs on disk. Reading them may start a helper process, so a thread calls `load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.models.catalog import (
    MODEL_SOURCES,
    CatalogModel,
    builtin_models,
    library_models,
)
from engine.optim.timm_optimizers import timm_optimizer_names
from engine.utils.errors import UsageError
from engine.utils.units import format_large
from tui.form.fields import ConfigField

MODEL_KEY, OPTIMIZER_KEY, WEIGHTS_KEY = "model.name", "optim.name", "model.weights"
# Keys whose names are in catalogs.
CATALOG_KEYS = (MODEL_KEY, OPTIMIZER_KEY)
MAX_COMPLETIONS = 200
DEFAULT_CHOICE = "default"


@dataclass(frozen=True)
class Completion:
    """A value that a field accepts, with facts about it."""

    value: str
    detail: str = ""

    @property
    def label(self) -> str:
        return self.value or DEFAULT_CHOICE


class Completer:
    """Completes the values of fields. Until the catalogs are loaded, it knows only the built-in names."""

    def __init__(self) -> None:
        self._models = builtin_models()
        self._known_models: dict[str, list[Completion]] = {}
        """Completions by `model.source`: there are more than a thousand, and each letter searches them."""
        self._optimizers: list[str] = []

    def load(self) -> None:
        """Read the catalogs. May block for seconds, when a library is used for the first time."""
        models = builtin_models()
        for source in MODEL_SOURCES[1:]:
            try:
                models += library_models(source)
            except UsageError:
                # Not installed, or broken: the preflight reports it if a model of it is selected.
                continue
        self._models = models
        self._known_models = {}
        self._optimizers = timm_optimizer_names()

    def completions(self, info: ConfigField, text: str, values: Mapping[str, str]) -> list[Completion]:
        """Return the values that contain `text`, those that begin with it first; all values for an empty text."""
        word = text.strip().lower()
        known = self._known(info, values)
        found = [completion for completion in known if word in completion.value.lower()]
        return sorted(found, key=lambda completion: not completion.value.lower().startswith(word))[:MAX_COMPLETIONS]

    def _known(self, info: ConfigField, values: Mapping[str, str]) -> Sequence[Completion]:
        if info.key == MODEL_KEY:
            source = values.get("model.source", "auto")
            # The thread that loads the catalogs replaces the dictionary after the models.
            known = self._known_models
            if source not in known:
                known[source] = self._describe_models(source)
            return known[source]
        if info.key == WEIGHTS_KEY:
            return [Completion("", "random initialization"), Completion("pretrained", "weights of the library")]
        names = [*info.choices, *(self._optimizers if info.key == OPTIMIZER_KEY else ())]
        return [Completion(name) for name in names]

    def _describe_models(self, source: str) -> list[Completion]:
        models = [model for model in self._models if source in ("auto", model.source)]
        # With model.source=auto, the first source that has the name.
        first = {model.name: model for model in reversed(models)}
        return [Completion(name, describe_model(first[name])) for name in dict.fromkeys(m.name for m in models)]


def describe_model(model: CatalogModel) -> str:
    """Return the library, size and accuracy of a model, as far as they are known."""
    words = [format_large(model.parameters) if model.parameters is not None else "", model.source]
    words.append("" if model.top1 is None else f"top-1 {model.top1:.1f}%")
    # An accuracy is that of pretrained weights.
    words.append("pretrained" if model.weights and model.top1 is None else "")
    return ", ".join(word for word in words if word)
