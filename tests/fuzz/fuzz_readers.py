"""Read changed and damaged files with every reader of foreign files and as every record, in 1 GB of address space.

`PYTHONPATH=.:tests python tests/fuzz/fuzz_readers.py 20000 [READER ...]` prints a line for each reader, and fails with
the traceback and the input if a reader raises an undocumented exception or takes too much memory. A record is named
like `engine.jobs.launch.node.NodeGpus`.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
from foreign_readers import FOREIGN_READERS
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from inputs import large_json_files
from readers import READERS, Reader
from record_readers import NUM_DAMAGED, fuzz_record, read_record

from engine.base.codec import MAX_JSON_BYTES, FileRecord, Record
from engine.base.errors import UsageError
from support.records import record_classes, record_name

MAX_BYTES = 1_000_000_000
# Hypothesis remembers the examples of a batch.
BATCH = 2000
SPARSE_BYTES = 1 << 32
ALL_READERS = [*READERS, *FOREIGN_READERS]
# Large files take minutes.
MIN_EXAMPLES_FOR_LARGE_FILES = 10_000


def main(examples: int, names: list[str]) -> int:
    limit_memory(0)
    wanted = [reader for reader in ALL_READERS if reader.name in names or not names]
    failed = [not report(reader.name, partial(fuzz_in_folder, reader, examples)) for reader in wanted]
    # The ordinary suite decodes records in its own process, where other tests have imported torch.
    if examples >= MIN_EXAMPLES_FOR_LARGE_FILES or set(names) - {reader.name for reader in ALL_READERS}:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        records = {record_name(kind): kind for kind in record_classes() if record_name(kind) in names or not names}
        limit_memory(psutil.Process().memory_info().vms)
        failed += [not report(name, partial(fuzz_record_and_large, kind, examples)) for name, kind in records.items()]
    return int(any(failed))


def limit_memory(used: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, resource.RLIM_INFINITY))


def report(name: str, fuzz_one: Callable[[], int]) -> bool:
    """Print a line for a reader, and return whether it raised only documented exceptions."""
    started = time.monotonic()
    try:
        inputs = fuzz_one()
    except Exception:
        print(f"{name}: FAILED\n{traceback.format_exc(limit=-6)}", flush=True)
        return False
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {inputs:,} inputs in {time.monotonic() - started:.0f} s, {peak:.0f} MiB", flush=True)
    return True


def fuzz_in_folder(reader: Reader, examples: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        fuzz(reader, Path(folder), examples)
    return examples


def fuzz_record_and_large(kind: type[Record], examples: int) -> int:
    inputs = fuzz_record(kind, examples // (2 * NUM_DAMAGED))
    if issubclass(kind, FileRecord) and examples >= MIN_EXAMPLES_FOR_LARGE_FILES:
        for content in large_json_files(MAX_JSON_BYTES):
            read_record(kind, content)
    return inputs


def fuzz(reader: Reader, root: Path, examples: int) -> None:
    path = reader.prepare(root)
    for first in range(0, examples, BATCH):

        @seed(first)
        @settings(
            max_examples=min(BATCH, examples - first),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(reader.inputs)
        def check(content: bytes) -> None:
            path.write_bytes(content)
            read(reader, root)

        check()
    if examples < MIN_EXAMPLES_FOR_LARGE_FILES:
        return
    for content in reader.large():
        path.write_bytes(content)
        read(reader, root)
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)
    read(reader, root)


def read(reader: Reader, root: Path) -> None:
    try:
        reader.read(root)
    except reader.documented as error:
        assert not isinstance(error, UsageError) or error.problems


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as hypothesis_home:
        set_hypothesis_home_dir(hypothesis_home)
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
