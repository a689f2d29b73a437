"""Record the pictures of the README from `gputrain-tui --demo`: `python tests/recordings/make_pictures.py [NAME …]`.

Drives the real program in a pseudo-terminal and writes `.github/pictures/NAME.svg`. Needs `pip install '.[pictures]'`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyte

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.screen.pseudo_terminal import PseudoTerminal
from support.screen.terminal_svg import Cell, Frame, Line, picture

PICTURES = Path(__file__).parents[2] / ".github" / "pictures"
PROGRAM = [str(Path(sys.executable).with_name("gputrain-tui")), "--demo"]
FOREGROUND = "#d0d0d0"
START_SECONDS = 4.0
"""Until the demo has drawn the monitor with its history."""
QUIET_SECONDS = 0.04
"""Output that pauses for so long is a complete picture."""
END_PAUSE_SECONDS = 1.5
# pyte prints sequences of the Kitty keyboard protocol as text.
UNKNOWN_SEQUENCES = re.compile(rb"\x1b\[[<>=][0-9;]*[a-zA-Z]")
DOWN, UP, RIGHT, LEFT, TAB, ENTER, ESCAPE = "\x1b[B", "\x1b[A", "\x1b[C", "\x1b[D", "\t", "\r", "\x1b"


@dataclass(frozen=True)
class Recording:
    """A picture: the keys that lead to it, and for an animation the keys that it shows, each with a pause after it."""

    title: str
    columns: int
    rows: int
    before: Sequence[str] = ()
    keys: Sequence[tuple[str, float]] = ()
    arguments: Sequence[str] = ()


TOUR = (
    ("", 2.5), (DOWN, 0.5), (DOWN, 0.5), (" ", 0.7), (DOWN, 0.4), (" ", 1.5),  # pick two free GPUs
    ("n", 2.5), (DOWN, 0.4), (DOWN, 0.4), (DOWN, 0.4), (DOWN, 1.2), (ESCAPE, 0.8),
    ("r", 2.0), (" ", 0.6), (" ", 1.2), ("c", 4.0), (ESCAPE, 1.0), ("g", 0.8), (ENTER, 4.0),  # compare two runs
    ("m", 1.5), (LEFT, 0.3), (LEFT, 0.3), (LEFT, 1.2), ("v", 3.0), (ESCAPE, 1.5), ("t", 2.0),
)  # fmt: skip
RECORDINGS = {
    "tour": Recording("gputrain: monitor, form, runs, a comparison and a run", 120, 34, keys=TOUR),
    "monitor": Recording("The monitor: eight GPUs, their processes and the runs", 160, 48, before=(DOWN, DOWN, " ")),
    "hosts": Recording(
        "Three hosts: their GPUs, the processes of one, and the runs",
        120,
        34,
        before=(DOWN, ENTER, *[DOWN] * 5, ENTER, *[UP] * 2),
        arguments=("--hosts", "lab1,lab2"),
    ),
    "run": Recording("A run: loss, accuracy, learning rate, its GPUs and its log", 120, 34, before=("r", ENTER, "m")),
}


class Screen:
    """A terminal emulator that is fed from a pseudo-terminal."""

    def __init__(self, terminal: PseudoTerminal, columns: int, rows: int) -> None:
        self._terminal, self._fed = terminal, 0
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._unfinished = b""

    def follow(self, seconds: float) -> list[Frame]:
        """Read output for `seconds` and return each complete screen update."""
        end = self._now() + seconds
        frames = []
        while (now := self._now()) < end:
            self._terminal.read(min(QUIET_SECONDS, max(end - now, 0.001)))
            arrived = b"".join(data for _, data in self._terminal.output[self._fed :])
            self._fed = len(self._terminal.output)
            if arrived:
                self._feed(arrived)
                continue
            lines = self._lines()
            if not frames or frames[-1].lines != lines:
                frames.append(Frame(self._now(), lines))
        return frames

    def _now(self) -> float:
        return self._terminal.seconds_since_start()

    def _feed(self, data: bytes) -> None:
        data = self._unfinished + data
        start = data.rfind(b"\x1b")
        whole = start < 0 or re.match(rb"\x1b([^\[]|\[[0-?]*[ -/]*[@-~])", data[start:]) is not None
        data, self._unfinished = (data, b"") if whole else (data[:start], data[start:])
        self._stream.feed(UNKNOWN_SEQUENCES.sub(b"", data))

    def _lines(self) -> tuple[Line, ...]:
        buffer, columns = self._screen.buffer, range(self._screen.columns)
        return tuple(tuple(_cells([buffer[row][column] for column in columns])) for row in range(self._screen.lines))


def _cells(characters: Sequence[pyte.screens.Char]) -> list[Cell]:
    cells: list[Cell] = []
    for character in characters:
        if not character.data:  # the second half of a wide character
            cells[-1] = replace(cells[-1], width=2)
            continue
        foreground, background = _color(character.fg, FOREGROUND), _color(character.bg, "")
        if character.reverse:
            foreground, background = background or "#000000", foreground
        flags = (character.bold, character.italics, character.underscore)
        cells.append(Cell(character.data, foreground, background, *flags))
    return cells


def _color(name: str, default: str) -> str:
    """Return a color of pyte for SVG. The themes of a terminal with 24-bit colors use no others."""
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else default


def without_background(frames: Sequence[Frame]) -> tuple[str, list[Frame]]:
    """Return the most frequent background of the first frame, and the frames without that background."""
    counts = Counter(cell.background for line in frames[0].lines for cell in line)
    background = counts.most_common(1)[0][0]

    def clear(line: Line) -> Line:
        # The color of a space is never seen.
        return tuple(
            replace(
                cell,
                background="" if cell.background == background else cell.background,
                foreground="" if cell.text == " " and not cell.underlined else cell.foreground,
            )
            for cell in line
        )

    cleared = {line: clear(line) for frame in frames for line in frame.lines}
    return background or "#000000", [
        Frame(frame.time, tuple(cleared[line] for line in frame.lines)) for frame in frames
    ]


def record(recording: Recording) -> str:
    """Run the demo with a folder of its own for settings, press the keys, and return the SVG."""
    with tempfile.TemporaryDirectory(prefix="gputrain-pictures-") as folder:
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "GPUTRAIN_NVML")}
        homes = {f"XDG_{kind}_HOME": str(Path(folder) / kind) for kind in ("STATE", "CONFIG", "CACHE")}
        environment = kept | homes | {"TZ": "UTC"}
        with PseudoTerminal(
            [*PROGRAM, *recording.arguments], recording.columns, recording.rows, environment
        ) as terminal:
            screen = Screen(terminal, recording.columns, recording.rows)
            frames = screen.follow(START_SECONDS)
            for key in recording.before:
                terminal.press(key)
                frames = screen.follow(1.5)
            frames = frames[-1:]
            for key, seconds in recording.keys:
                terminal.press(key)
                frames += screen.follow(seconds)
            end = terminal.seconds_since_start() + END_PAUSE_SECONDS
    background, frames = without_background(frames)
    if recording.keys:
        frames[0] = replace(frames[0], time=frames[1].time - 0.5)
    return picture(frames, end, background, recording.title)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or RECORDINGS:
        svg = record(RECORDINGS[name])
        (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(f"{name}.svg: {len(svg.encode()) / 1024:.0f} KB")


if __name__ == "__main__":
    main()
