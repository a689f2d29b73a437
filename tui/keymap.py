"""The key bindings of every screen, in one table that feeds the footer, the help and the command palette."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider


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
    """One row of the table: keys of a screen with one effect.

    `key` is a Textual key name, several separated by commas, or empty. `action` is a method `action_…` of the screen,
    or of the app if prefixed with `app.`. A narrow footer shows the highest `priority` first; priority 0 is only in the
    help. `needs` is what the runs of the screen must be able to.
    """

    key: str
    title: str
    help: str
    action: str
    priority: int = 1
    needs: Ability = Ability.WATCH

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

    @property
    def palette_label(self) -> str:
        return f"{self.title}  ({self.key_label})" if self.key else self.title


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
    "shift+up": "⇧↑",
    "shift+down": "⇧↓",
    "ctrl+c": "^c",
    "ctrl+d": "^d",
    "ctrl+u": "^u",
    "ctrl+k": "^k",
    "ctrl+f": "^f",
    "ctrl+p": "^p",
    "ctrl+s": "^s",
    "ctrl+r": "^r",
    "ctrl+y": "^y",
    "ctrl+o": "^o",
}

GLOBAL_KEYS = (
    Key("question_mark,f1", "help", "Show all keys of this screen.", "app.help", 8),
    Key("t", "theme", "Switch between the dark, the light and the terminal's own colors.", "app.next_theme", 1),
    Key("ctrl+p", "commands", "Search the commands of this screen.", "app.command_palette", 2),
    Key("q", "quit", "Quit. Runs continue.", "app.quit", 7),
)
# For screens with text fields, where letters are input.
TYPING_GLOBAL_KEYS = (
    Key("f1", "help", "Show all keys of this screen.", "app.help", 8),
    Key("ctrl+p", "commands", "Search the commands of this screen.", "app.command_palette", 2),
    Key("ctrl+c", "quit", "Quit. Runs continue.", "app.quit", 7),
)
# In the palette of every screen, without a key.
PALETTE_KEYS = (
    Key("", "theme", "Switch between the dark, the light and the terminal's own colors.", "app.next_theme", 0),
)
# Keys of `tui.widgets.lines`, for the help only.
LIST_KEYS = (
    Key("j,k", "move", "Move by one line, as the arrow keys do.", "", 0),
    Key("ctrl+d,ctrl+u", "page", "Move by half a page; page down and page up by a page.", "", 0),
    Key("g,G", "first, last", "Move to the first or the last line, as home and end do.", "", 0),
)
BACK_KEY = Key("escape", "back", "Return to the previous screen; runs continue.", "back", 8)

MONITOR_KEYS = (
    Key("space", "pick", "Pick this GPU for the next run, or mark this run; again, undo that.", "pick", 9),
    Key("n", "new run", "Configure and start a new run.", "app.new_run", 9),
    Key("enter", "open", "Open the GPU, the run, or what the process under the cursor writes.", "open", 6),
    Key("r", "runs", "List all runs with their results.", "app.runs", 5),
    Key("w", "watched", "Show what gputrain watch watches: runs of other programs, or a process.", "app.watched", 6),
    Key("Q", "queue", "Show the runs that wait for GPUs, and change the order of yours.", "app.queue", 2),
    Key("ctrl+k", "signal", "Send a signal to the process under the cursor.", "signal", 6),
    Key("slash", "filter", "Show only processes and runs that contain this text.", "filter", 3),
    Key("escape", "clear filter", "Show all processes and runs.", "back", 0),
    Key("tab", "next panel", "Focus the next panel.", "app.focus_next", 2),
)
GPU_KEYS = (
    Key("left,left_square_bracket", "previous", "Show the previous GPU.", "gpu(-1)", 6),
    Key("right,right_square_bracket", "next", "Show the next GPU.", "gpu(1)", 7),
    Key("space", "pick", "Pick this GPU for the next run, or unpick it.", "pick", 9),
    Key("n", "new run", "Configure and start a new run.", "app.new_run", 6),
    Key("enter", "open run", "Open the run that the process under the cursor writes.", "open", 5),
    Key("ctrl+k", "signal", "Send a signal to the process under the cursor.", "signal", 4),
    Key("tab", "next panel", "Focus the next panel.", "app.focus_next", 0),
    BACK_KEY,
)
CHANGE = Ability.CHANGE
RUNS_KEYS = (
    Key("enter", "open", "Open this run, live or finished.", "open", 9),
    Key("space", "mark", "Mark this run, or unmark it. Marks stay until the program ends.", "mark", 9),
    Key("M", "mark all", "Mark all runs that the filter shows, or unmark them if all are marked.", "mark_all", 1),
    Key("c", "compare", "Compare the curves and configs of the marked runs.", "compare", 8),
    Key("slash", "filter", "Filter: failed lr>0.1 optim.name=adamw -tag=old. Also != ~ and *.", "filter", 6),
    Key("o", "order", "Sort by another column; the same column again turns the order around.", "order", 6),
    Key("s", "stop", "Stop this run at its next step and save a checkpoint.", "stop", 7, CHANGE),
    Key("u", "resume", "Resume this run from its last checkpoint.", "resume", 7, CHANGE),
    Key("a", "again", "Configure a new run with the config of this one.", "again", 5, CHANGE),
    Key("n", "new run", "Configure and start a new run.", "app.new_run", 4, CHANGE),
    Key("S", "sweep", "Open the sweep that this run is a trial of, else the latest sweep.", "sweep", 4, CHANGE),
    Key(
        "Q", "queue", "Show the runs that wait for GPUs, and change the order of yours.", "app.queue", 2, Ability.CHANGE
    ),
    Key(
        "A",
        "archive",
        "Archive the marked runs, else this one, or restore them from the archive.",
        "archive",
        3,
        Ability.CHANGE,
    ),
    Key("H", "archived", "Show or hide archived runs.", "archived", 2, CHANGE),
    Key("D,delete", "delete", "Move the marked runs, else this one, to the trash.", "delete", 3, CHANGE),
    BACK_KEY,
)
_CHANGES = ("stop", "resume", "again", "archive", "delete")
# Refused for runs of other programs, with the reason.
CHANGE_KEYS = tuple(key for key in RUNS_KEYS if key.action in _CHANGES)
PROCESS_KEYS = (
    Key("enter", "open", "Open the run under the cursor, which this process writes.", "open", 9),
    Key("tab", "next panel", "Focus the next panel.", "app.focus_next", 5),
    BACK_KEY,
)
SWEEP_KEYS = (
    Key("enter", "open", "Open the run of this trial.", "open", 9),
    Key("s", "stop", "Stop the sweep; its trials save a checkpoint.", "stop", 7),
    BACK_KEY,
)
QUEUE_KEYS = (
    Key("enter", "open", "Open this run.", "open", 6),
    Key("h", "hold", "Keep this run from starting, or let it start again.", "hold", 9),
    Key("K,shift+up", "move up", "Start this run before the one of yours above it.", "shift(-1)", 9),
    Key("J,shift+down", "move down", "Start this run after the one of yours below it.", "shift(1)", 9),
    Key("s", "cancel", "Remove this run from the queue; its folder stays.", "cancel", 8),
    Key("u", "resume", "Start the interrupted runs again, in their old order.", "resume", 9),
    Key("n", "new run", "Configure and start a new run.", "app.new_run", 3),
    BACK_KEY,
)
X_RANGE_KEYS = (
    Key("plus,equals_sign", "zoom in", "Show half the x range.", "zoom(0.5)", 3),
    Key("minus", "zoom out", "Show twice the x range.", "zoom(2.0)", 2),
    Key("0", "all", "Show the whole x range.", "zoom_all", 1),
    Key("left", "cursor left", "Move the cursor that reads values to the left.", "cursor(-1)", 0),
    Key("right", "cursor right", "Move the cursor that reads values to the right.", "cursor(1)", 0),
    Key("comma,shift+left", "pan left", "Pan toward the start.", "pan(-0.25)", 0),
    Key("full_stop,shift+right", "pan right", "Pan toward the end.", "pan(0.25)", 0),
)
TRAIN, COMMAND, CHOOSE = Ability.TRAIN, Ability.COMMAND, Ability.CHOOSE
RUN_KEYS = (
    Key("s", "stop", "Stop at the next step and save a checkpoint.", "stop", 9, TRAIN),
    Key("s", "stop", "Stop the command with its stop signal, then SIGTERM, then SIGKILL.", "stop", 9, COMMAND),
    Key("C", "checkpoint", "Save a checkpoint at the next step.", "checkpoint", 6, TRAIN),
    Key("p", "pause", "Pause at the next step, or continue.", "pause", 7, TRAIN),
    Key("u", "resume", "Resume an ended run from its last checkpoint.", "resume", 9, TRAIN),
    Key("u", "resume", "Start the command of an ended run again.", "resume", 9, COMMAND),
    Key("a", "again", "Configure a new run with the config of this one.", "again", 2, TRAIN),
    Key("a", "again", "Start this command again as a new run, with changes.", "again", 2, COMMAND),
    Key("c", "charts", "Choose the charts.", "charts", 9, CHOOSE),
    Key("x", "x axis", "Plot over epochs, steps, images or hours, as far as the run has them.", "x_axis", 5),
    Key("m", "smooth", "Cycle curve smoothing: light, strong, off.", "smooth", 5),
    Key("L", "log scale", "Toggle the log scale of all charts but accuracies.", "log_scale", 4),
    *X_RANGE_KEYS,
    Key("v", "confusion", "Show the confusion matrix and per-class accuracy.", "confusion", 4, TRAIN),
    Key(
        "P", "profile", "Measure where the time of training steps goes, or show the latest profile.", "profile", 3,
        TRAIN,
    ),
    Key("f", "full", "Toggle full screen for the focused chart.", "full", 4),
    Key("tab", "next panel", "Focus the next panel. Charts that share a place take turns.", "next_panel(1)"),
    Key("d", "config", "Show the config of this run.", "config", 2, TRAIN),
    Key("d", "parameters", "Show the parameters of this run, and its command.", "parameters", 6, CHOOSE),
    Key("i", "metrics", "Show how the output is read; rename or hide a metric, or plot over it.", "metrics", 3, CHOOSE),
    Key("p", "processes", "Show the processes of the command, and what they use.", "processes", 6, COMMAND),
    Key("l", "log", "Show the end of the log with full lines.", "log", 4),
    Key("A", "archive", "Archive this run, or restore it from the archive.", "archive", 2, CHANGE),
    BACK_KEY,
)  # fmt: skip
PROFILE_KEYS = (
    Key("P", "profile again", "Profile ten more training steps of this run.", "profile", 9),
    BACK_KEY,
)
COMPARE_KEYS = (
    Key("enter", "open", "Open the run under the cursor.", "open", 4),
    Key("c", "charts", "Choose the charts, among the metrics of runs of other programs.", "charts", 7),
    Key("x", "x axis", "Plot over epochs, steps, images or hours.", "x_axis", 6),
    Key("m", "smooth", "Cycle curve smoothing: light, strong, off.", "smooth", 5),
    Key("L", "log scale", "Toggle the log scale of all charts but the accuracy.", "log_scale", 4),
    *X_RANGE_KEYS,
    Key("f", "full", "Toggle full screen for the focused panel.", "full", 5),
    Key("tab", "next panel", "Focus the next panel. Charts that share a place take turns.", "next_panel(1)", 3),
    BACK_KEY,
)
CONFUSION_KEYS = (
    Key("b", "best/last", "Switch between the best and the last epoch.", "other_epoch", 9),
    Key("o", "order", "Sort classes by index or by accuracy, worst first.", "order", 7),
    Key("enter", "images", "Show the images of this cell; in a list, select it in the matrix.", "images", 9),
    Key("tab", "next panel", "Focus the next panel.", "app.focus_next", 5),
    BACK_KEY,
)
MISTAKES_KEYS = (
    Key("left,left_square_bracket", "previous", "Show the previous list.", "list(-1)", 7),
    Key("right,right_square_bracket,tab", "next list", "Show the next list.", "list(1)", 9),
    Key("ctrl+y", "copy path", "Copy the path of this image.", "copy", 6),
    BACK_KEY,
)
FORM_KEYS = (
    Key("ctrl+s", "start", "Validate the config and start the run.", "start", 9),
    Key("enter", "choose", "List the choices of this field, or go to the next field.", "choose", 7),
    Key("ctrl+f,slash", "search", "Search all fields.", "search", 5),
    Key("ctrl+o", "more", "Show all fields, or only the common ones.", "more", 6),
    Key("f2", "command", "Run a command, such as python train.py, in place of a config.", "app.command", 2),
    Key("ctrl+y", "copy command", "Copy the command that starts this run.", "copy", 4),
    Key("ctrl+r", "defaults", "Reset all fields to their defaults; again, undo that.", "reset", 3),
    BACK_KEY,
)
STARTING_KEYS = (Key("s", "stop", "Stop the run before training begins.", "stop", 9), BACK_KEY)


def make_bindings(keys: Sequence[Key]) -> list[Binding]:
    """Return Textual bindings for the keys, hidden because the footer is our own widget."""
    return [Binding(key.key, key.action, key.title, show=False) for key in keys]


class KeyProvider(Provider):
    """Command palette with the commands of the current screen."""

    def _keys(self) -> list[Key]:
        """Return the keys of the screen, then the rows without a key that it does not have with one."""
        keys = list(getattr(self.screen, "key_table", GLOBAL_KEYS))
        actions = {key.action for key in keys}
        return keys + [key for key in PALETTE_KEYS if key.action not in actions]

    async def discover(self) -> Hits:
        for key in self._keys():
            run = partial(self.screen.run_action, key.action)
            yield DiscoveryHit(key.palette_label, run, help=key.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for key in self._keys():
            score = max(matcher.match(key.title), matcher.match(key.help))
            if score > 0:
                run = partial(self.screen.run_action, key.action)
                yield Hit(score, key.palette_label, run, help=key.help)
