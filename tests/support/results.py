"""Print the results that run_all.sh has collected: a table of its files, then the tests that failed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

COLUMNS = "{:<10} {:<60} {:>6} {:>6} {:>7} {:>8} {:>8}"
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def main(folder: Path) -> int:
    failed = []
    print(COLUMNS.format("level", "file", "passed", "failed", "skipped", "CPU s", "s"))
    for level, name in _files(folder):
        counts: Counter[str] = Counter()
        cpu_s = wall_s = 0.0
        for case in _cases(folder / f"{level}-{name.replace('/', '.')}.xml"):
            outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
            counts[outcome] += 1
            wall_s += float(case.get("time", 0))
            cpu_s += sum(float(item.get("value", 0)) for item in case.iter("property") if item.get("name") == "cpu_s")
            if outcome == "failed":
                failed.append(f"{level} {name}::{case.get('name')}")
        if not counts:
            failed.append(f"{level} {name}: no result")
        row = [counts["passed"], counts["failed"], counts["skipped"], f"{cpu_s:.0f}", f"{wall_s:.0f}"]
        print(COLUMNS.format(level, name.removeprefix("tests/"), *row))
    print("\n".join(["", f"{len(failed)} failed", *failed]))
    return 1 if failed else 0


def _files(folder: Path) -> list[tuple[str, str]]:
    return [(path.stem, name) for path in sorted(folder.glob("*.files")) for name in path.read_text().split()]


def _cases(result: Path) -> list[ET.Element]:
    # Written by pytest on this machine, in a folder of this user.
    return list(ET.parse(result).iter("testcase")) if result.exists() else []  # noqa: S314


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
