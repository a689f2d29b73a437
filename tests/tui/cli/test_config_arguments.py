"""CONFIG that is a pipe, such as `<(…)` of a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.messages import says
from support.runs.trained_run import call
from tui.cli.config_arguments import config_copies, regular_config
from tui.cli.train import typed_words


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Forget the copies of other tests, as another process does."""
    regular_config.cache_clear()
    yield
    config_copies.close()


@pytest.fixture
def pipe() -> Iterator[str]:
    """Path of a pipe with a config."""
    reading, writing = os.pipe()
    os.write(writing, b"base: digits\nrun: {epochs: 7}\n")
    os.close(writing)
    yield f"/dev/fd/{reading}"
    os.close(reading)


def test_config_from_a_pipe_is_read(pipe: str) -> None:
    result = call("config", pipe, "--diff")
    assert result.exit_code == 0 and "epochs: 7" in result.stdout and "lr: 0.1" in result.stdout


def test_process_that_starts_again_gets_the_copy_of_a_pipe(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = regular_config(pipe)
    monkeypatch.setattr(sys, "argv", ["gputrain", "run", pipe, "--detach", "--", "cat", pipe])
    assert typed_words() == ["run", copy, "--detach", "--", "cat", pipe]
    assert "epochs: 7" in Path(copy).read_text()
    config_copies.close()
    assert not Path(copy).parent.exists()


def test_pipe_that_others_can_write_to_is_no_config(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fifo.chmod(0o622)
    result = call("config", fifo)
    assert result.exit_code == 2 and says(result.stderr, "not-found", fifo)
