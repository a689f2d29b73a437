"""The wheels that a machine with only Python and torch lacks, and the environment made of them there.

Imports nothing but the standard library: `__main__.py` calls it before anything is installed.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_VERSION, TORCHVISION = "3.12", "torchvision==0.26.0"  # that of torch 2.11
# pip matches each platform tag exactly.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
# Every machine has torch, and nearly every one numpy beside it, which would fill a third of the folder.
NOT_CARRIED = ("torch", "numpy")
# Built against one torch or one numpy: those of the machine come first.
MACHINE_FIRST = ("torchvision", "pillow")
# hatchling and editables install the source tree; pip is for machines without it.
TOOLS = ("pip", "hatchling", "editables", "pytest", "pytest-timeout", "pytest-xdist")
MAX_PACKED_MIB = 45


def package_name(text: str) -> str:
    """Return the normalized name of a requirement ("PyYAML>=6") or of a wheel file ("PyYAML-6-py3-none-any.whl")."""
    name = re.match(r"[\w.]+" if text.endswith(".whl") else r"[\w.-]+", text)
    assert name is not None, text
    return name[0].replace("_", "-").lower()


def requirements_of_training() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["train"]]


def requirements_to_pack() -> list[str]:
    """What pip resolves: what training with gputrain needs and the tools, without what the machine has."""
    dependencies = requirements_of_training()
    separate = (*NOT_CARRIED, package_name(TORCHVISION))
    return [*(entry for entry in dependencies if package_name(entry) not in separate), *TOOLS]


def is_carried(wheel: str, more: Collection[str], without: Collection[str]) -> bool:
    """Whether a wheel that pip downloaded goes into the folder."""
    name = package_name(wheel)
    return name in more or name not in (*NOT_CARRIED, *without)


def pack(folder: Path, more: list[str], without: list[str]) -> str:
    """Fill the folder with wheels; return its size as a sentence. `more` are requirements taken without their own."""
    folder.mkdir(parents=True, exist_ok=True)
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    download = [sys.executable, "-m", "pip", "download", "--quiet"]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*download, *target, "--dest", wheels, *requirements_to_pack()], check=True)
        alone = [entry for entry in (TORCHVISION, *more) if package_name(entry) not in without]
        if alone:
            subprocess.run([*download, *target, "--no-deps", "--dest", wheels, *alone], check=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in sorted(Path(wheels).iterdir()):
            if is_carried(wheel.name, list(map(package_name, more)), without):
                shutil.move(wheel, folder / wheel.name)
    wheels_mib, tree_mib = mib(folder.glob("*.whl")), mib(tree_files())
    sizes = f"{wheels_mib:.1f} MiB of wheels and {tree_mib:.1f} MiB of source tree"
    if wheels_mib + tree_mib > MAX_PACKED_MIB:
        sys.exit(f"error: {sizes} are more than {MAX_PACKED_MIB} MiB; leave packages of the machine out with --without")
    return sizes


def tree_files() -> list[Path]:
    """The files of the source tree that travel: those that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def mib(paths: Iterable[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / 2**20


def wheels_to_install(folder: Path) -> list[Path]:
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not has_already(package_name(wheel.name))]


def has_already(package: str) -> bool:
    """Whether the machine has a package whose release there must be kept."""
    if package not in MACHINE_FIRST:
        return False
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def create(folder: Path, wheels: Path) -> Path:
    """Create the environment unless it has these wheels; return its Python. It sees the packages of this one."""
    python, complete = folder / "bin" / "python", folder / "complete"
    content = "\n".join([str(ROOT), sys.executable, *sorted(wheel.name for wheel in wheels.glob("*.whl"))])
    if complete.exists() and complete.read_text() == content:
        return python
    if sys.version_info[:2] != tuple(map(int, PYTHON_VERSION.split("."))):
        sys.exit(f"error: the wheels are for Python {PYTHON_VERSION}, and {sys.executable} is {sys.version.split()[0]}")
    for package in ("torch", "numpy"):
        try:
            version(package)
        except PackageNotFoundError:
            sys.exit(f"error: {sys.executable} has no {package}; set PYTHON to a Python that has torch and numpy")
    pip = next(wheels.glob("pip-*.whl"), None)
    if pip is None:
        sys.exit(f"error: {wheels} has no wheel of pip; fill the folder with tests/gpu_hour.sh --pack")
    shutil.rmtree(folder, ignore_errors=True)
    # --system-site-packages would skip the packages of a Python that is itself a virtual environment.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "machine.pth").write_text("".join(f"{path}\n" for path in machine_packages()))
    install = [str(python), f"{pip}/pip", "install", "--quiet", "--no-index", "--no-cache-dir", "--no-deps"]
    install += ["--disable-pip-version-check", "--find-links", str(wheels.resolve())]
    subprocess.run([*install, *map(str, wheels_to_install(wheels))], check=True)
    subprocess.run([*install, "--no-build-isolation", "--editable", str(ROOT)], check=True)
    complete.write_text(content)
    return python


def machine_packages() -> list[str]:
    """Folders of installed packages that this Python sees."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    listed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys([*listed, *folders]) if Path(path).is_dir()]
