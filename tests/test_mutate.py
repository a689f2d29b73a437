"""The mutation testing tool: which mutants it makes, and that tests kill them on a copy of the repository."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''"""Add."""

from math import floor


def grow(value: int | None, step: int = 3) -> float:
    """Return the next value."""
    if value is None:
        raise ValueError("there is no value")
    return floor(value) + step


def count(limit: int) -> int:
    number = 0
    while number < limit:
        number += 1
    return number
'''
TESTS = """
from engine.steps import count, grow


def test_grow():
    assert grow(1.5, 2) == 3


def test_count():
    assert count(4) == 4
"""


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    """The tool. Its libraries take seconds to import, which every xdist worker would do while it collects."""
    return importlib.import_module("mutate")


@pytest.fixture
def repository(mutate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "tests" / "engine").mkdir(parents=True)
    (tmp_path / "engine" / "steps.py").write_text(SOURCE)
    (tmp_path / "tests" / "engine" / "test_steps.py").write_text(TESTS)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    return tmp_path


def find_diffs(mutate: ModuleType, count: int, seed: int = 1) -> list[str]:
    return [mutant.diff for mutant in mutate.find_mutants(mutate.find_files("engine.steps"), seed, count)]


def test_mutants_leave_annotations_imports_and_texts(mutate: ModuleType, repository: Path) -> None:
    diffs = find_diffs(mutate, 99)
    assert len(diffs) > 10
    changed = [line[2:] for diff in diffs for line in diff.splitlines() if line.startswith("+")]
    assert "def grow(value: int | None, step: int = 4) -> float:" in changed
    # A statement may be deleted with its text, and no other line with a text or an annotation is there.
    assert "pass" in changed
    assert [line for line in changed if "value: " in line or '"' in line or "import" in line] == [
        "def grow(value: int | None, step: int = 4) -> float:"
    ]


def test_mutants_are_chosen_by_seed_and_stay_when_other_lines_change(mutate: ModuleType, repository: Path) -> None:
    chosen = find_diffs(mutate, 5)
    assert chosen == find_diffs(mutate, 5)
    assert chosen != find_diffs(mutate, 5, seed=2)
    (repository / "engine" / "steps.py").write_text(SOURCE.replace("Return the next", "Return the\n\n    next"))
    assert find_diffs(mutate, 5) == chosen


@pytest.mark.nightly
def test_mutants_are_killed_by_failing_tests_on_a_copy(mutate: ModuleType, repository: Path) -> None:
    shutil.copy(str(mutate.__file__), repository / "tests" / "mutate.py")
    (repository / "engine" / "__init__.py").touch()
    subprocess.run(["git", "init", "-q", repository], check=True)
    command = [sys.executable, "tests/mutate.py", "engine.steps", "--count", "99", "--jobs", "1"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    progress, _, survivors = done.stdout.partition("\n\n")
    assert "killed by tests/engine/test_steps.py::test_grow" in progress
    assert "killed by tests/engine/test_steps.py::test_count" in progress
    # Each test gives a step, and none a value of None.
    assert "step: int = 4" in survivors and "+ pass" in survivors
    assert "if not (value is None)" not in survivors
    assert (repository / "engine" / "steps.py").read_text() == SOURCE
