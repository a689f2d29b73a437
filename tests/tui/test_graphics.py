"""Which graphics a terminal shows, from its environment and its answers, and its answers among the keys."""

from __future__ import annotations

import os
import pty

import pytest

from support.messages import raises_problem
from tui.graphics import (
    ASK_ATTRIBUTES,
    ASK_CELL_SIZE,
    ASK_KITTY,
    KITTY_QUERY_ID,
    Graphics,
    GraphicsQuery,
    ReplyFilter,
    cell_size,
    known_protocol,
    requested_protocol,
)

SIXEL_REPLY, PLAIN_REPLY = "\x1b[?62;4;22c", "\x1b[?62;22c"
# More characters than Textual searches for the end of a sequence.
LONG_REPLY = "\x1b[?64;1;2;4;6;9;15;16;17;18;21;22;28;29;42;52c"
KITTY_OK, CELL_REPLY = f"\x1b_Gi={KITTY_QUERY_ID};OK\x1b\\", "\x1b[6;34;17t"


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux-0/default,1,0"}, "blocks"),
        ({"TERM": "screen-256color"}, "blocks"),
        ({"TERM": "xterm-256color", "ZELLIJ": "0"}, "blocks"),
        ({"TERM": "linux"}, "blocks"),
        ({}, "blocks"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, "blocks"),
        ({"TERM": "xterm-256color"}, None),
    ],
)
def test_known_protocol_asks_only_terminals_that_may_show_graphics(
    environment: dict[str, str], protocol: str | None
) -> None:
    assert known_protocol(environment) == protocol


def test_requested_protocol_is_value_of_variable() -> None:
    assert requested_protocol({}) is None
    assert requested_protocol({"GPUTRAIN_GRAPHICS": "auto"}) is None
    assert requested_protocol({"GPUTRAIN_GRAPHICS": "Sixel"}) == "sixel"
    with raises_problem("unknown-value", "", "GPUTRAIN_GRAPHICS=iterm", "auto, kitty, sixel, blocks"):
        requested_protocol({"GPUTRAIN_GRAPHICS": "iterm"})


def answers(*replies: str, cell: tuple[int, int] | None = (10, 20)) -> tuple[Graphics, list[str]]:
    """Return the graphics of a terminal that gives these answers, and what it is asked."""
    query = GraphicsQuery(None, cell)
    asked = [query.question, *(query.take(reply) for reply in replies)]
    return query.graphics, [question for question in asked if question]


def test_graphics_query_prefers_sixel_and_asks_for_kitty_without_it() -> None:
    assert answers(SIXEL_REPLY) == (Graphics("sixel"), [ASK_ATTRIBUTES])
    assert answers(LONG_REPLY) == (Graphics("sixel"), [ASK_ATTRIBUTES])
    assert answers(PLAIN_REPLY, KITTY_OK) == (Graphics("kitty"), [ASK_ATTRIBUTES, ASK_KITTY])
    assert answers(PLAIN_REPLY, KITTY_OK.replace("OK", "ENOTSUPPORTED")) == (Graphics(), [ASK_ATTRIBUTES, ASK_KITTY])
    assert answers("\x1b[?62;c") == (Graphics(), [ASK_ATTRIBUTES, ASK_KITTY])
    # PuTTY and the Linux console would print the question for Kitty.
    assert answers("\x1b[?6c") == (Graphics(), [ASK_ATTRIBUTES])


def test_graphics_query_asks_for_unknown_size_of_cells() -> None:
    graphics, asked = answers(CELL_REPLY, SIXEL_REPLY, cell=None)
    assert (graphics, asked) == (Graphics("sixel", (17, 34)), [ASK_CELL_SIZE + ASK_ATTRIBUTES])
    assert answers("\x1b[6;0;0t", cell=None)[0] == Graphics()
    assert GraphicsQuery("blocks", None).question == ""
    assert GraphicsQuery("sixel", (9, 18)).question == ""
    assert GraphicsQuery("sixel", None).question == ASK_CELL_SIZE


def test_cell_size_of_terminal_without_pixels_is_unknown() -> None:
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    assert cell_size(slave) is None
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 720, 432))
    assert cell_size(slave) == (9, 18)
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("reply", [SIXEL_REPLY, LONG_REPLY, CELL_REPLY, KITTY_OK], ids=repr)
def test_reply_filter_takes_reply_that_arrives_in_two_pieces_from_keys(reply: str) -> None:
    # Arrow up, an escape sequence of a mouse, and page down, which begins like a cell size.
    before, after = "j\x1b[A", "\x1b[<0;3;4M\x1b[6~k"
    for end in range(len(reply) + 1):
        taken: list[str] = []
        replies = ReplyFilter(taken.append)
        typed = replies.feed(before + reply[:end]) + replies.feed(reply[end:] + after)
        assert (typed, taken) == (before + after, [reply])


def test_reply_filter_releases_escape_key() -> None:
    replies = ReplyFilter(lambda reply: None)
    assert replies.feed("a\x1b") == "a"
    assert replies.release(after_s=60.0) == ""
    assert replies.release(after_s=0.0) == "\x1b"
    assert replies.release(after_s=0.0) == ""
    assert replies.feed("\x1b") + replies.feed("[B") == "\x1b[B"


def test_reply_filter_holds_no_text_without_end() -> None:
    replies = ReplyFilter(lambda reply: None)
    text = "\x1b_G" + "x" * 1000
    assert replies.feed(text) == text
