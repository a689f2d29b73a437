"""Mutation testing: change the code of a module in small ways, and list the changes that its tests do not notice.

Run `python tests/mutate.py engine.notify`. A mutant is one change: one of mutmut's (an operator, number, string,
argument, assignment or keyword), a negated condition, a deleted statement, or an `except` that catches nothing.
Annotations, imports, decorators and texts are not changed. A hash of the seed and of the line
chooses the mutants, so that an edit of other lines keeps the choice.

Each mutant runs in a fork of a process that has imported torch and the other packages, on a copy of the repository.
Tests that reach the changed line run first, and the first failure kills the mutant. So does the time limit.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import coverage
import libcst as cst
import psutil
import pytest
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
# Other programs on the machine slow the tests down.
LIMIT_FACTOR = 4
MIN_LIMIT_S = 30.0


@dataclass(frozen=True)
class Mutant:
    """One change to a file: its path in the repository, the lines that it spans, the code and the changed lines."""

    path: str
    first_line: int
    last_line: int
    code: str
    diff: str


def negate_condition(node: cst.If | cst.CompIf) -> Iterable[cst.CSTNode]:
    condition = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), condition))


def delete_statement(_: cst.Expr | cst.Raise | cst.Del) -> Iterable[cst.CSTNode]:
    yield cst.Pass()


def catch_nothing(node: cst.ExceptHandler) -> Iterable[cst.CSTNode]:
    if node.type is not None:
        yield node.with_changes(type=cst.Tuple([]))


OPERATORS = (
    *mutation_operators,
    *((kind, negate_condition) for kind in (cst.If, cst.CompIf)),
    *((kind, delete_statement) for kind in (cst.Expr, cst.Raise, cst.Del)),
    (cst.ExceptHandler, catch_nothing),
)


def is_text(node: cst.CSTNode) -> bool:
    """Return whether an expression is a docstring or words for a person, not a key, a name or a code."""
    if isinstance(node, cst.SimpleString):
        return " " in node.raw_value or len(node.quote) == 3
    return isinstance(node, cst.FormattedString | cst.ConcatenatedString)


class PlaceFinder(cst.CSTVisitor):
    """Collect the nodes of a module that can be changed, and what each can become."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[cst.CSTNode, list[cst.CSTNode]]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.Decorator):
            return False
        if isinstance(node, cst.Expr) and is_text(node.value):
            return False
        if isinstance(node, cst.SimpleString) and is_text(node):
            return False
        changed = [new for kind, change in OPERATORS if isinstance(node, kind) for new in change(node)]
        if isinstance(node, cst.Call):
            texts = [argument for argument in node.args if is_text(argument.value)]
            changed = [new for new in changed if isinstance(new, cst.Call) and {*texts} <= {*new.args}]
        if changed:
            self.places.append((node, changed))
        return True


