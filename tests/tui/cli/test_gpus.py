"""`gputrain gpus`: table, JSON, --watch and recordings."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time

import pytest
from rich.cells import cell_len

from engine.gpus.snapshot import UNITS
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, eight_gpu_lines, gpu_line
from support.gputrain_command import GPUTRAIN, ROOT, Gputrain
from support.messages import says

SYNTHETIC_RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"
REPLAY = {"GPUTRAIN_NVML": f"replay:{SYNTHETIC_RECORDING}"}


def test_gpus_table_fits_80_columns_without_color(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(eight_gpu_lines(power=699, throttle=4), f"process 3 {os.getpid()} 60000 compute")
    done = gputrain("gpus", "--processes", **gpu_host.environment, COLUMNS="80")
    assert "\x1b" not in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    titles, *rows = done.stdout.splitlines()[1:10]
    # Who uses a GPU and what slows it down are worth more than the rarer readings.
    assert {"util", "memory", "temp", "used", "warning"} <= set(titles.split()) and "tensor" not in titles
    assert [line.split()[0] for line in rows] == [str(index) for index in range(8)]
    assert "  93%  " in rows[3] and "slowed: pow" in rows[3]


def test_gpus_json_has_unit_time_and_reason_for_every_reading(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, util=50, corrected=3), f"process 0 {UNKNOWN_PID} -1 compute")
    before = time.time()
    done = gputrain("gpus", "--json", **gpu_host.environment)
    snapshot = json.loads(done.stdout)
    assert snapshot["format"] == 1
    assert snapshot["source"] == {"kind": "driver", "made_up": False}
    assert (snapshot["driver"]["value"], snapshot["cuda"]["value"]) == ("580.95.05", "13.0")
    [gpu] = snapshot["gpus"]
    for name, unit in UNITS.items():
        assert gpu[name]["unit"] == unit
        assert before - 1 < gpu[name]["time"] < time.time() + 1
        assert (gpu[name]["value"] is None) == ("reason" in gpu[name])
    assert {name for name in UNITS if gpu[name]["value"] is None} == {"fan"}
    assert gpu["memory_used"]["value"] == 500 << 20
    assert gpu["memory_reserved"]["value"] == 600 << 20
    assert gpu["ecc_corrected"]["value"] == 3
    assert gpu["processes"]["value"][0]["gpu_memory"]["reason"] == "not reported by the driver"


def test_gpus_watch_redraws_in_place_until_ctrl_c(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(eight_gpu_lines())
    master, slave = pty.openpty()
    environment = gputrain.environment | gpu_host.environment | {"TERM": "xterm-256color"}
    process = gputrain.start("gpus", "--watch", stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    output = ""
    while output.count("used by") < 2:
        output += os.read(master, 65536).decode()
    process.send_signal(signal.SIGINT)
    with pytest.raises(OSError, match="Input/output"):
        while True:
            output += os.read(master, 65536).decode()
    assert process.wait(10) == 0
    os.close(master)
    assert "\x1b[1A" in output
    assert "\n  7  " in output.replace("\r", "")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("value", "code", "location", "reason"),
    [
        ("replay:none", "not-readable", "none", "No such file"),
        ("replay:text", "wrong-format", "text", " 1 "),
    ],
)
def test_gpus_replay_rejects_invalid_recording(
    gputrain: Gputrain, value: str, code: str, location: str, reason: str
) -> None:
    (gputrain.folder / "text").write_text("hello\n")
    done = gputrain("gpus", GPUTRAIN_NVML=value)
    assert done.returncode == 2
    assert says(done.stderr, code, f"error: {location}: ", reason)
    assert "Traceback" not in done.stderr


def test_gpus_watch_ends_when_pipe_closes(gputrain: Gputrain) -> None:
    shell = f"{GPUTRAIN} gpus --watch --json --interval 0.25 | head -n 1"
    done = subprocess.run(
        ["sh", "-c", shell], env=gputrain.environment | REPLAY, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["format"] == 1
    assert done.stderr == ""
