"""Read and write YAML with the scalars of YAML 1.2, without duplicate keys, and of bounded size."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

try:
    from yaml import CSafeLoader as FastSafeLoader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as FastSafeLoader  # type: ignore[assignment]

from engine.base.errors import UsageError
from engine.base.files import read_file

# A complete config has 6 KB.
MAX_CONFIG_BYTES = 1 << 20
# A complete config has 300 values and keys. PyYAML parses 20,000 in about 2 s.
MAX_YAML_NODES = 20_000
MAX_YAML_DEPTH = 50


class YamlLimitError(yaml.MarkedYAMLError):
    """The text has more values, or deeper ones, than a config may have."""


class _LimitedComposer(Composer):
    """Composer of a limited number of nodes.

    Each alias counts as many nodes as what it refers to: ten lines of aliases can expand to 10**10 values.
    """

    _depth = _num_nodes = 0
    _anchored_nodes: dict[str, int]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and those in it. Raises `YamlLimitError`."""
        event: Any = self.peek_event()  # type: ignore[attr-defined]  # a method of the parser
        anchor = event.anchor if isinstance(event, yaml.NodeEvent) else None
        before = self._num_nodes
        self._num_nodes += self._anchored_nodes.get(anchor or "", 1) if isinstance(event, yaml.AliasEvent) else 1
        if self._num_nodes > MAX_YAML_NODES:
            problem = f"has more than {MAX_YAML_NODES:,} values and keys, with its aliases expanded"
            raise YamlLimitError(problem=problem, problem_mark=event.start_mark)
        if self._depth == MAX_YAML_DEPTH:
            problem = f"nests values more than {MAX_YAML_DEPTH} levels deep"
            raise YamlLimitError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._anchored_nodes[anchor] = self._num_nodes - before
        return node


class _Yaml12Loader(_LimitedComposer, yaml.SafeLoader):
    """Loader for YAML 1.2 scalars: `off` is a string and `1e-3` a number. Duplicate keys are errors."""

    def __init__(self, stream: str) -> None:
        yaml.SafeLoader.__init__(self, stream)
        self._anchored_nodes = {}


class _FastLoader(_LimitedComposer, FastSafeLoader):
    """The same for nodes only, parsed by libyaml. Its messages differ."""

    def __init__(self, stream: str) -> None:
        FastSafeLoader.__init__(self, stream)
        Composer.__init__(self)
        self._anchored_nodes = {}


_Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_FastLoader.yaml_implicit_resolvers = _Yaml12Loader.yaml_implicit_resolvers


def _construct_int(loader: _Yaml12Loader, node: yaml.ScalarNode) -> int:
    # The inherited constructor parses 010 as octal.
    return int(str(loader.construct_scalar(node)))


def _construct_str(loader: _Yaml12Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    # The escapes of half a character, such as "\ud800", make text that cannot be printed or written.
    text.encode()
    return text


def _construct_mapping(loader: _Yaml12Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a scalar", problem_mark=key.start_mark)
        if key.value in seen:
            raise yaml.MarkedYAMLError(problem=f"the key {key.value} is duplicated", problem_mark=key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:str", _construct_str)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str) -> Any:
    """Parse YAML text. Raises `yaml.YAMLError` if it is not valid, `YamlLimitError` if it is too large."""
    try:
        return yaml.load(text, _Yaml12Loader)  # noqa: S506 - the loader is a SafeLoader
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # PyYAML's constructors raise these for explicit tags on invalid values, such as `!!float` and `!!bool x`.
        raise yaml.YAMLError(f"a value cannot be parsed ({type(error).__name__}: {error})") from error


def read_yaml(path: Path, shown: str) -> tuple[Any, os.stat_result]:
    """Return the content of a regular file, and its status. Raises UsageError, whose location is `shown`."""
    try:
        data, status = read_file(path, MAX_CONFIG_BYTES)
        return parse_yaml(data.decode()), status
    except OSError as error:
        raise UsageError.one(shown, f"cannot be read: {error.strerror}", code="not-readable") from error
    except UnicodeDecodeError as error:
        raise UsageError.one(shown, "is not UTF-8 text", code="wrong-format") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise yaml_error(f"{shown}{line}", error) from error


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the nodes of valid YAML text with their positions; None if it is empty. Raises `yaml.YAMLError`."""
    node: yaml.Node | None = yaml.compose(text, _Yaml12Loader)
    return node


def compose_yaml_fast(text: str) -> yaml.Node | None:
    """Return the nodes as `compose_yaml` does, in a seventh of the time, for text whose errors nobody reads."""
    node: yaml.Node | None = yaml.compose(text, _FastLoader)
    return node


def yaml_error(location: str, error: yaml.YAMLError, subject: str = "") -> UsageError:
    """Convert an error of the YAML parser to a UsageError at `location`.

    `subject` is what was parsed, where the location alone does not say it.
    """
    reason = f"{subject} " if subject else ""
    problem = str(getattr(error, "problem", None) or error)
    if isinstance(error, YamlLimitError):
        return UsageError.one(location, f"{reason}{problem}", code="too-large")
    return UsageError.one(location, f"{reason}is not valid YAML: {problem}", code="invalid-yaml")


class _QuotingDumper(yaml.SafeDumper):
    """Dumper that quotes strings which a YAML 1.1 or 1.2 reader would not parse as strings, such as the name `1e3`."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes escape the line breaks of Unicode. In single quotes they are read back as a blank.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_QuotingDumper.add_representer(str, _represent_str)
_QuotingDumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_Yaml12Loader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Yaml12Loader.yaml_implicit_resolvers}
}


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return the values as YAML, in their order."""
    return yaml.dump(dict(values), Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True)