def find_mutants(paths: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of files of the repository, each of another place."""
    ranked = []
    for path in paths:
        source = (ROOT / path).read_text()
        lines = source.splitlines()
        wrapper = MetadataWrapper(cst.parse_module(source))
        positions = wrapper.resolve(PositionProvider)
        finder = PlaceFinder()
        wrapper.module.visit(finder)
        for node, changed in finder.places:
            span = positions[node]
            line = lines[span.start.line - 1]
            column = span.start.column - len(line) + len(line.lstrip())
            place = f"{seed} {line.strip()} {column} {type(node).__name__}"
            rank = int.from_bytes(blake2b(place.encode(), digest_size=8).digest())
            new = changed[rank % len(changed)]
            ranked.append((rank, path, span, partial(wrapper.module.deep_replace, node, new), source))
    chosen = sorted(ranked, key=lambda place: place[:2])[:count]
    return [make_mutant(path, span, replace().code, source) for _, path, span, replace, source in chosen]


def make_mutant(path: str, span: CodeRange, code: str, source: str) -> Mutant:
    lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm="")
    diff = "\n".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[3:])
    return Mutant(path, span.start.line, span.end.line, code, diff)


class Baseline:
    """Plugin that records how long each test takes, which lines it reaches, and which packages the tests import."""

    def __init__(self, tree: Path, paths: Sequence[str], report: Path) -> None:
        self.tree, self.report = tree, report
        self.paths = {path: str(tree / path) for path in paths}
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[*self.paths.values()])
        self.seconds: dict[str, float] = {}

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.coverage.switch_context(item.nodeid)
        start_s = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - start_s
        return result

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests = {path: data.contexts_by_lineno(file) for path, file in self.paths.items()}
        files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
        packages = [name for name, file in files.items() if file and not Path(file).is_relative_to(self.tree)]
        self.report.write_text(json.dumps({"tests": tests, "seconds": self.seconds, "packages": packages}))


class ReachingFirst:
    """Plugin that runs the tests first that reach the changed line, the fastest of them first."""

    def __init__(self, seconds: Mapping[str, float], reaching: Iterable[str]) -> None:
        self.seconds, self.reaching = seconds, {*reaching}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (item.nodeid not in self.reaching, self.seconds.get(item.nodeid, 0.0)))


def run_tests(folder: Path, tests: Sequence[str], plugin: object, limit_s: float | None = None) -> int | None:
    """Run tests of the copy in `folder` in a fork, and return pytest's exit code, or None after `limit_s` seconds."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.chdir(folder / "tree")
            # Instead of the folder of this script. Commands that a test starts import the copy, too.
            sys.path[0] = os.environ["PYTHONPATH"] = str(folder / "tree")
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
            code = int(pytest.main([*options, *tests], [plugin]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    try:
        return psutil.Process(pid).wait(limit_s)
    except psutil.TimeoutExpired:
        return None
    finally:
        # Orphans come to this process, a subreaper.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()


class MutantRunner:
    """Tests mutants, one after the other, on the copy of the repository of its process."""

    folder: Path
    tested: int

    @classmethod
    def start(cls, parent: Path) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        cls.folder = Path(tempfile.mkdtemp(dir=parent))
        cls.tested = 0
        copy_repository(cls.folder / "tree")

    @classmethod
    def test(cls, mutant: Mutant, tests: Sequence[str], plugin: ReachingFirst, limit_s: float) -> str | None:
        """Return what killed a mutant, or None if it survived."""
        path = cls.folder / "tree" / mutant.path
        original = path.read_text()
        path.write_text(mutant.code)
        # Python recompiles a file whose size or second of modification differs.
        cls.tested += 1
        os.utime(path, (cls.tested, cls.tested))
        code = run_tests(cls.folder, tests, plugin, limit_s)
        path.write_text(original)
        if code is None:
            return f"the time limit of {limit_s:.0f} s"
        failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", (cls.folder / "output").read_text(), re.M)
        return None if code == 0 else " ".join(failed) or f"exit code {code}"


def copy_repository(tree: Path) -> None:
    """Copy the files of the repository that git does not ignore, changed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)


def import_packages(names: Iterable[str]) -> None:
    """Import packages, so that each mutant need not."""
    for name in names:
        # Some must be imported by another one, and are then.
        with suppress(Exception):
            importlib.import_module(name)


def find_files(module: str) -> list[str]:
    """Return the files of a module or package. Raises SystemExit if there is none."""
    path = ROOT / module.replace(".", "/")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if not files or not files[0].exists():
        sys.exit(f"{module} is no module or package of {ROOT}.")
    return [str(file.relative_to(ROOT)) for file in files]


def find_mirror(module: str) -> list[str]:
    """Return the tests that mirror a module or package. Raises SystemExit if there are none."""
    path = ROOT / "tests" / module.replace(".", "/")
    tests = [path] if path.is_dir() else sorted(path.parent.glob(f"test_{path.name}*.py"))
    if not tests:
        sys.exit(f"{module} has no tests at {path}. Name its tests with --tests.")
    return [str(test.relative_to(ROOT)) for test in tests]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test mutants of modules.")
    parser.add_argument("modules", metavar="MODULE", nargs="+", help="module or package, such as engine.notify")
    parser.add_argument("--seed", type=int, default=21, help="chooses the mutants (default: %(default)s)")
    parser.add_argument("--count", type=int, default=60, help="number of mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: one a core)")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="tests (default: those that mirror the modules)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tests = arguments.tests or [test for module in arguments.modules for test in find_mirror(module)]
    paths = [path for module in arguments.modules for path in find_files(module)]
    mutants = find_mutants(paths, arguments.seed, arguments.count)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary)
        MutantRunner.start(folder)
        report = folder / "report"
        start_s = time.monotonic()
        code = run_tests(MutantRunner.folder, tests, Baseline(MutantRunner.folder / "tree", paths, report))
        limit_s = max(MIN_LIMIT_S, LIMIT_FACTOR * (time.monotonic() - start_s))
        if code != 0:
            sys.exit((MutantRunner.folder / "output").read_text() + "The tests fail without a mutant.")
        baseline = json.loads(report.read_text())
        import_packages(baseline["packages"])
        survivors = []
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(arguments.jobs, fork, MutantRunner.start, (folder,)) as pool:
            futures = {}
            for mutant in mutants:
                lines = map(str, range(mutant.first_line, mutant.last_line + 1))
                reaching = [test for line in lines for test in baseline["tests"][mutant.path].get(line, [])]
                plugin = ReachingFirst(baseline["seconds"], reaching)
                futures[pool.submit(MutantRunner.test, mutant, tests, plugin, limit_s)] = mutant
            for tested, future in enumerate(as_completed(futures), 1):
                mutant = futures[future]
                killer = future.result()
                result = f"killed by {killer}" if killer else "survived"
                print(f"{tested:3}/{len(mutants)}  {mutant.path}:{mutant.first_line}  {result}", flush=True)
                if killer is None:
                    survivors.append(mutant)
    print()
    for mutant in sorted(survivors, key=lambda mutant: (mutant.path, mutant.first_line)):
        print(f"{mutant.path}:{mutant.first_line}\n{mutant.diff}\n")
    killed = len(mutants) - len(survivors)
    print(f"Seed {arguments.seed}: {killed} of {len(mutants)} mutants were killed, {killed / len(mutants):.0%}.")


if __name__ == "__main__":
    main()
