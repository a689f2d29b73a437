"""A second start of a compiled run loads the code that the first one has kept, and starts no compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.gputrain_command import Gputrain, read_events

RUN = ["run", "--headless", "digits", "--model", "cnn", "--ranks", "2", "--epochs", "1", "model.compile=true"]


def compiled_sources(log: Path) -> int:
    """Return how many times the compiler was started with a source, and not asked for its version; empty the log."""
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return sum(".cpp" in line or ".h" in line for line in lines)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_second_start_compiles_nothing_in_a_fresh_temporary_folder(gputrain: Gputrain) -> None:
    log, programs = gputrain.folder / "compilations", gputrain.folder / "bin"
    programs.mkdir()
    (programs / "g++").write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    (programs / "g++").chmod(0o755)
    gputrain.environment["PATH"] = f"{programs}:{gputrain.environment['PATH']}"
    gputrain.environment["XDG_CACHE_HOME"] = str(gputrain.folder / "cache")
    del gputrain.environment["TORCHINDUCTOR_CACHE_DIR"]
    counts, messages, epochs = [], [], []
    for name, more in (("first", []), ("second", []), ("third", ["--batch-size", "48"])):
        gputrain.environment["TMPDIR"] = str(gputrain.folder / name)
        (gputrain.folder / name).mkdir()
        process = gputrain.start(*RUN, "--name", name, *more)
        assert process.communicate(timeout=1800)[1] is not None
        assert process.returncode == 0
        counts.append(compiled_sources(log))
        events = read_events(gputrain.runs / name)
        messages.append([event["message"] for event in events if event["type"] == "warning"])
        epochs.append(next(event["train_loss"] for event in events if event["type"] == "epoch"))
    assert counts[0] > 5
    assert counts[1] == 0
    assert counts[2] > 5, "another batch size has another key"
    assert any("loading the compiled code of cnn" in message for message in messages[1])
    assert any("compiling cnn" in message for message in messages[2])
    assert epochs[0] == epochs[1]
