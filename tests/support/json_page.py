"""The page `engine/JSON.md`, made of the records in `tui.cli.outputs` and of the records that they contain.

test_json.py compares it with the source; `python tests/support/json_page.py` writes it anew.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.runs.profile_file import Profile
from engine.runs.records import Bottleneck, GpuSummary, RankDevice
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunValues
from engine.show.awaited_run import AwaitedRun
from engine.show.outcome import RunFailure, RunOutcome, ShownRun
from engine.utils.codec import Record, fields
from tui.cli import model_outputs, outputs

PAGE = Path(__file__).parents[2] / "engine" / "JSON.md"
HEAD = """# What `--json` prints

Made of the records of the source by `python tests/support/json_page.py`: do not edit.

- Each command prints one object, whose `format` is 1. A command that prints a stream (`run`, `lr-find`, `gpus --watch`,
  `gpus --record`) prints one object per line, and each line has `format`.
- A new field needs no new number. To remove, rename or redefine one raises it. Readers ignore fields that they do not
  know.
- A value that is unknown or not finite is null. Times are Unix seconds, sizes bytes, shares and accuracies 0 to 1.
- Text is ASCII: other characters are escaped. Messages go to stderr, and are no part of the object.

| command | what it prints |
|---|---|
| `gputrain run --json` | the events of `engine/runs/events.py` and `engine/runs/command_events.py` |
| `gputrain lr-find --json` | events, and `lr_step`, `lr_found` and `lr_written` of `tui/cli/lr_find.py` |
| `gputrain gpus --json` | `Snapshot` of `engine/gpus/snapshot.py` |
| `gputrain predict --json` | `run`, `checkpoint`, `images` (`path`, `classes`) and `skipped` (`path`, `reason`) |
"""
# Records that others contain or extend, each described once.
PARTS: tuple[type[Record], ...] = (
    AwaitedRun, RunOutcome, RunFailure, RunValues, RunRecord, RankDevice, GpuSummary, Bottleneck,
)  # fmt: skip
NAMES = {part.__name__ for part in PARTS}
# Fields of `RunRecord` are listed once.
EXTENDED = {ShownRun: RunValues, RunValues: RunRecord, outputs.ProfileOutput: Profile}


def make_page() -> str:
    """Return the content of `engine/JSON.md`."""
    commands = (ShownRun, *_outputs(outputs), *_outputs(model_outputs))
    sections = ["## Commands", "", *map(_section, commands), "## Objects in them", "", *map(_section, PARTS)]
    return "\n".join([HEAD, *sections])


def _outputs(module: Any) -> Iterator[type[Record]]:
    for kind in vars(module).values():
        is_output = isinstance(kind, type) and kind.__module__ == module.__name__ and issubclass(kind, Record)
        if is_output and kind is not outputs.Output:
            yield kind


def _section(kind: type[Record]) -> str:
    base, tree = EXTENDED.get(kind), class_tree(kind)
    title, _, text = _one_line(ast.get_docstring(tree) or "").partition(": ")
    if kind in PARTS:
        title, text = f"`{kind.__name__}`", _one_line(ast.get_docstring(tree) or "")
    documents = field_documents(tree)
    names = [part.encode_name for part in fields(kind) if part.name in documents]
    types = {name: _type_text(tree, name) for name in documents}
    rows = [f"| `{name}` | {types[name]} | {documents[name]} |" for name in names]
    more = [] if base is None else [f"Also the fields of `{base.__name__}`{_module_hint(base)}.", ""]
    table = ["| field | type | |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### {title}", "", *([text, ""] if text else []), *more, *table])


def _module_hint(kind: type[Record]) -> str:
    return "" if kind.__name__ in NAMES else f" in `{kind.__module__.replace('.', '/')}.py`"


def class_tree(kind: type[Record]) -> ast.ClassDef:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree


def field_documents(tree: ast.ClassDef) -> dict[str, str]:
    """Return the fields that a class declares itself, with the text below each."""
    documents = {}
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            documents[node.target.id] = _one_line(str(following.value.value)) if is_text else ""
    return documents


def _type_text(tree: ast.ClassDef, name: str) -> str:
    """Return the type of a field in the words of JSON."""
    node = next(
        part for part in tree.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == name
    )  # fmt: skip
    return _words(node.annotation)


_SIMPLE = {
    "str": "text", "bool": "true or false", "Count": "integer", "Integer": "integer", "Finite": "number",
    "Number": "number", "Seconds": "number", "UnixTime": "number", "None": "null", "Values": "object",
    "Any": "any value", "Figures": "object of numbers", "RunState": "text", "ConfigText": "text",
    "ConfigValue": "any value",
    "_Scalar": "text, number, true, false or null", "BottleneckKind": "text",
}  # fmt: skip


def _words(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return _SIMPLE.get(name) or f"`{name}`"
        case ast.Constant(value=None):
            return "null"
        case ast.BinOp(left=left, right=ast.Name(id="UnsetType")):
            return f"{_words(left)}, or absent"
        case ast.BinOp(left=left, right=right):
            return f"{_words(left)} or {_words(right)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return _words(first)
        case ast.Subscript(value=ast.Name(id="list" | "tuple"), slice=ast.Tuple(elts=[item, *_]) | item):
            return f"array of {_words(item)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, item])):
            return f"object of {_words(item)}"
    raise AssertionError(ast.dump(node))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(make_page())
