"""Every command of every screen, once: its key, its name, what it does. Footer, help and palette are made of this
table, so that they cannot drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider


@dataclass(frozen=True)
class Command:
    """`key` is as Textual names it; `action` is a method `action_…` of the screen, or of the app with `app.` before it.
    Those with a higher `priority` are shown first where the footer is narrow; with 0 only in the help."""

    key: str
    title: str
    help: str
    action: str
    priority: int = 1

    @property
    def keys(self) -> list[str]:
        return self.key.split(",")

    @property
    def key_label(self) -> str:
        return KEY_LABELS.get(self.keys[0], self.keys[0])


KEY_LABELS = {
    "slash": "/",
    "question_mark": "?",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "comma": ",",
    "full_stop": ".",
    "left": "←",
    "right": "→",
    "escape": "esc",
    "f1": "F1",
    "ctrl+c": "^c",
    "ctrl+f": "^f",
    "ctrl+p": "^p",
    "ctrl+s": "^s",
    "ctrl+r": "^r",
    "ctrl+y": "^y",
    "ctrl+t": "^t",
    "ctrl+o": "^o",
}

GLOBAL_COMMANDS = (
    Command("question_mark,f1", "help", "Every key of this screen, with what it does.", "app.help", 8),
    Command("ctrl+p", "commands", "Find a command by typing.", "app.command_palette", 2),
    Command("q", "quit", "Leave. Runs go on.", "app.quit", 7),
)
# The same where letters are typed into fields.
TYPING_GLOBAL_COMMANDS = (
    Command("f1", "help", "Every key of this screen, with what it does.", "app.help", 8),
    Command("ctrl+p", "commands", "Find a command by typing.", "app.command_palette", 2),
    Command("ctrl+c", "quit", "Leave. Runs go on.", "app.quit", 7),
)
BACK_COMMAND = Command("escape", "back", "To the screen before; nothing is stopped.", "back", 8)

MONITOR_COMMANDS = (
    Command("space", "pick", "Pick this GPU for the next run, or put it back.", "pick", 9),
    Command("n", "new run", "Choose what to train, and start it.", "app.new_run", 9),
    Command("enter", "open", "Open the run under the cursor.", "open", 6),
    Command("r", "runs", "Every run, with its results.", "app.runs", 5),
    Command("k", "signal", "Send a signal to the process under the cursor.", "signal", 4),
    Command("slash", "filter", "Show only the processes and runs that hold this text.", "filter", 3),
    Command("escape", "no filter", "Show all processes and runs again.", "back", 0),
    Command("tab", "next panel", "Go to the next panel.", "app.focus_next", 0),
)
RUNS_COMMANDS = (
    Command("enter", "open", "Watch this run, live or finished.", "open", 9),
    Command("slash", "filter", "Show only the runs that hold what is typed.", "filter", 6),
    Command("s", "stop", "Stop this run at its next step, with a checkpoint.", "stop", 7),
    Command("u", "resume", "Go on with this run from its last checkpoint.", "resume", 7),
    Command("a", "again", "Start a run like this one, with changes.", "again", 5),
    Command("n", "new run", "Choose what to train, and start it.", "app.new_run", 4),
    BACK_COMMAND,
)
RUN_COMMANDS = (
    Command("s", "stop", "Stop at the next step, with a checkpoint.", "stop", 9),
    Command("c", "checkpoint", "Save a checkpoint at the next step, and go on.", "checkpoint", 6),
    Command("p", "pause", "Hold at the next step, or go on again.", "pause", 7),
    Command("u", "resume", "Go on from the last checkpoint of a run that is over.", "resume", 3),
    Command("a", "again", "Start a run like this one, with changes.", "again", 2),
    Command("x", "x axis", "Draw over epochs, steps or hours.", "x_axis", 5),
    Command("m", "smooth", "Smooth the curves: a little, much, not at all.", "smooth", 5),
    Command("g", "log", "Loss and learning rate on a logarithmic scale.", "log_scale", 4),
    Command("plus,equals_sign", "zoom in", "See half as much of the x axis.", "zoom(0.5)", 3),
    Command("minus", "zoom out", "See twice as much of the x axis.", "zoom(2.0)", 2),
    Command("0", "all", "See the whole run again.", "zoom_all", 1),
    Command("left", "cursor back", "Move the cursor that reads the values.", "cursor(-1)", 0),
    Command("right", "cursor on", "Move the cursor that reads the values.", "cursor(1)", 0),
    Command("comma,shift+left", "pan back", "Move what is seen towards the start.", "pan(-0.25)", 0),
    Command("full_stop,shift+right", "pan on", "Move what is seen towards the end.", "pan(0.25)", 0),
    Command("v", "confusion", "Which class is taken for which, and the accuracy of each.", "confusion", 4),
    Command("f", "full", "The focused chart fills the screen, or not.", "full", 1),
    Command("e", "export", "Save the focused chart as SVG, its data as CSV.", "export", 3),
    Command("d", "config", "The config that this run was started with.", "config", 2),
    Command("l", "log", "The last lines of the log, whole.", "log", 1),
    BACK_COMMAND,
)
CONFUSION_COMMANDS = (
    Command("b", "best/last", "Show the best epoch, or the last.", "other_epoch", 9),
    Command("o", "order", "Classes in the order of their numbers, or the worst first.", "order", 7),
    Command("enter", "find", "Show this mistake, or this class, in the matrix.", "find", 6),
    Command("tab", "next panel", "Go to the next panel.", "app.focus_next", 5),
    BACK_COMMAND,
)
FORM_COMMANDS = (
    Command("ctrl+s", "start", "Check everything, and start the run.", "start", 9),
    Command("ctrl+f,slash", "search", "Show only the fields that hold this text, of all there are.", "search", 5),
    Command("ctrl+o", "more", "Show every field, or only those that are changed most.", "more", 6),
    Command("ctrl+t", "save preset", "Save these choices as a preset.", "save_preset", 4),
    Command("ctrl+y", "copy command", "Copy the command that starts the same run.", "copy", 4),
    Command("ctrl+r", "defaults", "Forget every change.", "reset", 3),
    BACK_COMMAND,
)
STARTING_COMMANDS = (Command("s", "stop", "Ask the run to end before it has begun.", "stop", 9), BACK_COMMAND)


def make_bindings(commands: Sequence[Command]) -> list[Binding]:
    return [Binding(command.key, command.action, command.title, show=False) for command in commands]


class CommandProvider(Provider):
    """The palette: the commands of the screen that it is opened over."""

    def _commands(self) -> list[Command]:
        return list(getattr(self.screen, "COMMAND_TABLE", GLOBAL_COMMANDS))

    async def discover(self) -> Hits:
        for command in self._commands():
            run = partial(self.screen.run_action, command.action)
            yield DiscoveryHit(f"{command.title}  ({command.key_label})", run, help=command.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._commands():
            score = max(matcher.match(command.title), matcher.match(command.help))
            if score > 0:
                run = partial(self.screen.run_action, command.action)
                yield Hit(score, f"{command.title}  ({command.key_label})", run, help=command.help)
