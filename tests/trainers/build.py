"""Build the environments of the trainers: `python tests/trainers/build.py [NAME...] --into FOLDER [--base PYTHON]`.

Each trainer gets FOLDER/NAME, an environment with its packages from the package index. torch has 5 GB, so the
environments have none of their own: they use the packages of the base environment, by default the one that runs this
script. `test_trainers.py` trains in each and reads what it wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.trainers import TRAINERS, Trainer, python_of

# Packages that are never installed beside those of the base.
SHARED = ("torch", "torchvision")
_DESCRIBE_BASE = """
import json, sys
from importlib import metadata
folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps([folders, versions]))
"""


def build(trainer: Trainer, folder: Path, base: Path) -> None:
    """Make the environment of a trainer on top of the packages of a base. Raises CalledProcessError."""
    described = subprocess.run([base, "-c", _DESCRIBE_BASE, *SHARED], capture_output=True, text=True, check=True)
    packages, versions = json.loads(described.stdout)
    if "torch" not in versions:
        raise SystemExit(f"{base} has no torch. Name an environment that has it with --base.")
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "base.pth").write_text("\n".join(packages) + "\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in versions.items()))
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "--python", python_of(folder), "install", "--quiet"]
        subprocess.run([*pip, "--constraint", constraints.name, *trainer.requirements], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TRAINERS)}; default: all")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--base", type=Path, default=Path(sys.executable), metavar="PYTHON")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(TRAINERS)):
        parser.error(f"unknown trainer {unknown[0]}; choose from {', '.join(TRAINERS)}")
    failed = []
    for name in arguments.names or TRAINERS:
        try:
            build(TRAINERS[name], arguments.into.absolute() / name, arguments.base)
            print(f"{name}: built", flush=True)
        except subprocess.CalledProcessError:
            failed.append(name)
            print(f"{name}: cannot be built, see above", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
