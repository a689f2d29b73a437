"""Suggestions for misspelled words, and the codes of errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from engine.base.errors import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "closest"),
    [
        ("resnet81", "resnet18 cnn", "resnet18"),
        ("rnu", "queue run", "run"),
        ("Netnc", "Net7 NetNC", "NetNC"),
        ("--trust", "--to --trust-code", "--trust-code"),
        ("efficientnetb0", "efficientnet_b1 efficientnet_b0", "efficientnet_b0"),
    ],
)
def test_did_you_mean_suggests_closest_word(word: str, known: str, closest: str) -> None:
    assert did_you_mean(word, known.split()) == f"; did you mean {closest}?"


def test_coded_errors_have_a_code_of_their_class_or_call() -> None:
    root = Path(__file__).parents[3]
    texts = {path: path.read_text() for package in ("engine", "tui") for path in (root / package).rglob("*.py")}

    def nodes_with(*words: str) -> list[tuple[Path, ast.AST]]:
        """The nodes of the files that have one of these words: to parse all files takes seconds."""
        found = [path for path, text in texts.items() if any(word in text for word in words)]
        return [(path, node) for path in found for node in ast.walk(ast.parse(texts[path]))]

    without = {
        node.name
        for _, node in nodes_with("(CodedError):")
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["CodedError"]
        if not any(ast.unparse(line).startswith("code = ") for line in node.body)
    }
    assert "ShardError" in without
    names = {*without, "CodedError"}
    calls = [
        f"{path}:{node.lineno}"
        for path, node in nodes_with(*(f"{name}(" for name in names))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        if all(keyword.arg != "code" for keyword in node.keywords)
    ]
    assert calls == []
