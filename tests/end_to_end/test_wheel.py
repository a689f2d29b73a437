"""The wheel works on its own: installed in another environment and started from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from support.gputrain_command import ROOT, Gputrain


@pytest.fixture(scope="session")
def wheel_bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bin folder of a virtual environment with the wheel; its dependencies come from the current environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = ["pip", "--python", str(python), "install", "-q", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    (own_packages,) = environment.glob("lib/python*/site-packages")
    (own_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


def test_wheel_includes_presets_and_digits(wheel_bin_folder: Path, gputrain: Gputrain) -> None:
    program = "import engine; print(engine.__file__)"
    # Without PYTHONPATH, so that only the wheel is importable.
    environment = {name: value for name, value in gputrain.environment.items() if name != "PYTHONPATH"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "env": environment}
    imported = subprocess.run([wheel_bin_folder / "python", "-c", program], cwd=gputrain.folder, **options)
    assert str(wheel_bin_folder.parent) in imported.stdout
    page = Path(imported.stdout.strip()).with_name("report") / "page.html"
    assert page.is_file() and page.with_suffix(".css").is_file()
    arguments = ["run", "--headless", "digits", "--epochs", "2", "--ranks", "1", "--name", "a"]
    process = gputrain.start(str(wheel_bin_folder / "gputrain"), *arguments, env=environment)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    assert json.loads((gputrain.runs / "a" / "summary.json").read_text())["val_accuracy"] > 0.9


def test_wheel_includes_tui(wheel_bin_folder: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom pathlib import Path\nfrom tui.app import GputrainApp\n"
        "async def main():\n"
        "    async with GputrainApp(Path('nowhere')).run_test() as pilot:\n"
        "        await pilot.press('n')\n"
        "        await pilot.pause()\n"
        "        print(type(pilot.app.screen).__name__)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [wheel_bin_folder / "python", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "FormScreen\n"


def test_wheel_includes_demo(wheel_bin_folder: Path, tmp_path: Path) -> None:
    program = (
        "from tui.demo.server import DemoServer\n"
        "with DemoServer() as server:\n"
        "    print(*sorted(path.name for path in server.runs_dir.iterdir()))\n"
        "    print(len(server.gpu_monitor(1.0).read(1.0).gpus), 'GPUs')"
    )
    done = subprocess.run(
        [wheel_bin_folder / "python", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "digits-3 fashion-17\n8 GPUs\n"
