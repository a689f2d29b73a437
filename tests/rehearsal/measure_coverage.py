"""Measure which lines of engine under a CUDA or NCCL branch run in the rehearsal.

    python tests/rehearsal/measure_coverage.py [PYTEST ARGUMENT ...]

It runs pytest (by default, everything in tests/rehearsal) with coverage in every process, and prints the lines that did
not run. uncovered.md says why they do not.

A line is under such a branch if it names torch.cuda, "cuda" or nccl, if it runs only where a condition that names one
of these or `on_gpu` holds, or if it belongs to a function or class that only such lines name.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[2]
GPU_CONDITION = re.compile(r"\bcuda\b|nccl|on_gpu|is_cuda", re.I)
GPU_STATEMENT = re.compile(r"torch\.cuda|'cuda'|'nccl'")
NEGATION = re.compile(r"\bnot [\w.]*on_gpu|^not |!= 'cuda'|is None")
Lines = set[int]


def lines_of(statements: Iterable[ast.stmt]) -> Lines:
    return {line for each in statements for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements below a node."""
    for child in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(child, name, None)
            if isinstance(block, list) and block:
                yield block


def gpu_lines(tree: ast.Module) -> Lines:
    """Return the lines under a CUDA or NCCL branch."""
    found: Lines = set()
    for block in blocks(tree):
        for index, statement in enumerate(block):
            if isinstance(statement, ast.If) and GPU_CONDITION.search(condition := ast.unparse(statement.test)):
                negated = NEGATION.search(condition) is not None
                found |= lines_of(statement.orelse if negated else statement.body)
                if negated and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue):
                    found |= lines_of(block[index + 1 :])
            elif not hasattr(statement, "body") and GPU_STATEMENT.search(ast.unparse(statement)):
                found |= lines_of([statement])
    return found


def all_gpu_lines(trees: dict[Path, ast.Module]) -> dict[Path, Lines]:
    """Return the lines under a CUDA or NCCL branch of all modules, with functions and classes that only these name."""
    found = {path: gpu_lines(tree) for path, tree in trees.items()}
    references: dict[str, list[tuple[Path, int]]] = {}
    definitions = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name is not None:
                references.setdefault(name, []).append((path, node.lineno))
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                definitions.append((path, node))
    while True:
        before = sum(map(len, found.values()))
        for path, node in definitions:
            own = range(node.lineno, (node.end_lineno or 0) + 1)
            users = [user for user in references.get(node.name, []) if not (user[0] == path and user[1] in own)]
            if users and all(line in found[other] for other, line in users):
                found[path] |= lines_of(node.body)
        if sum(map(len, found.values())) == before:
            return found


def run_tests(folder: Path, arguments: list[str]) -> None:
    settings = folder / "coverage.ini"
    settings.write_text(
        f"[run]\nparallel = true\nsigterm = true\ndata_file = {folder / 'data'}\nsource = {ROOT / 'engine'}\n"
    )
    hooks = os.pathsep.join(filter(None, [str(ROOT / "tests" / "hooks"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": hooks}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "tests")]
    subprocess.run(
        [*pytest, *(arguments or ["tests/rehearsal", "-m", "not soak"])], cwd=ROOT, env=environment, check=False
    )


def report(folder: Path) -> None:
    coverage = Coverage(data_file=str(folder / "data"), source=[str(ROOT / "engine")])
    coverage.combine([str(folder)])
    total = missed = 0
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "engine").rglob("*.py"))}
    for path, lines in all_gpu_lines(trees).items():
        text = path.read_text()
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        relevant = lines & set(statements)
        total += len(relevant)
        for line in sorted(relevant & set(missing)):
            missed += 1
            print(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[line - 1].strip()}")
    print(f"{total - missed} of {total} lines under a CUDA or NCCL branch ran ({(total - missed) / total:.1%})")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        run_tests(Path(name), sys.argv[1:])
        report(Path(name))
