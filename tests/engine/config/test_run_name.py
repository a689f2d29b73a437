"""Names of runs in any script: which are valid, and their one form."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest

from engine.config.loader import resolve_config
from engine.config.run_name import MAX_NAME_BYTES, name_problem, normalize_name
from support.messages import raises_problem

E_ACUTE = "e\u0301"


@pytest.mark.parametrize(
    "name", ["digits-3", "花朵", "наука_2", "प्रयोग", "ünïcode", "実験.1", "x" * 100, "花" * 66, "٣"]
)
def test_name_may_be_of_any_script(name: str) -> None:
    assert name_problem(name) is None
    assert resolve_config("digits", [f"run.name={name}"]).config.run.name == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".x", "-x", "_x", "a b", "a/b", "a\u00a0b", "a\u2028b", "a\u3000b", "x\n", "a\x1b[2J"),
        # Bidirectional controls, joiners, variation selectors, and letters that nobody sees.
        *("a\u202eb", "a\u2066b", "a\u200bb", "a\u200db", "\u3164", "a\ufe0f", "a\U000e0101", "a\u034fb"),
        # What looks like a separator or means something to a shell or to an option.
        *("a\u2215b", "a\uff0fb", "a\uff1ab", "a*", "a~2", "a:any", "a,b", "花=1", "🌸", "a²"),
        # A mark needs a letter before it.
        *("\u0301a", "x" * 101, "花" * 67),
    ],
)
def test_invalid_name_is_refused(name: str) -> None:
    assert name_problem(name) is not None
    if name:
        with raises_problem("invalid-name", "run.name"):
            resolve_config("digits", [f"run.name={name}"])


def test_name_has_one_form() -> None:
    decomposed = f"{E_ACUTE}t{E_ACUTE}"
    assert normalize_name(decomposed) == "été" == unicodedata.normalize("NFC", decomposed)
    assert resolve_config("digits", [f"run.name={decomposed}"]).config.run.name == "été"
    assert len(f"{'x' * MAX_NAME_BYTES}~12345.lock.tmp".encode()) < 255


def test_name_outside_of_the_file_system_encoding_says_so() -> None:
    script = (
        "import sys; from engine.config.run_name import name_problem; "
        "print(*map(name_problem, ['\\u82b1', sys.argv[1]]))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run(
        [sys.executable, "-c", script, "花"], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout == (
        "cannot be a file name in the encoding ascii; set LC_ALL=C.UTF-8, or use an ASCII name "
        "is not text in the encoding ascii; set LC_ALL=C.UTF-8\n"
    )
