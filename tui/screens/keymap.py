"""The key bindings of every screen, in one table that feeds the footer and the help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto

from textual.binding import Binding


class Ability(Flag):
    """What can be done with the runs of a screen: its keys are those rows of its table whose needs are met."""

    WATCH = auto()
    """Show charts and log, mark, compare: every run can."""
    CHANGE = auto()
    """Stop, resume, label: a run of gputrain."""
    TRAIN = auto()
    """Pause, checkpoint, profile, confusion matrix, config: a training."""
    COMMAND = auto()
    """Show the processes: the run of a command."""
    CHOOSE = auto()
    """Choose among the charts, show parameters: a run whose metrics another program wrote."""
    ALL = WATCH | CHANGE | TRAIN | COMMAND | CHOOSE


@dataclass(frozen=True)
class Key:
    """One row of the table: keys with one effect, the same on every screen that has them.

    `key` is a Textual key name, several separated by commas, or empty. `action` is a method `action_…` of the screen,
    of the app if prefixed with `app.`, or of a list if prefixed with `lines.`. `needs` is what the runs of the screen
    must be able to. `rank` is the place in a narrow footer, the smallest first; without one, it is only in the help.
    """

    key: str
    title: str
    help: str
    action: str
    needs: Ability = Ability.WATCH
    rank: float = math.inf

    @property
    def keys(self) -> list[str]:
        return self.key.split(",")

    @property
    def key_label(self) -> str:
        return KEY_LABELS.get(self.keys[0], self.keys[0])

    @property
    def key_labels(self) -> str:
        """All of them."""
        return " ".join(KEY_LABELS.get(key, key) for key in self.keys)


KEY_LABELS = {
    "slash": "/",
    "question_mark": "?",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "comma": ",",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "full_stop": ".",
    "left": "←",
    "shift+left": "⇧←",
    "shift+right": "⇧→",
    "right": "→",
    "escape": "esc",
    "f1": "F1",
    "f2": "F2",
    "pagedown": "PgDn",
    "shift+up": "⇧↑",
    "shift+down": "⇧↓",
    "ctrl+c": "^c",
    "ctrl+d": "^d",
    "ctrl+u": "^u",
    "ctrl+k": "^k",
    "ctrl+f": "^f",
    "ctrl+s": "^s",
    "ctrl+r": "^r",
    "ctrl+y": "^y",
    "ctrl+o": "^o",
}

CHANGE, TRAIN, COMMAND, CHOOSE = Ability.CHANGE, Ability.TRAIN, Ability.COMMAND, Ability.CHOOSE
_TABLE = (
    # Everywhere
    Key("question_mark,f1", "help", "Show all keys of this screen.", "app.help"),
    Key("t", "theme", "Switch between the dark, the light and the terminal's own colors.", "app.next_theme"),
    Key("q,ctrl+c", "quit", "Quit. Runs continue.", "app.quit"),
    Key("escape", "back", "Go one level back: of a chart, a filter, a dialog or a screen. Runs continue.", "back"),
    Key("tab", "next panel", "Focus the next panel. Charts that share a place take turns.", "next_panel(1)"),
    # Lists
    Key("j,k", "move", "Move by one line, as the arrow keys do.", "lines.move"),
    Key("ctrl+d,ctrl+u", "page", "Move by half a page; page down and page up by a page.", "lines.page"),
    Key("g,G", "first, last", "Move to the first or the last line, as home and end do.", "lines.end"),
    Key("enter", "open", "Open what is under the cursor: a run, a GPU, a sweep, a process, the choices.", "open"),
    Key("space", "select", "Select a GPU for the next run, or a run to compare; again, undo that.", "select"),
    Key("M", "select all", "Select all runs that the filter shows, or none if all are selected.", "select_all"),
    Key("slash", "filter", "Show only rows with this text; of runs lr>0.1, of GPUs free mine memory>40.", "filter"),
    Key("o", "sort", "Sort by another column; the same column again turns the order around.", "sort"),
    Key("left,left_square_bracket", "previous", "Move a cursor to the left, or show the one before.", "sideways(-1)"),
    Key("right,right_square_bracket", "next", "Move a cursor to the right, or show the next one.", "sideways(1)"),
    # Screens
    Key("n", "new run", "Configure and start a new run.", "app.new_run", CHANGE),
    Key("f2", "script", "Run a command, such as python train.py, in place of a config.", "app.command"),
    Key("r", "runs", "List all runs with their results.", "app.runs"),
    Key("w", "watched", "Show what gputrain watch watches: runs of other programs, or a process.", "app.watched"),
    Key("Q", "queue", "Show the runs that wait for GPUs, and change the order of yours.", "app.queue", CHANGE),
    Key("S", "sweep", "Open the sweep that this run is a trial of, else the latest sweep.", "sweep", CHANGE),
    Key("c", "compare", "Compare the curves and configs of the selected runs.", "compare"),
    Key("T", "processes", "Show the processes of the command, and what they use.", "processes", COMMAND),
    Key("v", "confusion", "Show the confusion matrix and per-class accuracy.", "confusion", TRAIN),
    Key("P", "profile", "Measure where the time of training steps goes, or show the latest profile.", "profile", TRAIN),
    Key("d", "details", "Show the config of this run, or its command and parameters.", "details"),
    Key("l", "log", "Show the end of the log with full lines.", "log"),
    # Changes of runs
    Key("s", "stop", "Stop this: a training saves a checkpoint, a waiting run leaves the queue.", "stop", CHANGE),
    Key("p", "pause", "Pause at the next step, or continue.", "pause", TRAIN),
    Key("C", "checkpoint", "Save a checkpoint at the next step.", "checkpoint", TRAIN),
    Key("u", "resume", "Resume an ended run from its last checkpoint, or start its command again.", "resume", CHANGE),
    Key("a", "again", "Configure a new run with the config or the command of this one.", "again", CHANGE),
    Key("A", "archive", "Archive the selected runs, else this one, or restore them.", "archive", CHANGE),
    Key("H", "archived", "Show or hide archived runs.", "archived", CHANGE),
    Key("D,delete", "delete", "Move the selected runs, else this one, to the trash.", "delete", CHANGE),
    Key("h", "hold", "Keep this run from starting, or let it start again.", "hold"),
    Key("K,shift+up", "move up", "Start this run before the one of yours above it.", "shift(-1)"),
    Key("J,shift+down", "move down", "Start this run after the one of yours below it.", "shift(1)"),
    Key("ctrl+k", "signal", "Send a signal to the process under the cursor.", "signal"),
    # Charts and matrices
    Key("e", "charts", "Choose the charts.", "charts", CHOOSE),
    Key("B", "baseline", "Show the differences from this run; again, undo that.", "baseline"),
    Key("pagedown", "more charts", "Show the next charts; page up goes back.", "page_charts(1)", CHOOSE),
    Key("i", "metrics", "Show how the output is read; rename or hide a metric, or plot over it.", "metrics", CHOOSE),
    Key("x", "x axis", "Plot over epochs, steps or hours, as far as the run has them.", "x_axis"),
    Key("m", "smooth", "Cycle curve smoothing: light, strong, off.", "smooth"),
    Key("L", "log scale", "Toggle the log scale of all charts but accuracies.", "log_scale"),
    Key("y", "whole range", "Give the y axes room for all points, or only for 1% to 99% of them.", "whole_range"),
    Key("f", "full", "Toggle full screen for the focused panel.", "full"),
    Key("plus,equals_sign", "zoom in", "Show half the x range.", "zoom(0.5)"),
    Key("minus", "zoom out", "Show twice the x range.", "zoom(2.0)"),
    Key("0", "all", "Show the whole x range.", "zoom_all"),
    Key("comma,shift+left", "pan left", "Pan toward the start.", "pan(-0.25)"),
    Key("full_stop,shift+right", "pan right", "Pan toward the end.", "pan(0.25)"),
    Key("b", "best/last", "Switch between the best and the last epoch.", "other_epoch"),
    # Typing
    Key("ctrl+s", "start", "Validate the config and start the run.", "start"),
    Key("ctrl+f", "search", "Search all fields.", "search"),
    Key("ctrl+o", "more", "Show all fields, or only the common ones.", "more"),
    Key("ctrl+r", "defaults", "Reset all fields to their defaults; again, undo that.", "reset"),
    Key("ctrl+y", "copy", "Copy this text: a command, a path, what a dialog shows.", "copy"),
)
KEYS = {key.action: key for key in _TABLE}
"""All keys of the program by their actions. A key is in one row: it has one meaning, or none on a screen."""


def screen_keys(footer: str, others: str = "") -> tuple[Key, ...]:
    """Return the rows of these actions, the most important one first; those of `others` are only in the help."""
    ranked = [replace(KEYS[action], rank=rank) for rank, action in enumerate(footer.split())]
    return (*ranked, *(KEYS[action] for action in others.split()))


# The way out is in the narrowest footer.
BACK_KEY, HELP_KEY, QUIT_KEY = (replace(KEYS[action], rank=-1) for action in ("back", "app.help", "app.quit"))
THEME_KEY = replace(KEYS["app.next_theme"], rank=99)
GLOBAL_KEYS = (BACK_KEY, HELP_KEY, THEME_KEY, QUIT_KEY)
# Where letters are input, the last key of a row works.
TYPING_GLOBAL_KEYS = tuple(replace(key, key=key.keys[-1]) for key in (BACK_KEY, HELP_KEY, QUIT_KEY))
FILTER_KEYS = (
    Key("enter", "keep", "Keep the filter.", "focused.submit", rank=0),
    replace(BACK_KEY, title="clear"),
    *TYPING_GLOBAL_KEYS[1:],
)
LIST_KEYS = screen_keys("", "lines.move lines.page lines.end")

MONITOR_KEYS = screen_keys(
    "select app.new_run app.command open signal compare app.runs stop pause resume log delete app.watched filter sort"
    " app.queue again archive next_panel(1)"
)
GPU_KEYS = screen_keys("select open sideways(-1) sideways(1) app.new_run signal sort", "next_panel(1)")
RUNS_KEYS = screen_keys(
    "open select compare filter sort stop resume again sweep app.new_run pause log app.queue archive archived delete"
    " select_all"
)
PROCESS_KEYS = screen_keys("open next_panel(1)")
SWEEP_KEYS = screen_keys("open select compare again resume stop whole_range", "next_panel(1)")
QUEUE_KEYS = screen_keys("open hold shift(-1) shift(1) stop resume app.new_run")
_VIEW = "x_axis smooth log_scale whole_range zoom(0.5) zoom(2.0) zoom_all"
_MOVES = "sideways(-1) sideways(1) pan(-0.25) pan(0.25)"
RUN_KEYS = screen_keys(
    "stop resume pause charts page_charts(1) details processes full log confusion again checkpoint"
    f" {_VIEW} profile metrics archive next_panel(1)",
    _MOVES,
)
PROFILE_KEYS = screen_keys("profile")
COMPARE_KEYS = screen_keys(f"open select baseline charts sort full next_panel(1) {_VIEW} select_all", _MOVES)
CONFUSION_KEYS = screen_keys("open other_epoch sort next_panel(1)")
MISTAKES_KEYS = screen_keys("sideways(-1) sideways(1) copy", "next_panel(1)")
FORM_KEYS = screen_keys("start open search more copy reset app.command")


def make_bindings(keys: Sequence[Key]) -> list[Binding]:
    """Return Textual bindings for the keys, hidden because the footer is our own widget."""
    return [Binding(key.key, key.action, key.title, show=False) for key in keys]
