"""`gputrain --skill`: the page for coding agents. Each command on it works, in this order."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs.trained_run import call
from tui.cli.tree import WORDS

# The training of the page. The third one goes on until it is stopped.
TRAIN = """
import sys, time
lr = float(sys.argv[2])
for step in range(1, 4):
    print(f"step {step} loss={1 / (10 * lr * step):.3f}", flush=True)
if lr > 0.5:
    time.sleep(100)
"""


def page() -> str:
    result = call("--skill")
    assert result.exit_code == 0
    return result.stdout


def commands() -> Iterator[list[str]]:
    """Yield the lines of the shell blocks as words, on the CPU."""
    for block in re.findall(r"^```sh\n(.*?)^```", page(), re.M | re.S):
        for line in block.splitlines():
            yield [word.replace("free:1", "cpu") for word in shlex.split(line)]


@pytest.mark.expensive("starts three commands as a user does")
def test_commands_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.py").write_text(TRAIN)
    codes = {}
    for program, *words in commands():
        assert program == "gputrain" and words[0] in WORDS
        # `--detach` starts the same command again.
        monkeypatch.setattr(sys, "argv", [program, *words])
        result = call(*words)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        codes[shlex.join(words)] = result.exit_code
        if words[0] == "runs" and "--columns" in words:
            assert [line.split()[0] for line in result.stdout.splitlines()] == ["name", "lr-2", "lr-1"]
    assert call("stop", "lr-3").exit_code == 0
    assert set(codes.values()) == {0}, codes
