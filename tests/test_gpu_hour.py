"""The GPU hour without a GPU: the comparison of readings, a failure, and the section of the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench import gpu_hour
from support.gputrain_command import wait_for

# Two GPUs, with the columns of `nvidia-smi dmon -s pucmt --gpm-metrics=2,5,10`, without those of the codecs.
DMON = """\
# gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk     fb   bar1   ccpm  rxpci  txpci  gpm:2  gpm:5  gpm:10
# Idx      W      C      C      %      %    MHz    MHz     MB     MB     MB   MB/s   MB/s      %      %       %
    0    600     60     70     97     40   2619   1980   8000      2      0   1000    900     81     60      33
    1     70     30     40      0      0   2619    345      0      2      0      0      0      -      -       -
    0    602     62      -     99     42   2619   1980   8000      2      0   1200   1100     83     62      35
"""


@pytest.fixture
def hour(tmp_path: Path) -> gpu_hour.Hour:
    return gpu_hour.Hour(tmp_path, 1, None, is_rehearsal=True)


def test_readings_compare_with_columns_of_dmon() -> None:
    columns = gpu_hour.dmon_medians(DMON)
    assert (columns["pwr"], columns["mtemp"], columns["tensor_active"]) == (601, 70, 61)
    ours = {"power": 640.0, "util": 80.0, "memory_used": 8000.0 * 2**20, "pcie_received": 1.1e6, "tensor_active": 60.0}
    samples = json.dumps({"gpus": [{name: {"value": ours.get(name)} for name in gpu_hour.TWINS}]})
    assert gpu_hour.reading_medians(f"{samples}\n{samples}\n") == ours
    agrees = {name for name, _, agree in gpu_hour.compare(ours, columns) if agree}
    # Only nvidia-smi knows the temperature.
    assert agrees == {"power", "memory_used", "pcie_received", "tensor_active"}


def test_program_that_outlasts_its_time_ends_with_its_children(hour: gpu_hour.Hour) -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '100']).wait()"
    with pytest.raises(gpu_hour.MeasurementError):
        hour.python("-c", program, limit_s=2)
    wait_for(lambda: not sleepers(hour.folder), "the end of the child")


def sleepers(folder: Path) -> list[psutil.Process]:
    processes = psutil.process_iter(["cwd", "status"])
    return [each for each in processes if each.info["cwd"] == str(folder) and each.info["status"] != "zombie"]


def test_part_that_fails_has_a_row_and_the_next_is_measured(
    hour: gpu_hour.Hour, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(hour: gpu_hour.Hour) -> Iterator[gpu_hour.Row]:
        yield "first", "1 ms"
        hour.python("-c", "raise SystemExit('wrong | value')", limit_s=60)

    monkeypatch.setattr(gpu_hour, "PARTS", {"a": fail, "b": lambda _: iter([("second", "2 ms")])})
    results = tmp_path / "RESULTS.md"
    results.write_text(f"kept\n\n{gpu_hour.HEADING}\n\nold\n")
    gpu_hour.write_results(results, "machine", gpu_hour.measure(hour, ["a", "b"]))
    lines = results.read_text().splitlines()
    assert lines[0] == "kept" and "old" not in lines
    assert lines[-3:] == ["| first | 1 ms |", "| a | **failed**: exit code 1: wrong / value |", "| second | 2 ms |"]
