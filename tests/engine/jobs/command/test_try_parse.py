"""What `--try-parse` finds in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.jobs.command.try_parse import MAX_READ_BYTES, TriedMetric, try_parse
from support.runs.factories import make_run_folder


def test_metrics_of_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("loading\nstep 10 loss 3\nstep 20 loss 2, acc 0.5\n")
    tried = try_parse(path)
    assert tried.metrics == {"loss": TriedMetric(2, 10, 20, 2.0), "acc": TriedMetric(1, 20, 20, 0.5)}
    assert (tried.num_lines, tried.num_used) == (3, 2)


def test_bars_are_read_as_they_were_redrawn_and_without_colors(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    bars = "".join(f"\r {step}/20 [00:01<00:01, loss={20 - step}]" for step in range(1, 21))
    path.write_text(f"\x1b[32mstep\x1b[0m 10 \x1b[1;31mloss\x1b[m 3\r\n{bars}\n")
    # The steps of a bar that begins below the last one go on from there.
    assert try_parse(path).metrics == {"loss": TriedMetric(21, 10, 30, 0.0)}


def test_formats_and_lines_that_were_left_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    prose = "The final loss of all of it after many hours of work was 3.2 units"
    path.write_text(f"step 1 loss 3\nstep 2 loss 2\nacc 0.5\n{prose}\nstep 9 loss 1\n")
    tried = try_parse(path, max_bytes=path.stat().st_size - 1)
    assert [(each.example, each.count) for each in tried.formats.values()] == [("step 1 loss 3", 3), ("acc 0.5", 1)]
    assert (tried.unread, tried.num_unread) == ([prose], 1)
    assert try_parse(path, max_bytes=20).metrics == {"loss": TriedMetric(2, 1, 2, 2.0)}


def test_long_lines_and_binary_data_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"x" * (2 * MAX_READ_BYTES + 10) + b" loss: 1\n" + bytes(range(256)) + b"\nloss: 2")
    assert try_parse(path).metrics == {"loss": TriedMetric(1, 0, 0, 2.0)}


def test_metric_of_an_earlier_state_of_a_bar_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\r 1/9 [00:01<00:01, loss=3, acc=0.5]\r 9/9 [00:02<00:00, loss=2]\n")
    assert {name: each.last for name, each in try_parse(path).metrics.items()} == {"loss": 2.0, "acc": 0.5}


def test_lines_of_gputrain_are_skipped_in_the_log_of_a_run(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a")
    folder.log.write_text("step 1 loss 3\n2026-11-01 10:00:09  finished: val_loss 4\n")
    tried = try_parse(folder.log)
    assert (list(tried.metrics), tried.num_lines) == (["loss"], 1)
    # The log of another program may have times.
    (tmp_path / "log.txt").write_text("2026-11-01 10:00:00  acc 0.5\n")
    assert list(try_parse(tmp_path / "log.txt").metrics) == ["acc"]


def test_lines_of_one_record_are_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    box = "| step | 1 |\n| loss | 0.5 |\n| mean 100 episode reward | 3 |\n"
    path.write_text(f"{box}done\nloss now at 3 and so on and on\n")
    tried = try_parse(path)
    assert list(tried.metrics) == ["loss", "mean_100_episode_reward"]
    assert tried.unread == ["loss now at 3 and so on and on"]


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        with pytest.raises(UsageError, match="cannot be read"):
            try_parse(tmp_path / name)


def test_steps_that_a_resumed_training_prints_again_void_the_earlier_ones_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"epoch {epoch} loss {epoch}.5\n" for epoch in (1, 2, 3, 2)))
    tried = try_parse(path)
    assert tried.metrics == {"loss": TriedMetric(2, 1, 2, 2.5)}
    assert tried.notes == ["repeats steps from 2 on, which void the earlier ones"]
