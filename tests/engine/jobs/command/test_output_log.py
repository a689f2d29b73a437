"""Output of programs that was written for a terminal, as final lines."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from engine.base.colors import without_colors
from engine.jobs.command.output_log import LIVE_SECONDS, MAX_COLUMNS, ROWS, SETTLE_SECONDS, OutputLog


def stopped_clock() -> float:
    return 0.0


def lines_of(*chunks: bytes) -> list[str]:
    log = OutputLog(clock=stopped_clock)
    return [line for chunk in chunks for line in log.feed(chunk)] + log.close()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\n\n\nb\n\n", ["a", "", "", "b", ""]),
        (b" 10%\r 50%\r100%\n", ["100%"]),
        (b"bar 1\nbar 2\x1b[A\rBAR 1\n\rBAR 2\n", ["BAR 1", "BAR 2"]),
        (b"one\ntwo\x1b[1A\r\x1b[2Kdone\x1b[1B\r\x1b[2K", ["done"]),
        (b"menu\n\x1b[?1049hcurses\n\x1b[?1049lnext\n", ["menu", "next"]),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1bPdevice\x1b\\c\x1b_app\x1b\\d\n", ["abcd"]),
        (b"\x1b]broken title\nnext\n", ["", "next"]),
        (b"a\x00\x07\x0eb\x7f\xc2\x9bc\x1b[5;3r\x1b[?25l\x1b>\x1b(Bd\n", ["abcd"]),
        (b"caf\xc3\xa9 \xff\xc3\n", ["caf\xe9 \ufffd\ufffd"]),
    ],
    ids=str,
)
def test_output_log_folds_to_what_a_terminal_shows(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\x1b[31mred\x1b[0m plain", "\x1b[0;31mred\x1b[0m plain"),
        (b"\x1b[01;32mok", "\x1b[0;1;32mok\x1b[0m"),
        (b"\x1b[38;5;208mx\x1b[48;2;1;2;3my", "\x1b[0;38;5;208mx\x1b[0;38;5;208;48;2;1;2;3my\x1b[0m"),
        (b"\x1b[31mab\r\x1b[32mX", "\x1b[0;32mX\x1b[0;31mb\x1b[0m"),
        (b"\x1b[8mhidden\x1b[5mblinking", "hiddenblinking"),
        (b"\x1b[31mred\x1b[39m   ", "\x1b[0;31mred\x1b[0m"),
    ],
    ids=str,
)
def test_output_log_keeps_colors_only(data: bytes, line: str) -> None:
    assert lines_of(data) == [line]


def test_color_continues_on_the_next_line() -> None:
    assert lines_of(b"\x1b[31ma\nb\x1b[m\nc\n") == ["\x1b[0;31ma\x1b[0m", "\x1b[0;31mb\x1b[0m", "c"]


class Operation:
    """What a program prints, and what it does to a screen that is as simple as possible."""

    def __init__(self, data: str, apply: Callable[[Screen], None]) -> None:
        self.data, self.apply = data, apply

    def __repr__(self) -> str:
        return repr(self.data)


class Screen:
    """Cells by row and column; rows above `top` cannot change."""

    def __init__(self) -> None:
        self.cells: list[dict[int, str]] = [{}]
        self.row = self.column = self.top = 0

    def write(self, text: str) -> None:
        for character in text:
            self.cells[self.row][self.column] = character
            self.column += 1

    def move(self, row: int, column: int) -> None:
        self.row = max(self.top, min(row, self.top + ROWS - 1))
        self.cells += [{} for _ in range(self.row + 1 - len(self.cells))]
        self.column = column

    def newline(self, count: int) -> None:
        self.row, self.column = self.row + count, 0
        self.cells += [{} for _ in range(self.row + 1 - len(self.cells))]
        self.top = max(self.top, len(self.cells) - ROWS)

    def erase(self, row: int, start: int, end: float) -> None:
        self.cells[row] = {column: text for column, text in self.cells[row].items() if not start <= column < end}

    def erase_display(self, part: int) -> None:
        if part != 1:
            del self.cells[self.row + 1 :]
        if part:
            for row in range(self.top, self.row):
                self.cells[row] = {}
        self.erase_line(part)

    def erase_line(self, part: int) -> None:
        self.erase(self.row, self.column if part == 0 else 0, self.column + 1 if part == 1 else float("inf"))

    def tab(self) -> None:
        self.column = (self.column // 8 + 1) * 8

    def lines(self) -> list[str]:
        lines = ["".join(row.get(c, " ") for c in range(max(row, default=-1) + 1)).rstrip(" ") for row in self.cells]
        while lines and len(lines) > self.row and not lines[-1]:
            lines.pop()
        return lines


def moves(count: int) -> list[Operation]:
    return [
        Operation(f"\x1b[{count}A", lambda s: s.move(s.row - count, s.column)),
        Operation(f"\x1b[{count}B", lambda s: s.move(s.row + count, s.column)),
        Operation(f"\x1b[{count}E", lambda s: s.move(s.row + count, 0)),
        Operation(f"\x1b[{count}F", lambda s: s.move(s.row - count, 0)),
        Operation(f"\x1b[{count}C", lambda s: s.move(s.row, s.column + count)),
        Operation(f"\x1b[{count}D", lambda s: s.move(s.row, max(s.column - count, 0))),
        Operation(f"\x1b[{count}G", lambda s: s.move(s.row, count - 1)),
        Operation(f"\x1b[{count};3H", lambda s: s.move(s.top + count - 1, 2)),
        Operation("\n" * count, lambda s: s.newline(count)),
    ]


OPERATIONS = st.one_of(
    st.text(alphabet="abc d\xe9\u2588", min_size=1, max_size=9).map(
        lambda text: Operation(text, lambda s: s.write(text))
    ),
    st.sampled_from(
        [
            Operation("\n", lambda s: s.newline(1)),
            Operation("\n" * 40, lambda s: s.newline(40)),
            Operation("\r", lambda s: s.move(s.row, 0)),
            Operation("\b", lambda s: s.move(s.row, max(s.column - 1, 0))),
            Operation("\t", Screen.tab),
            *(Operation(f"\x1b[{part}J", lambda s, part=part: s.erase_display(part)) for part in range(3)),
            *(Operation(f"\x1b[{part}K", lambda s, part=part: s.erase_line(part)) for part in range(3)),
        ]
    ),
    st.integers(1, 6).flatmap(lambda count: st.sampled_from(moves(count))),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_output_log_equals_a_simple_screen(operations: list[Operation]) -> None:
    screen = Screen()
    for operation in operations:
        operation.apply(screen)
    assert lines_of("".join(operation.data for operation in operations).encode()) == screen.lines()


PIECES = st.one_of(
    st.sampled_from(
        [
            b"text",
            b"\n",
            b"\r",
            b"\x1b",
            b"\x1b[31m",
            b"\x1b[0m",
            b"\x1b[A",
            b"\x1b]0;t\x07",
            b"\x1bPx",
            b"\x1b\\",
            b"\t",
        ]
    ),
    st.sampled_from(["\u2588", "\xe9", "\u4f60", "e\u0301", "\U0001f600"]).map(str.encode),
    st.binary(max_size=3),
)


@given(st.lists(PIECES, max_size=25).map(b"".join))
def test_splits_do_not_change_the_lines(data: bytes) -> None:
    whole = lines_of(data)
    for position in range(len(data)):
        assert lines_of(data[:position], data[position:]) == whole
    assert lines_of(*(bytes([byte]) for byte in data)) == whole


@given(st.lists(PIECES, max_size=40).map(b"".join))
def test_lines_are_printable_without_their_colors(data: bytes) -> None:
    for line in lines_of(data):
        assert without_colors(line).isprintable()


class Recorded(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_bars_of_tqdm_fold_to_their_last_state() -> None:
    out = Recorded()
    bars = [
        tqdm(total=5, desc=f"bar {number}", position=number, file=out, ncols=60, mininterval=0) for number in range(3)
    ]
    for _ in range(5):
        for bar in bars:
            bar.update()
    tqdm.write("a message", file=out)
    for bar in bars:
        bar.close()
    message, *folded = lines_of(out.getvalue().encode())
    assert message == "a message"
    assert [line[:12] for line in folded] == ["bar 0: 100%|", "bar 1: 100%|", "bar 2: 100%|"]


def test_live_display_of_rich_folds_to_its_last_state() -> None:
    out = Recorded()
    console = Console(file=out, force_terminal=True, width=80, color_system="standard")
    with Progress(console=console, auto_refresh=False) as progress:
        tasks = [progress.add_task(f"task {number}", total=3) for number in range(2)]
        for step in range(3):
            for task in tasks:
                progress.update(task, advance=1, refresh=True)
            console.print(f"step {step}")
    plain = [without_colors(line) for line in lines_of(out.getvalue().encode())]
    assert plain[:3] == ["step 0", "step 1", "step 2"]
    assert [line[:7] for line in plain[3:]] == ["task 0 ", "task 1 "]
    assert all("100%" in line for line in plain[3:])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_line_is_final_when_it_was_left_unchanged() -> None:
    clock = Clock()
    log = OutputLog(clock=clock)
    assert log.feed(b"loss 0.5\n 10%") == []
    assert log.pending() == ["loss 0.5", " 10%"]
    clock.now = SETTLE_SECONDS
    assert log.feed() == ["loss 0.5"]
    assert log.pending() == [" 10%"]


def test_live_display_stays_pending_while_it_is_redrawn_and_the_lines_above_it_do_not() -> None:
    clock = Clock()
    log = OutputLog(clock=clock)
    final = []
    for frame in range(30):
        above = f"step {frame}\n" if frame % 10 == 0 else ""
        final += log.feed(f"\x1b[1A\r\x1b[J{above}bar 1: {frame}\nbar 2: {frame}".encode())
        clock.now += 2 * SETTLE_SECONDS
    assert final == ["step 0", "step 10", "step 20"]
    assert log.pending() == ["bar 1: 29", "bar 2: 29"]
    clock.now += LIVE_SECONDS + 1
    assert log.feed() == ["bar 1: 29"]


def test_live_display_that_hides_the_cursor_stays_pending_however_slow_it_is() -> None:
    clock = Clock()
    log = OutputLog(clock=clock)
    log.feed(b"\x1b[?25lbar 1\nbar 2\x1b[1A\rbar 1: 0\n\rbar 2: 0")
    clock.now = 10 * LIVE_SECONDS
    assert log.feed() == []
    assert log.feed(b"\x1b[?25h") == ["bar 1: 0"]


def test_output_after_a_program_that_crashed_on_the_alternate_screen_is_kept() -> None:
    lines = lines_of(b"before\n\x1b[?1049hTraceback\n" + b"line\n" * ROWS)
    assert lines == ["before", "Traceback", *["line"] * ROWS]


def test_gigabyte_without_a_newline_needs_little_memory_and_is_one_short_line() -> None:
    log = OutputLog(clock=stopped_clock)
    chunk = b"x" * (1 << 20)
    tracemalloc.start()
    for _ in range(1 << 6):
        log.feed(chunk)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 10 << 20
    assert log.close() == ["x" * MAX_COLUMNS + f" [{(1 << 26) - MAX_COLUMNS} more characters]"]
