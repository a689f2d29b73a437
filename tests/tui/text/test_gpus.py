"""The message of the monitor and of `gputrain gpus` on a host without an NVIDIA driver."""

from __future__ import annotations

import pytest

from engine.gpus.snapshot import Reading, Snapshot
from tui.text.gpus import no_driver_message


@pytest.mark.parametrize(
    ("other_driver", "used"), [(False, "training uses the CPU, "), (True, "the GPUs that torch sees, else the CPU, ")]
)
def test_no_driver_message_names_gpus_of_torch_only_if_possible(
    other_driver: bool, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.text.gpus.torch_may_see_gpus", lambda: other_driver)
    unknown: Reading[str] = Reading(None, 0.0, "no driver")
    message = no_driver_message(Snapshot(0.0, "host", unknown, unknown, (), "no driver"))
    assert message.startswith("No NVIDIA driver on host (no driver): training uses ")
    assert used in message
    assert message.endswith((" core.", " cores."))
