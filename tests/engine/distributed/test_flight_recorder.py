"""Which rank is not in the collective of the others, from the flight recorders of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.distributed.flight_recorder import (
    MAX_COLLECTIVES,
    Collective,
    Divergence,
    collectives_of_dump,
    find_divergence,
    read_record,
    write_record,
)
from engine.utils.codec import replace

STEPS = 57


def make_collective(sequence: int, operation: str = "all_reduce", **fields: Any) -> Collective:
    """A gradient reduction that is complete unless it is number `STEPS` or later."""
    collective = Collective("nccl:0", sequence, operation, 4_200_000, sequence < STEPS, sequence * 1000)
    return replace(collective, **fields)


def records_until(*last: int) -> dict[int, list[Collective]]:
    """Records of the ranks. Rank i has entered the collectives 1 to `last[i]`."""
    return {rank: [make_collective(sequence) for sequence in range(1, end + 1)] for rank, end in enumerate(last)}


def torch_entry(**fields: Any) -> dict[str, Any]:
    """An entry as torch 2.15 writes it."""
    return {
        "collective_seq_id": 30,
        "input_dtypes": ["Float"],
        "input_sizes": [[650]],
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl2:all_reduce",
        "retired": False,
        "state": "scheduled",
        "time_created_ns": 1795449875657751783,
        **fields,
    }


def read_entries(*entries: Any) -> list[Collective]:
    return collectives_of_dump(json.dumps({"entries": entries}).encode())


def test_divergence_names_rank_that_did_not_enter_collective_of_others() -> None:
    divergence = find_divergence(records_until(57, 56, 57, 60))
    message = "rank 1 did not enter all-reduce 57 (4.2 MB), in which ranks 0, 2, 3 wait"
    assert divergence == Divergence((1,), message)


def test_divergence_names_ranks_that_are_in_another_operation() -> None:
    records = records_until(57, 57, 57, 57)
    records[1][-1] = make_collective(STEPS, "broadcast", size_bytes=8)
    divergence = find_divergence(records)
    message = "rank 1 is in broadcast 57 (8 B), but ranks 0, 2, 3 are in all-reduce 57 (4.2 MB)"
    assert divergence == Divergence((1,), message)


def test_divergence_names_rank_that_reduces_another_size() -> None:
    records = records_until(57, 57, 57)
    records[2][-1] = make_collective(STEPS, size_bytes=2600)
    divergence = find_divergence(records)
    message = "rank 2 is in all-reduce 57 (2.6 kB), but ranks 0, 1 are in all-reduce 57 (4.2 MB)"
    assert divergence == Divergence((2,), message)


def test_divergence_accepts_different_sizes_where_collectives_permit_them() -> None:
    records = records_until(57, 57)
    for rank, size in enumerate((0, 8)):
        records[rank][-1] = make_collective(STEPS, "all_gather", size_bytes=size)
    assert find_divergence(records) == Divergence((), "all ranks are in all-gather 57, which does not complete")


def test_divergence_blames_no_rank_if_all_wait_in_one_collective() -> None:
    divergence = find_divergence(records_until(57, 57))
    assert divergence == Divergence((), "all ranks are in all-reduce 57 (4.2 MB), which does not complete")


def test_divergence_is_unknown_if_nothing_waits() -> None:
    assert find_divergence(records_until(56, 55)) is None


def test_divergence_is_unknown_from_record_of_one_rank() -> None:
    assert find_divergence(records_until(60)) is None


def test_divergence_is_of_the_process_group_that_ranks_entered_last() -> None:
    records = records_until(57, 56)
    # An asynchronous reduction that nobody waits for yet.
    records[0].append(Collective("gloo:1", 9, "all_reduce", 48, False, created_ns=56_000))
    records[1].append(Collective("gloo:1", 8, "all_reduce", 48, True, created_ns=55_000))
    divergence = find_divergence(records)
    assert divergence is not None
    assert "all-reduce 57" in divergence.message


def test_divergence_names_few_of_many_ranks() -> None:
    divergence = find_divergence(records_until(*[57] * 63, 56))
    assert divergence is not None
    assert divergence.message.endswith("in which ranks 0, 1, 2, 3, 4, 5, 6, 7 and 55 more wait")


def test_dump_of_torch_becomes_collectives() -> None:
    done = torch_entry(collective_seq_id=29, input_sizes=[[2, 3], [4]], input_dtypes=["Half", "Long"], retired=True)
    expected = Collective("nccl2:0", 30, "all_reduce", 2600, False, 1795449875657751783)
    assert read_entries(torch_entry(), done) == [
        replace(expected, sequence=29, size_bytes=44, completed=True),
        expected,
    ]


def test_dump_keeps_last_collectives_of_each_process_group() -> None:
    entries = [
        torch_entry(collective_seq_id=number, process_group=[group, ""])
        for number in range(300)
        for group in ("0", "1")
    ]
    kept = [(collective.group, collective.sequence) for collective in read_entries(*entries)]
    assert len(kept) == 2 * MAX_COLLECTIVES
    assert kept[-1] == ("nccl2:1", 299)


@pytest.mark.parametrize(
    "entry",
    [
        torch_entry(is_p2p=True),
        torch_entry(collective_seq_id="30"),
        torch_entry(collective_seq_id=-1),
        torch_entry(process_group=[]),
        torch_entry(profiling_name="nccl:all\x1b[2J"),
        torch_entry(input_sizes=7),
        {"is_p2p": False},
        "entry",
    ],
)
def test_dump_skips_entry_that_is_no_collective(entry: Any) -> None:
    assert read_entries(entry, torch_entry()) == read_entries(torch_entry())


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"entries": 3}', b'{"collectives": [{"group": 1}, 2, null]}'])
def test_unreadable_text_holds_no_collectives(text: bytes, tmp_path: Path) -> None:
    assert collectives_of_dump(text) == []
    (tmp_path / "rank-0.json").write_bytes(text)
    assert read_record(tmp_path / "rank-0.json") is None
    (tmp_path / "rank-0.json").write_bytes(text.replace(b'{"c', b'{"format": 1, "c'))
    assert not read_record(tmp_path / "rank-0.json")


def test_record_survives_its_file(tmp_path: Path) -> None:
    [collectives] = records_until(3).values()
    write_record(tmp_path / "rank-0.json", collectives)
    assert read_record(tmp_path / "rank-0.json") == collectives


def test_record_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "records").symlink_to("elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        write_record(tmp_path / "records" / "rank-0.json", [])


def test_missing_record_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "rank-0.json") is None
