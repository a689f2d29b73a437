"""The wheel works on its own: installed in another environment and started from another folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.gputrain_command import ROOT, Gputrain

PROGRAM = """
import asyncio
from pathlib import Path
import engine
from tui.screens.app import GputrainApp
from tui.screens.demo.server import DemoServer

async def main():
    async with GputrainApp(Path("nowhere")).run_test() as pilot:
        await pilot.press("n")
        await pilot.pause()
        print(type(pilot.app.screen).__name__)

print(Path(engine.__file__).parents[1])
print(all(Path(engine.__file__).with_name("report").joinpath(f"page.{kind}").is_file() for kind in ("html", "css")))
asyncio.run(main())
with DemoServer() as server:
    print(*sorted(path.name for path in server.runs_dir.iterdir()), len(server.gpu_monitor(1.0).read(1.0).gpus))
"""


# `tests/core` runs an installation of each change, without torch.
@pytest.mark.nightly
def test_wheel_has_all_that_pages_screens_demo_presets_and_digits_need(gputrain: Gputrain, tmp_path: Path) -> None:
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    programs, (wheel,) = tmp_path / "venv" / "bin", tmp_path.glob("*.whl")
    install = ["pip", "--python", str(programs / "python"), "install", "-q", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # The dependencies are those of this environment.
    (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    # Without PYTHONPATH, so that only the wheel is importable.
    del gputrain.environment["PYTHONPATH"]
    process = gputrain.start(str(programs / "python"), "-c", PROGRAM)
    assert process.communicate(timeout=120)[0].splitlines() == [
        *(str(packages), "True", "FormScreen", "digits-3 fashion-17 8"),
    ]
    arguments = ("run", "--headless", "digits", "--epochs", "1", "--ranks", "1", "--model", "linear")
    process = gputrain.start(str(programs / "gputrain"), *arguments)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
