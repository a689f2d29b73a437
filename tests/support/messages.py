"""The messages of gputrain, read from its source: every call with `code="…"` and the text beside it.

Tests find a message by its code (`says`), so that its words can change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from engine.base.errors import CodedError, Problem, UsageError

ROOT = Path(__file__).parents[2]
PLACEHOLDER = "{}"
ADVICE_MARK = "; "
MAX_VARIANTS = 16  # of one text that contains conditions
MIN_LETTERS = 8  # a text with fewer letters beside its values would be found in other texts
# Positions of the arguments that are no reason.
LOCATION_ARGUMENT = {"Problem": 0, "one": 0, "Rule": 0}
ADVICE_ARGUMENT = {"Problem": 2, "one": 2, "Check": 4, "Rule": 3}

# `engine.config.messages` joins these words for all keys.
SHARED_WORDS = {"out-of-range": "is not allowed: must be "}

Blocks = tuple[tuple[ast.AST, str], ...]


def says(text: str, code: str, *values: object) -> bool:
    """Whether `text` contains a message of this code, and all `values`. Line breaks count as spaces."""
    text = " ".join(text.split())
    found = any(pattern.search(text) for pattern in _patterns(code)) or SHARED_WORDS.get(code, "\n") in text
    return found and all(str(value) in text for value in values)


@contextmanager
def raises_problem(
    code: str, location: str | None = None, *values: object, kind: type[UsageError | CodedError] = UsageError
) -> Iterator[None]:
    """Expect an error of this class and code, at this location, whose text contains all `values`."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    problems = error.problems if isinstance(error, UsageError) else [Problem("", str(error), code=error.code)]
    assert has_problem(problems, code, location, *values), [(problem.code, str(problem)) for problem in problems]


def has_problem(problems: Sequence[Problem], code: str, location: str | None = None, *values: object) -> bool:
    """Whether one of `problems` has this code and location, and a text that contains all `values`."""
    return any(
        problem.code == code
        and location in (None, problem.location)
        and all(str(value) in str(problem) for value in values)
        for problem in problems
    )


@cache
def _patterns(code: str) -> list[re.Pattern[str]]:
    texts = [text for text in read_messages(code) if not text.startswith(ADVICE_MARK) and _literal_length(text)]
    assert texts, f"no message with code={code!r} has enough words of its own in the source"
    return [re.compile(".*?".join(re.escape(part.strip()) for part in text.split(PLACEHOLDER))) for text in texts]


def _literal_length(text: str) -> int:
    """Return the number of letters beside the placeholders; 0 if they are too few to tell the message from others."""
    letters = len(re.sub(r"\W", "", text.replace(PLACEHOLDER, "")))
    return letters if letters >= MIN_LETTERS else 0


@cache
def read_messages(code: str) -> list[str]:
    """Return the texts of a code. `{}` stands for each value. Advice has a text of its own."""
    classes = _classes_with(code)
    found: set[str] = set()
    for tree in _trees_with(f'"{code}"', *(f"{name}(" for name in classes)):
        for place in _calls(tree):
            given = next((keyword.value for keyword in place.call.keywords if keyword.arg == "code"), None)
            if _string(given) == code if given is not None else ast.unparse(place.call.func) in classes:
                found.update(_message_texts(place))
    return sorted(found)


@cache
def _sources() -> dict[Path, str]:
    return {path: path.read_text() for package in ("engine", "tui") for path in (ROOT / package).rglob("*.py")}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_sources()[path])


def _trees_with(*words: str) -> list[ast.Module]:
    """Return the modules whose source has one of these words: to parse all of them takes seconds."""
    return [_tree(path) for path, text in _sources().items() if any(word in text for word in words)]


def _classes_with(code: str) -> set[str]:
    """Return the exception classes that set this code for calls without one."""
    return {
        node.name
        for tree in _trees_with(f'    code = "{code}"')
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line) == f"code = {code!r}"
    }


@cache
def _functions(name: str) -> list[ast.FunctionDef]:
    nodes = (node for tree in _trees_with(f"def {name}(") for node in ast.walk(tree))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]


