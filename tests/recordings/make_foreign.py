"""Record logs of trainers in `tests/recordings/foreign`: `python tests/recordings/make_foreign.py ENVIRONMENTS`.

ENVIRONMENTS is what `tests/trainers/build.py --into` made. The recordings that are not made here are older; their
README says what wrote them.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.trainers import SCRIPTS, TRAINERS, python_of

TARGET = Path(__file__).with_name("foreign")
# Of each trainer: the folder below its logs, the one below TARGET, and the files.
RECORDED = {
    "accelerate": [("tiny", "accelerate", "**/*")],
    "keras": [("events", "keras-events", "**/*")],
    "mlflow": [("", "mlflow", "*.db")],
    "ultralytics": [("tiny", "ultralytics", "*.csv"), ("tiny", "ultralytics", "*.yaml")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(RECORDED)}; default: all")
    arguments = parser.parse_args()
    for name in arguments.names or RECORDED:
        parts = RECORDED[name]
        with tempfile.TemporaryDirectory() as work:
            logs = Path(work, "logs")
            python = python_of(arguments.environments.absolute() / name)
            command = [python, TRAINERS[name].script, logs, Path(work, "values.json")]
            # Some trainers record the path of the script, and the repository that it is in.
            scripts = shutil.copytree(SCRIPTS, Path(work, "scripts"), ignore=shutil.ignore_patterns("__pycache__"))
            subprocess.run(command, check=True, cwd=scripts)
            for _, target, _ in parts:
                shutil.rmtree(TARGET / target, ignore_errors=True)
            for source, target, pattern in parts:
                for path in (logs / source).glob(pattern):
                    if path.is_file():
                        copy = TARGET / target / path.relative_to(logs / source)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        if path.suffix == ".db":
                            # A database has a page for each of its many empty tables.
                            copy.with_name(f"{copy.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
                        else:
                            shutil.copyfile(path, copy)


if __name__ == "__main__":
    main()
