"""Readers of foreign files raise only documented exceptions and need little memory, whatever the files contain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_readers import fuzz_record

from engine.base.codec import Record
from support.records import record_classes

PROGRAM = Path(__file__).with_name("fuzz_readers.py")


def fuzz_readers(examples: int) -> None:
    """Run the program in a process of its own, because it limits its address space."""
    tests = PROGRAM.parents[1]
    # Each thread of OpenBLAS would reserve address space.
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(examples)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readers_raise_only_documented_exceptions() -> None:
    fuzz_readers(6)


def test_records_refuse_what_does_not_survive_encoding() -> None:
    for kind in record_classes():
        fuzz_record(kind, batches=2, odd_batches=1)


# The first document has only the required fields. Each value of the second, of a GPU snapshot most, is replaced too.
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(6))
def test_records_refuse_what_does_not_survive_encoding_in_any_field(part: int) -> None:
    for kind in sorted(record_classes(), key=lambda kind: (kind.__name__, kind.__module__))[part::6]:
        fuzz_record(kind, batches=2, odd_batches=2)


@pytest.mark.parametrize("kind", [KeyError, AssertionError])
def test_fuzz_record_reports_what_a_record_must_not_do(kind: type[Exception]) -> None:
    class Faulty(Record, frozen=True, kw_only=True):
        name: str

        def __post_init__(self) -> None:
            if self.name == "nan":
                raise kind

    with pytest.raises(kind) as raised:
        fuzz_record(Faulty, batches=1)
    assert any("Faulty" in note and "nan" in note for note in raised.value.__notes__)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_readers_raise_only_documented_exceptions_for_many_files() -> None:
    fuzz_readers(20_000)