@dataclass(frozen=True)
class Place:
    """A call, the function or module that contains it, and the blocks around it, the outermost first.

    A block is a list of statements: the node that has it, and the name of its field.
    """

    call: ast.Call
    function: ast.AST
    blocks: Blocks


def _nodes(node: ast.AST, blocks: Blocks = ()) -> Iterator[tuple[ast.AST, Blocks]]:
    """Yield each node below a node, with the blocks around it."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                around = (*blocks, (node, name)) if isinstance(child, ast.stmt) else blocks
                yield child, around
                yield from _nodes(child, around)


def _calls(tree: ast.Module) -> Iterator[Place]:
    for node, blocks in _nodes(tree):
        if isinstance(node, ast.Call):
            owners = [owner for owner, _ in blocks if isinstance(owner, ast.FunctionDef)]
            function = owners[-1] if owners else tree
            start = next((index for index, (owner, _) in enumerate(blocks) if owner is function), 0)
            yield Place(node, function, blocks[start:])


def _message_texts(place: Place) -> list[str]:
    """Return the texts that a call may build. A location is no text of its own."""
    name = ast.unparse(place.call.func).rpartition(".")[2]
    location, advice = LOCATION_ARGUMENT.get(name), ADVICE_ARGUMENT.get(name)
    values = [(value, index == advice) for index, value in enumerate(place.call.args) if index != location]
    keywords = [item for item in place.call.keywords if item.arg not in ("code", "location")]
    values += [(item.value, item.arg == "advice") for item in keywords]
    texts = []
    for value, is_advice in values:
        for found in _definitions(value, place) if isinstance(value, ast.Name) else [value]:
            is_rule = isinstance(found, ast.Call) and ast.unparse(found.func) == "broken_if"
            source = found.args[1] if is_rule else found
            for variant in _returned_texts(source) or _variants(source):
                text = " ".join(variant.split())
                if " " in text.replace(PLACEHOLDER, "").strip():
                    texts.append(ADVICE_MARK + text if is_advice else text)
    return texts


def _definitions(name: ast.Name, place: Place) -> list[ast.expr]:
    """Return the values that a variable may have in a call: those assigned before it, the last one first.

    An assignment in another branch does not reach the call. One in a block around the call hides those before it.
    """
    assigned = [
        (node, blocks)
        for node, blocks in _nodes(place.function, ())
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        and node.lineno <= place.call.lineno
        and any(isinstance(target, ast.Name) and target.id == name.id for target in _targets(node))
    ]
    values = []
    for node, blocks in reversed(assigned):
        differences = [(mine, other) for mine, other in zip(blocks, place.blocks, strict=False) if mine != other]
        if differences and differences[0][0][0] is differences[0][1][0]:
            continue
        if node.value is not None:
            values.append(node.value)
        if not differences and len(blocks) <= len(place.blocks):
            break
    return values


def _targets(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _returned_texts(value: ast.expr) -> list[str]:
    """Return the texts that a function of the project returns, if the value is its call."""
    if not isinstance(value, ast.Call):
        return []
    found = _functions(ast.unparse(value.func).rpartition(".")[2])
    returns = [node.value for function in found[:1] for node in ast.walk(function) if isinstance(node, ast.Return)]
    texts = [text for item in returns if item is not None for text in _variants(item)]
    return [text for text in texts if text != PLACEHOLDER] if len(found) == 1 else []


def _variants(node: ast.expr) -> list[str]:
    """Return the texts that an expression may have; a value that is not in the source is a placeholder."""
    if (text := _string(node)) is not None:
        return [re.sub(r"\{[a-z_]+\.[a-z_:]+\}", PLACEHOLDER, text)]
    if isinstance(node, ast.Lambda):
        return _variants(node.body)
    if isinstance(node, ast.IfExp):
        return [*_variants(node.body), *_variants(node.orelse)][:MAX_VARIANTS]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _join([node.left, node.right])
    if isinstance(node, ast.JoinedStr):
        return _join(node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp | ast.Constant | ast.JoinedStr):
        return _variants(node.value)
    return [PLACEHOLDER]


def _join(parts: list[ast.expr]) -> list[str]:
    texts = [""]
    for part in parts:
        texts = [text + variant for text in texts for variant in _variants(part)][:MAX_VARIANTS]
    return texts


def _string(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
