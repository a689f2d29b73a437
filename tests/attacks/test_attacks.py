"""Every attack of a second user gains nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ATTACKS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("test_"))
ATTACKS.remove("attack")
SKIPPED_EXIT_CODE = 77


# Five to forty seconds each.
NIGHTLY_ATTACKS = (
    "checkpoint_code",
    "command",
    "hosts",
    "repository",
    "reservations",
    "run_folder",
    "user_folders",
)


@pytest.mark.expensive("each attack starts a run as another user would meet it")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY_ATTACKS)) for name in ATTACKS]
)
def test_attacker_gains_nothing(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], text=True, capture_output=True, timeout=300, check=False
    )
    if result.returncode == SKIPPED_EXIT_CODE:
        pytest.skip(result.stdout.strip())
    assert (result.stdout, result.returncode) == ("the attacker gained: nothing\n", 0), result.stderr
