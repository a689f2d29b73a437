"""The GPU hour without a GPU: what it carries, its stages, what they write, and the comparison of readings."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from support.gputrain_command import ROOT, wait_for

FOLDER = ROOT / "tests" / "gpu_hour"
MAX_FIRST_STAGES_S, MAX_STAGE_S = 12 * 60, 8 * 60
# Two GPUs, with the columns of `nvidia-smi dmon -s pucmt --gpm-metrics=2,5,10`, without those of the codecs.
DMON = """\
# gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk     fb   bar1   ccpm  rxpci  txpci  gpm:2  gpm:5  gpm:10
# Idx      W      C      C      %      %    MHz    MHz     MB     MB     MB   MB/s   MB/s      %      %       %
    0    600     60     70     97     40   2619   1980   8000      2      0   1000    900     81     60      33
    1     70     30     40      0      0   2619    345      0      2      0      0      0      -      -       -
    0    602     62      -     99     42   2619   1980   8000      2      0   1200   1100     83     62      35
"""


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def load_main() -> ModuleType:
    """Load `__main__.py` under another name."""
    spec = importlib.util.spec_from_file_location("gpu_hour_main", FOLDER / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("hour")
def test_pack_carries_every_dependency_that_no_machine_has() -> None:
    import environment

    packed = {
        environment.package_name(entry) for entry in (*environment.requirements_to_pack(), environment.TORCHVISION)
    }
    assert {*map(environment.package_name, environment.requirements_of_training())} - packed == {
        *environment.NOT_CARRIED
    }
    wheel = "PyYAML-6.0.3-cp312-cp312-manylinux2014_x86_64.whl"
    assert environment.package_name(wheel) == environment.package_name("PyYAML>=6.0.1") == "pyyaml"
    assert environment.is_carried(wheel, [], [])
    assert not environment.is_carried(wheel, [], ["pyyaml"])
    assert environment.is_carried("numpy-2.5.5-cp312-cp312-any.whl", ["numpy"], [])
    assert not environment.is_carried("numpy-2.5.5-cp312-cp312-any.whl", [], [])


@pytest.mark.usefixtures("hour")
def test_environment_keeps_torchvision_of_machine(tmp_path: Path) -> None:
    import environment

    for name in ("torchvision-0.26.0-cp312-cp312-any.whl", "rich-15.0.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert [wheel.name for wheel in environment.wheels_to_install(tmp_path)] == ["rich-15.0.0-py3-none-any.whl"]


@pytest.mark.usefixtures("hour")
def test_stages_fit_into_their_time() -> None:
    main = load_main()
    limits = {name: stage.limit_s + 2 * main.GRACE_S for name, stage in main.STAGES.items()}
    assert list(limits) == ["a", "b", "c", "d", "e"]
    assert max(limits.values()) <= MAX_STAGE_S
    assert limits["a"] + limits["b"] <= MAX_FIRST_STAGES_S
    for stage in main.STAGES.values():
        titles = [step.title for step in importlib.import_module(stage.module).STEPS]
        assert titles
        assert len({*titles}) == len(titles)


@pytest.mark.nightly
def test_stage_without_gpu_says_so_and_succeeds(tmp_path: Path) -> None:
    command = [
        str(ROOT / "tests" / "gpu_hour.sh"),
        "a",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "a-smoke.json").read_text())
    assert report["complete"]
    assert {row["state"] for row in report["rows"]} == {"skipped"}
    assert "needs a GPU, none found" in (tmp_path / "out" / "a-smoke.md").read_text()


@pytest.mark.usefixtures("hour")
def test_step_with_a_failed_row_is_repeated_as_a_whole(tmp_path: Path) -> None:
    from stage import Machine, Report, Row, Step

    machine = Machine(["GPU"], True, "2.11", "13.0", None, None, "3.12", 2)
    steps = [Step(title, lambda _: [], 60) for title in ("readings", "resume")]
    report = Report.open("e", "faults", machine, tmp_path)
    report.add(steps[0], [Row("power", "equal"), Row("memory", "differs", {}, "failed")], 1.0)
    report.add(steps[1], [Row("resume", "done")], 1.0)
    continued = Report.open("e", "faults", machine, tmp_path)
    assert [continued.has(step) for step in steps] == [False, True]


@pytest.mark.usefixtures("hour")
def test_interrupted_stage_continues_after_its_finished_steps(tmp_path: Path) -> None:
    from stage import Context, Machine, Report, Row, Step, StepFailedError, run_stage

    machine = Machine(["GPU"], True, "2.11", "13.0", None, None, "3.12", 2)
    taken = []

    def take(context: Context) -> list[Row]:
        taken.append(context.folder.name)
        return [Row("first", "done")]

    def fail_once(context: Context) -> list[Row]:
        taken.append(context.folder.name)
        if len(taken) == 2:
            raise KeyboardInterrupt
        raise StepFailedError("wrong | value")

    steps = [Step("first", take, 60), Step("second", fail_once, 60), Step("pair", take, 60, gpus=2)]
    with pytest.raises(KeyboardInterrupt):
        run_stage(Report.open("a", "smoke", machine, tmp_path), steps, tmp_path / "work", None, time.monotonic() + 100)
    assert not run_stage(
        Report.open("a", "smoke", machine, tmp_path), steps, tmp_path / "work", None, time.monotonic() + 100
    )
    assert taken == ["0", "1", "1"]
    text = (tmp_path / "a-smoke.md").read_text()
    assert "| second | **failed**: wrong / value |" in text
    assert "**skipped**: needs 2 GPUs, 1 found" in text


@pytest.mark.usefixtures("hour")
def test_command_that_outlasts_its_step_ends_with_its_children(tmp_path: Path) -> None:
    from stage import Context, Machine, StepFailedError

    context = Context(Machine([], False, "", None, None, None, "", 1), tmp_path, None, time.monotonic() + 2, inf)
    with pytest.raises(StepFailedError, match="no end within the time"):
        context.run(["sh", "-c", "sleep 100 & echo $! > child; wait"])
    child = int((tmp_path / "child").read_text())

    def has_ended() -> bool:
        living = [process for process in psutil.process_iter(["status"]) if process.info["status"] != "zombie"]
        return child not in {process.pid for process in living}

    wait_for(has_ended, "the end of the child", 10)


@pytest.mark.usefixtures("hour")
def test_readings_compare_with_columns_of_dmon() -> None:
    import readings

    dmon = readings.dmon_medians(DMON, with_gpm=True)
    assert (dmon["pwr"], dmon["mtemp"], dmon["tensor_active"]) == (601, 70, 61)
    ours = {"power": 640.0, "util": 80.0, "memory_used": 8000.0 * 2**20, "pcie_received": 1.1e6, "tensor_active": 60.0}
    agrees = {name: agree for name, _, agree in readings.compare(ours, dmon)}
    assert agrees["power"]
    assert agrees["memory_used"]
    assert agrees["pcie_received"]
    assert agrees["tensor_active"]
    assert not agrees["util"]
    # Only nvidia-smi knows it.
    assert not agrees["temperature"]
