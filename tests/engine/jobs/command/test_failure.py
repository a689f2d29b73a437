"""Why a command failed: its exit code, the rank that failed first, the OOM killer and errors of CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.jobs.command.failure import MAX_LINES, CommandFailure, find_failure

TORCHRUN = """\
[default0]:step 1
[default1]:step 1
[default1]:[rank1]: Traceback (most recent call last):
[default1]:[rank1]:   File "train.py", line 6, in <module>
[default1]:[rank1]: RuntimeError: no such class: 7
[default1]:[rank1]:[W1127 ProcessGroup.cpp:1] destroy_process_group() was not called
[default0]:[rank0]: RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-27_23:13:17
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 14074)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_23:13:17
  host      : localhost
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 14075)
  error_file: <N/A>
============================================================
"""


def failure(
    text: str, exit_code: int = 1, folder: Path = Path("/nonexistent"), *, oom_killed: bool | None = False
) -> CommandFailure:
    return find_failure(exit_code, text.splitlines(), folder, oom_killed=oom_killed)


def test_exit_code_alone_is_the_cause_without_output() -> None:
    assert failure("", 3) == CommandFailure("ended with exit code 3", "process-failed")


def test_exception_is_the_cause_rather_than_later_lines() -> None:
    found = failure("Traceback\nmodule.BadError: no file\nGoodbye")
    assert (found.cause, found.rank) == ("ended with exit code 1: module.BadError: no file", None)
    assert failure("step 1\nno more data").cause == "ended with exit code 1: no more data"


def test_summary_of_torchrun_names_the_rank_that_failed_first() -> None:
    found = failure(TORCHRUN.format(rank=1, code=1))
    assert (found.rank, found.cause) == (1, "it ended with exit code 1: RuntimeError: no such class: 7")
    assert found.lines[:2] == ("step 1", "Traceback (most recent call last):")
    assert found.lines[2] == '  File "train.py", line 6, in <module>'


def test_files_of_a_rank_have_what_torchrun_has_not_echoed(tmp_path: Path) -> None:
    for run, age in (("old", 9), ("new", 5)):
        for attempt in (0, 1):
            logs = tmp_path / run / f"attempt_{attempt}" / "1"
            logs.mkdir(parents=True)
            (logs / "stderr.log").write_text(f"ValueError: {run} {attempt}\n")
            os.utime(logs.parent, (100 - age + attempt, 100 - age + attempt))
        os.utime(tmp_path / run, (100 - age, 100 - age))
    assert failure(TORCHRUN.format(rank=1, code=1), folder=tmp_path).lines == ("ValueError: new 1",)


def test_lines_of_a_single_rank_are_those_before_the_report_of_torchrun() -> None:
    report = (
        "E1127 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 1)\n"
    )
    summary = TORCHRUN.partition("closed by peer\n")[2].format(rank=0, code=1).replace("local_rank: 1", "local_rank: 0")
    found = failure(f"step 1\nValueError: bad\n{report}Traceback (most recent call last):\n{summary}")
    assert (found.rank, found.cause, found.lines) == (
        0,
        "it ended with exit code 1: ValueError: bad",
        ("step 1", "ValueError: bad"),
    )


def test_files_of_ranks_that_are_links_or_pipes_are_not_read(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "stderr.log")
    (logs / "stdout.log").symlink_to("/etc/passwd")
    summary = TORCHRUN.partition("ChildFailedError")[2].format(rank=1, code=1)
    assert "root:" not in "".join(failure(summary, folder=tmp_path).lines)


@pytest.mark.parametrize(
    "text",
    [
        "[rank0]:[W1127 a.cpp:1] slow\n[rank2]: Traceback (most recent\n[rank0]: Traceback (most recent",
        "-- Process 2 terminated with the error:\nx",
    ],
)
def test_rank_is_named_without_torchrun(text: str) -> None:
    assert failure(text).rank == 2


def test_lines_of_a_rank_are_bounded_and_without_secrets_and_controls() -> None:
    lines = (
        ["[rank1]: Traceback"]
        + [f"[rank1]: {index}" for index in range(50)]
        + ["[rank1]: api_key=hunter2 \x1b]0;x\x07"]
    )
    found = failure("\n".join(lines))
    assert len(found.lines) == MAX_LINES
    assert "hunter2" not in found.lines[-1] and "\x1b" not in found.lines[-1]


@pytest.mark.parametrize(
    ("code", "oom_killed", "kind", "said"),
    [
        (-9, True, "out-of-memory", "was killed by SIGKILL: the host ran out of memory"),
        (137, True, "out-of-memory", "ended with exit code 137: the host ran out of memory"),
        (-9, False, "process-killed", "was killed by SIGKILL"),
        (-9, None, "process-killed", "was killed by SIGKILL: unless a user did that, the host ran out of memory"),
    ],
)
def test_oom_killer_is_named_if_it_killed_meanwhile(code: int, oom_killed: bool | None, kind: str, said: str) -> None:
    found = failure("step 1", code, oom_killed=oom_killed)
    assert (found.code, found.cause) == (kind, said)


def test_rank_that_the_oom_killer_ended_is_named() -> None:
    found = failure(TORCHRUN.format(rank=1, code=-9), oom_killed=True)
    assert (found.rank, found.cause) == (1, "it was killed by SIGKILL: the host ran out of memory")


def test_known_error_of_cuda_gets_its_remedy() -> None:
    found = failure("RuntimeError: CUDA error: no kernel image is available for execution on the device")
    assert found.code == "wrong-version" and "install a torch" in found.cause


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    raise ValueError(text)  # CUDA out of memory. CUDA error: an illegal memory access was encountered
    ^^^^^^^^^^^^^^^^^^^^^^
  File "train.py", line 5, in fit
    main("CUDA out of memory")
{error}
"""


@pytest.mark.parametrize("mark", ["", "[default0]:[rank0]: "])
def test_source_lines_of_a_traceback_are_no_cause(mark: str) -> None:
    text = "".join(f"{mark}{line}\n" for line in TRACEBACK.format(error="ValueError: no such class").splitlines())
    found = failure(f"{mark}CUDA out of memory, so the batch is halved\n{text}")
    assert found.code == "process-failed" and found.cause.endswith("ValueError: no such class")


def test_error_of_cuda_counts_below_a_traceback_whose_source_has_another_one() -> None:
    found = failure(TRACEBACK.format(error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"))
    assert (found.code, "Tried to allocate" in found.cause) == ("out-of-memory", True)


def test_last_line_with_words_is_quoted() -> None:
    assert failure("no data\n=====\n", 2).cause == "ended with exit code 2: no data"
