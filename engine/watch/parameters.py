"""Read the parameters of a foreign run: what its trainer was configured with, flattened to dotted keys.

The files are those of Hydra, Lightning (`hparams.yaml`), timm and ultralytics (`args.yaml`), W&B (`config.yaml` with
a `value` per key). The readers of formats that hold parameters themselves (TensorBoard, W&B, trackio, MLflow, Hugging
Face) flatten them here, too.

YAML is never constructed, only composed to nodes: `hparams.yaml` has tags of Python objects, whose text is all that is
read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.files import read_bytes
from engine.base.text import printable
from engine.watch.reading import Listing, Scalar, list_folder

if TYPE_CHECKING:
    import yaml

MAX_PARAMETERS = 1000
MAX_KEY_LENGTH = 200
MAX_TEXT_LENGTH = 500
MAX_DEPTH = 8
MAX_FILE_BYTES = 1 << 18
MAX_INTEGER_BITS = 64

# Of a key that several files have, the first one counts.
YAML_FILES = (".hydra/config.yaml", "hparams.yaml", "args.yaml", "config.yaml", "files/config.yaml")

Parameters = dict[str, Scalar]


def read_parameters(folder: Path) -> Parameters:
    """Return the parameters in the files of a run's folder. Files that are missing or damaged are passed over."""
    # One listing takes less time than trying to open each file.
    listing = list_folder(folder)
    found: Parameters = {}
    for parameters in (_read_yaml_parameters(listing, name) for name in YAML_FILES):
        found |= {key: value for key, value in parameters.items() if key not in found}
    return dict(islice(found.items(), MAX_PARAMETERS))


def merge_parameters(known: Parameters, found: Parameters) -> Parameters:
    """Return the parameters of a run with those that were found later, bounded in number."""
    return dict(islice((known | found).items(), MAX_PARAMETERS)) if found else known


def flatten(values: Any) -> Parameters:
    """Return JSON values as parameters with dotted keys, bounded in number, length and depth.

    A list of scalars is one parameter, its text. Longer text is cut, and longer keys are left out.
    """
    return dict(islice(_leaves(values, "", MAX_DEPTH), MAX_PARAMETERS))


def _leaves(value: Any, prefix: str, depth: int) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, list) and (depth == 0 or not any(isinstance(item, dict | list) for item in value)):
        value = _list_text(value)
    if not isinstance(value, dict | list):
        if 0 < len(prefix) <= MAX_KEY_LENGTH:
            yield printable(prefix), to_scalar(value)
    elif depth > 0 and len(prefix) <= MAX_KEY_LENGTH:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _leaves(part, f"{prefix}.{key}" if prefix else str(key), depth - 1)


def _list_text(values: list[Any]) -> str:
    scalars = [to_scalar(value) for value in values[:MAX_TEXT_LENGTH] if not isinstance(value, dict | list)]
    return json.dumps(scalars, ensure_ascii=False)


def to_scalar(value: Any) -> Scalar:
    """Return a bounded parameter. Text that cannot be encoded is replaced."""
    if isinstance(value, str):
        return value[:MAX_TEXT_LENGTH].encode(errors="replace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() <= MAX_INTEGER_BITS else math.copysign(math.inf, 1 if value > 0 else -1)
    return value if isinstance(value, bool | float | None) else str(value)[:MAX_TEXT_LENGTH]


def parse_scalar(text: str) -> Scalar:
    """Return text of a format without types as a boolean, a number or itself."""
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    if text in ("null", "None", "~", ""):
        return None
    for kind in (int, float) if len(text) <= MAX_INTEGER_BITS else ():
        try:
            return to_scalar(kind(text))
        except ValueError:
            continue
    return to_scalar(text)


def _read_yaml_parameters(listing: Listing, name: str) -> Parameters:
    first, _, inner = name.partition("/")
    if first not in (listing.folders if inner else listing.files):
        return {}
    try:
        text = read_bytes(listing.folder / name, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return {}
    # PyYAML takes 20 ms to import, and a list of runs reads no parameters.
    import yaml

    from engine.config.yaml_io import MAX_YAML_NODES, compose_yaml_fast

    try:
        values = _plain(compose_yaml_fast(text), MAX_DEPTH, iter(range(MAX_YAML_NODES)))
    except yaml.YAMLError:
        return {}
    return flatten(_without_wandb_wrapper(values))


def _plain(node: yaml.Node | None, depth: int, left: Iterator[int]) -> Any:
    """Return the values of a YAML node. The tags of what is no scalar of YAML are ignored.

    `left` has an item for each node that may be visited: a list that holds itself a thousand times has 1000**8.
    """
    import yaml

    if next(left, None) is None:
        return None
    if isinstance(node, yaml.MappingNode):
        pairs = node.value if depth > 0 else ()
        scalar_keys = ((key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode))
        return {str(key.value): _plain(value, depth - 1, left) for key, value in scalar_keys}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, depth - 1, left) for item in node.value] if depth > 0 else []
    if isinstance(node, yaml.ScalarNode):
        tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
        return parse_scalar(str(node.value)) if tag in ("bool", "int", "float", "null") else str(node.value)
    return None


def _without_wandb_wrapper(values: Any) -> Any:
    """Return the values of W&B's `config.yaml`, which has `key: {desc: …, value: …}`, and any other file as it is."""
    if not isinstance(values, dict) or not WRITER_KEYS.intersection(values):
        return values
    wrapped = {key: part["value"] for key, part in values.items() if isinstance(part, dict) and "value" in part}
    return without_wandb_keys(wrapped)


def without_wandb_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that W&B and trackio add."""
    return {key: value for key, value in config.items() if key not in WRITER_KEYS}


WRITER_KEYS = frozenset({"_wandb", "wandb_version", "_Username", "_Created", "_Group"})
