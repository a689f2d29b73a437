"""The messages of gputrain, read from its source: every call with `code="…"` and the text beside it.

Tests find a message by its code (`says`), so that its words can change. The words themselves are compared with
messages.txt by test_messages.py alone; `python tests/support/messages.py` writes that file anew.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from engine.utils.errors import CodedError, Problem, UsageError

TESTS = Path(__file__).parents[1]
CATALOG = TESTS / "messages.txt"
PLACEHOLDER = "{}"
MAX_VARIANTS = 16  # of one text that contains conditions


def says(text: str, code: str, *values: object) -> bool:
    """Whether `text` contains a message of this code, and all `values`. Line breaks count as spaces."""
    text = " ".join(text.split())
    return any(pattern.search(text) for pattern in _patterns(code)) and all(str(value) in text for value in values)


@contextmanager
def raises_problem(code: str, location: str | None = None, *values: object) -> Iterator[None]:
    """Expect a UsageError or CodedError with this code, at this location, whose text contains all `values`."""
    with pytest.raises((UsageError, CodedError)) as caught:
        yield
    error = caught.value
    problems = error.problems if isinstance(error, UsageError) else [Problem("", str(error), code=error.code)]
    assert has_problem(problems, code, location, *values), [(problem.code, str(problem)) for problem in problems]


def has_problem(problems: list[Problem], code: str, location: str | None = None, *values: object) -> bool:
    """Whether one of `problems` has this code and location, and a text that contains all `values`."""
    return any(
        problem.code == code
        and location in (None, problem.location)
        and all(str(value) in str(problem) for value in values)
        for problem in problems
    )


@cache
def _patterns(code: str) -> list[re.Pattern[str]]:
    texts = [text for text in read_messages()[code] if re.search(r"\w{3}", text.replace(PLACEHOLDER, ""))]
    assert texts, f"no message with code={code!r} has words of its own in the source"
    return [re.compile(".*?".join(re.escape(part.strip()) for part in text.split(PLACEHOLDER))) for text in texts]


@cache
def read_messages() -> dict[str, list[str]]:
    """Return the texts of each code, sorted. `{}` stands for each value."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in ("engine", "tui"):
        for path in (TESTS.parent / package).rglob("*.py"):
            for function, call in _calls(ast.parse(path.read_text())):
                for code in (_string(keyword.value) for keyword in call.keywords if keyword.arg == "code"):
                    if code is not None:
                        found[code].update(_message_texts(call, function))
    return defaultdict(list, {code: sorted(texts) for code, texts in sorted(found.items())})


def format_catalog() -> str:
    """Return the text of messages.txt."""
    return "\n".join(f"{code}\n" + "".join(f"  {text}\n" for text in texts) for code, texts in read_messages().items())


def _calls(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield each call, and the function or module that contains it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function or tree, node
        yield from _calls(node, node if isinstance(node, ast.FunctionDef) else function or tree)


def _message_texts(call: ast.Call, function: ast.AST) -> list[str]:
    """Return the texts that a call may build: its arguments but the code, joined where several are words."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "code")]
    texts = []
    for value in values:
        for source in _definitions(value, function) if isinstance(value, ast.Name) else [value]:
            texts += [" ".join(text.split()) for text in _variants(source)]
    return [text for text in texts if " " in text.replace(PLACEHOLDER, "").strip()]


def _definitions(name: ast.Name, function: ast.AST) -> list[ast.expr]:
    """Return the values that the function assigns to a variable."""
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == name.id
    ]


def _variants(node: ast.expr) -> list[str]:
    """Return the texts that an expression may have; a value that is not in the source is a placeholder."""
    if (text := _string(node)) is not None:
        return [text]
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


if __name__ == "__main__":
    CATALOG.write_text(format_catalog())
