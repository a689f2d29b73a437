"""Submit runs in this process, and read what the list says of them."""

from __future__ import annotations

import json

import pytest

from support.runs.trained_run import call


def submit(monkeypatch: pytest.MonkeyPatch, *words: str, code: int = 0) -> str:
    monkeypatch.setattr("sys.argv", ["gputrain", *words])
    result = call(*words)
    assert result.exit_code == code, result.output
    return str(result.stdout if code == 0 else result.stderr)


def state_of(name: str) -> tuple[str, str]:
    row = json.loads(call("runs", "show", name, "--json").stdout)
    return row["state"], row["message"]
