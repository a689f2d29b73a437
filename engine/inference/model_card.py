"""The model card of an export: a README.md with the data, recipe, figures, and how to use the model.

Called by `engine.inference.export`. Text from outside, such as class names, is shown in Markdown code spans, in which
neither HTML nor Markdown has a meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.differences import PATH_KEYS, SESSION_KEYS, flat_values, is_neutral
from engine.config.schema import as_dict
from engine.inference.export_proof import Proof
from engine.inference.loading_code import loading_code
from engine.inference.model_json import ExportFormat, ModelDescription
from engine.inference.trained_model import TrainedCheckpoint
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.utils.text import printable

MAX_LISTED_CLASSES = 100
MAX_VALUE_CHARACTERS = 200


def model_card(
    checkpoint: TrainedCheckpoint,
    run: RunFolder,
    history: History,
    description: ModelDescription,
    proof: Proof,
    file_name: str,
) -> str:
    """Return the README.md of an export. `description` is the content of its model.json with the written file."""
    sections = {
        "Use": _use(checkpoint, file_name, description.files[file_name].format),
        "Data": _data(checkpoint, history),
        "Figures": _figures(description, history),
        "Agreement": code(proof.describe(file_name)),
        "Recipe": _recipe(checkpoint),
    }
    model, classes = code(checkpoint.config.model.name), len(checkpoint.classes)
    title = f"# {code(run.name)}\n\nImage classifier with {classes} classes: {model}, trained with gputrain."
    return "\n\n".join([title, *(f"## {name}\n\n{text}" for name, text in sections.items() if text)]) + "\n"


def code(value: object, *, in_table: bool = False) -> str:
    """Return text from outside as a Markdown code span, without control characters and shortened."""
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    # A span ends at a run of as many backticks as it began with, and loses one space at each end (CommonMark 6.1).
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    text = f" {text} " if not text.strip() or text[0] in "` " or text[-1] in "` " else text
    # GitHub splits the cells of a row before it looks for code spans.
    return f"{fence}{text.replace('|', chr(92) + '|') if in_table else text}{fence}"


def _use(checkpoint: TrainedCheckpoint, file_name: str, file_format: ExportFormat) -> str:
    packages, lines = loading_code(checkpoint, file_name, file_format)
    return (
        f"In the folder of {code(file_name)} and `preprocess.py`, with `pip install {packages}`:\n\n"
        f"```python\n{lines}```"
    )


def _data(checkpoint: TrainedCheckpoint, history: History) -> str:
    data, started = checkpoint.config.data, history.started
    name = code(data.dataset) if data.path is None else f"{code(data.dataset)} in {code(Path(data.path).name)}"
    images = (
        "" if started is None else f", {started.train_images:,} training and {started.val_images:,} validation images"
    )
    shown = ", ".join(code(name) for name in checkpoint.classes[:MAX_LISTED_CLASSES])
    more = len(checkpoint.classes) - MAX_LISTED_CLASSES
    return f"{name}{images}.\n\nClasses: {shown}{f' and {more} more (see model.json)' if more > 0 else ''}."


def _figures(description: ModelDescription, history: History) -> str:
    epochs = "" if history.started is None else f" of {history.started.epochs}"
    accuracy = description.val_accuracy
    rows = [
        ("Validation accuracy", "unknown" if accuracy is None else f"{accuracy:.4f}"),
        ("Epoch", "within an epoch" if description.epoch is None else f"{description.epoch}{epochs}"),
        ("Step", f"{description.step:,}"),
        ("Weights", "exponential moving average (EMA)" if description.ema else "of the last step"),
    ]
    if description.tta != "none":
        rows.append(("Test-time augmentation", "flip: the mean of the logits of each image and its mirror image"))
    if history.started is not None:
        rows.append(("Parameters", f"{history.started.parameters:,}"))
    return _table(("", ""), rows)


def _recipe(checkpoint: TrainedCheckpoint) -> str:
    rows = [(f"`{key}`", code(value, in_table=True)) for key, value in _changed(checkpoint) if not is_neutral(key)]
    return "Config keys that differ from the defaults:\n\n" + _table(("Key", "Value"), rows) if rows else ""


def _changed(checkpoint: TrainedCheckpoint) -> Iterator[tuple[str, Any]]:
    """Yield the config keys that differ from the defaults, with paths shortened to their names."""
    defaults = flat_values({})
    for key, value in flat_values(as_dict(checkpoint.config)).items():
        if value != defaults[key] and key not in SESSION_KEYS:
            yield key, Path(value).name if key in PATH_KEYS and isinstance(value, str) else value


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {first} | {second} |" for first, second in (header, ("---", "---"), *rows))
