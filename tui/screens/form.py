"""The form for a new run: one field per config key, beside the learning rate curve, the plan and the command.

`tui.form.model` holds the values, `tui.form.checks` checks them against this host.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import Input, Select, Static

from engine.config.loader import presets
from engine.config.schema import Config
from engine.runs.folder import runs_root
from engine.utils.errors import Problem, UsageError
from engine.utils.text import pluralize, printable
from tui.charts.axis import Series
from tui.charts.plot import Curve, PlotWindow
from tui.charts.view import LR_STYLE
from tui.form.checks import FormChecker, FormCheckResult
from tui.form.model import (
    Form,
    form_fields,
    form_from_run,
    form_problems,
    is_relevant,
    load_last_form,
    lr_curve,
    optimizer_placeholders,
    save_last_form,
    valid_config,
)
from tui.keymap import FORM_COMMANDS, TYPING_GLOBAL_COMMANDS, Command
from tui.palette import BAD, MUTED, WARNING
from tui.screens.base import AppServices, Filter, GputrainScreen
from tui.screens.dialogs import MultiChoiceDialog, TextDialog, TextInputDialog, problem_lines
from tui.text.gpus import gpu_lines
from tui.text.tables import UNKNOWN
from tui.widgets.chart import Chart
from tui.widgets.field import Chooser, Field
from tui.widgets.lines import Row

# For the learning rate curve while the number of images is unknown.
ASSUMED_STEPS_PER_EPOCH = 100
MAX_LR_CURVE_POINTS = 1000
NO_PRESET = "(none)"


class FormScreen(GputrainScreen):
    """The form for a new run. Every change is validated immediately; checks of this host run in a worker thread."""

    CSS_PATH = "form.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = FORM_COMMANDS
    SHARED_COMMANDS: ClassVar[Sequence[Command]] = TYPING_GLOBAL_COMMANDS
    AUTO_FOCUS = "#preset"

    def __init__(self, app: AppServices, run_config: Path | None = None) -> None:
        """Start from the config of an existing run (`run_config`), or from the last submitted form."""
        super().__init__(app)
        self._run_config = run_config
        self.form = Form()
        self._fields = form_fields()
        self._show_all = False
        self._checker = FormChecker(self.gputrain_app.runs_dir)
        self._check_result: FormCheckResult | None = None
        self._problems: list[Problem] = []
        self._gpus_pending = self._are_gpus_pending()

    def compose_body(self) -> ComposeResult:
        if self._run_config is not None:
            self.form = form_from_run(self._run_config)
        else:
            # The demo always shows the same form.
            self.form = load_last_form() if self.gputrain_app.demo_notice is None else Form("digits")
        self._apply_picked_gpus()
        values = self.form.values()
        with Container(id="form"):
            with Vertical(id="left"):
                yield Filter("search", "Search all fields; enter goes to the matches, esc clears")
                with VerticalScroll(id="fields", can_focus=False):
                    with Container(classes="line preset"):
                        yield Static("preset", classes="key")
                        yield Chooser(
                            self._presets(),
                            value=self.form.base or NO_PRESET,
                            allow_blank=False,
                            compact=True,
                            id="preset",
                        )
                        yield Static("Initial values of all fields.", classes="description")
                    for info in self._fields:
                        if info.is_main:
                            yield Field(info, values[info.key])
                yield Static("", id="about", markup=False)
            with Container(id="sidebar"):
                yield Chart("Learning rate", "form-lr")
                with Vertical(id="summary"):
                    yield Static("", id="plan", markup=False)
                    command = Static("", id="command", markup=False)
                    command.border_title = "Equivalent command"
                    yield command

    def _presets(self) -> list[tuple[Text, str]]:
        names = [NO_PRESET, *presets()]
        base = self.form.base
        if base is not None and base not in names:
            names.append(base)
        return [(Text(printable(Path(name).parent.name if "/" in name else name)), name) for name in names]

    def _apply_picked_gpus(self) -> None:
        """Set `device.gpus` to the GPUs picked on the monitor screen."""
        snapshot, picked = self.gputrain_app.gpu_poller.snapshot, self.gputrain_app.picked_gpu_uuids
        if snapshot is not None and picked:
            indices = [str(gpu.index) for gpu in snapshot.gpus if gpu.uuid in picked]
            self.form.set_value("device.gpus", ",".join(indices))

    def on_mount(self) -> None:
        self.query_one("#plan").border_title = "Plan"
        self._show_fields()
        self._validate_form()

    def on_unmount(self) -> None:
        self._checker.cancel()

    def _are_gpus_pending(self) -> bool | None:
        """Whether a GPU has not answered yet; None before the first snapshot."""
        snapshot = self.gputrain_app.gpu_poller.snapshot
        return None if snapshot is None else snapshot.pending

    def update_content(self) -> None:
        if (pending := self._are_gpus_pending()) != self._gpus_pending:
            self._gpus_pending = pending
            self._validate_form()
        wrong = len(self._all_problems())
        ready = "ready to start " if self._check_result is not None else "checking … "
        right = f"{pluralize(wrong, 'error')} to fix " if wrong else ready
        self.show_title("new run", right)

    def _show_fields(self) -> None:
        """Show the fields that match the search or, without one, that take effect with the current values."""
        values, query = self.form.values(), self.query_one("#search", Input).value.strip().lower()
        snapshot = self.gputrain_app.gpu_poller.snapshot
        no_gpu = snapshot is None or not snapshot.gpus
        self.query_one(".preset").display = not query
        placeholders = optimizer_placeholders(values)
        for field in self.query(Field):
            key = field.info.key
            if field.is_mounted:
                field.set_placeholder(placeholders.get(key, ""))
            if query:
                field.display = query in key or query in field.info.description.lower()
            else:
                shown = field.info.is_main or self._show_all or key in self.form.overrides or field.has_class("-wrong")
                ranks_apply = key != "device.ranks" or no_gpu or values["device.gpus"] == "cpu"
                field.display = shown and ranks_apply and is_relevant(key, values)

    def _show_values(self) -> None:
        """Copy the form's values to the fields, then validate."""
        values = self.form.values()
        for field in self.query(Field):
            field.set_value(values[field.info.key])
        self._show_fields()
        self._validate_form()

    async def _mount_all_fields(self) -> None:
        if len(self.query(Field)) < len(self._fields):
            values = self.form.values()
            others = [Field(info, values[info.key]) for info in self._fields if not info.is_main]
            await self.query_one("#fields").mount(*others)

    def on_field_typed(self, event: Field.Typed) -> None:
        self.form.set_value(event.key, event.text)
        self._show_fields()
        self._validate_form()

    def on_field_entered(self, event: Field.Entered) -> None:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        if event.key == "device.gpus" and snapshot is not None and snapshot.gpus:
            self._pick_gpus()
        else:
            self.focus_next()

    def on_field_other(self, event: Field.Other) -> None:
        info = event.info

        def answer(text: str | None) -> None:
            if text:
                self.form.set_value(info.key, text)
                self._show_values()

        self.app.push_screen(TextInputDialog(info.key, "", info.description), answer)

    def _pick_gpus(self) -> None:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        if snapshot is None:
            return
        lines = gpu_lines(snapshot, 70)[1:]
        rows = [Row(str(gpu.index), line) for gpu, line in zip(snapshot.gpus, lines, strict=True)]
        selected = self.form.values()["device.gpus"].split(",")

        def answer(picked: list[str] | None) -> None:
            if picked is not None:
                self.form.set_value("device.gpus", ",".join(picked) or "cpu")
                self._show_values()

        self.app.push_screen(MultiChoiceDialog("GPUs to train on", rows, selected), answer)

    @on(Select.Changed, "#preset")
    def _apply_preset(self, event: Select.Changed) -> None:
        base = None if event.value == NO_PRESET else str(event.value)
        if base != self.form.base:
            kept = {key: text for key, text in self.form.overrides.items() if key == "device.gpus"}
            self.form = Form(base, kept)
            self._show_values()

    @on(Input.Changed, "#search")
    def _apply_search(self) -> None:
        self._show_fields()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        field = next((widget for widget in event.widget.ancestors_with_self if isinstance(widget, Field)), None)
        about = Text()
        if field is not None:
            about.append(field.info.key, "bold")
            about.append(f"  {field.info.description}")
            if field.info.choices:
                about.append(f"  Press enter for {pluralize(len(field.info.choices), 'choice')}.", MUTED)
            elif field.info.key == "device.gpus":
                about.append("  Press enter to pick from a list.", MUTED)
        self.query_one("#about", Static).update(about)
        super().on_descendant_focus(event)

    def key_down(self) -> None:
        self.focus_next()

    def key_up(self) -> None:
        self.focus_previous()

    # Validation and plan

    def _validate_form(self) -> None:
        self._problems = form_problems(self.form)
        self._check_result = None
        self._mark_problems()
        config = valid_config(self.form)
        self._show_plan(None if self._problems else config)
        if config is not None:
            self._run_machine_checks(self._checker.begin(config), config, self._problems)

    @work(thread=True, exclusive=True, group="checks", exit_on_error=False)
    def _run_machine_checks(self, canceled: threading.Event, config: Config, problems: list[Problem]) -> None:
        try:
            checked = self._checker.check(canceled, config, self.gputrain_app.gpu_poller.snapshot, problems)
            if checked is None:
                return
            self._show_check_result(canceled, config, checked)
            if not checked.problems:
                model_problems = self._checker.check_model(canceled, config, on_gpu=checked.on_gpus is not False)
                self._show_check_result(canceled, config, replace(checked, problems=model_problems))
        except Exception as error:
            # A fault of the host, such as a broken mount, must not crash the screen.
            all_problems = [*problems, Problem("", f"checking this host failed: {error}")]
            self._show_check_result(canceled, config, FormCheckResult(problems=all_problems))

    def _show_check_result(self, canceled: threading.Event, config: Config, result: FormCheckResult) -> None:
        if self.is_attached:
            self.app.call_from_thread(self._apply_check_result, canceled, config, result)

    def _apply_check_result(self, canceled: threading.Event, config: Config, result: FormCheckResult) -> None:
        if not self.is_attached or canceled.is_set() or config != valid_config(self.form):
            return
        self._check_result = result
        self._mark_problems()
        self._show_plan(None if self._problems else config)

    def _all_problems(self) -> list[Problem]:
        return self._problems if self._check_result is None else self._check_result.problems

    def _mark_problems(self) -> None:
        messages: dict[str, str] = {}
        for problem in self._all_problems():
            messages.setdefault(problem.location, problem.message)
        for field in self.query(Field):
            field.show_error(printable(messages.get(field.info.key, "")))
        self.update_content()

    def _show_plan(self, config: Config | None) -> None:
        chart, checked = self.query_one("#form-lr", Chart), self._check_result
        keys = {info.key for info in self._fields}
        other_problems = [str(problem) for problem in self._all_problems() if problem.location not in keys]
        if config is None or other_problems:
            chart.draw([], PlotWindow(0.0, 1.0))
            message = Text("Fix all errors to see the plan", MUTED)
            if other_problems:
                message = Text(printable("\n".join(other_problems)), BAD)
            self.query_one("#plan", Static).update(message)
            self.query_one("#command", Static).update(Text(UNKNOWN, MUTED))
            return
        steps = checked.sampler.steps_per_epoch if checked and checked.sampler else ASSUMED_STEPS_PER_EPOCH
        if steps > 0:
            x, y = lr_curve(config, checked.total_ranks if checked else config.device.ranks, steps, MAX_LR_CURVE_POINTS)
            chart.draw(
                [Curve("", Series(x, y), "braille", LR_STYLE)], PlotWindow(0.0, float(config.run.epochs)), "epoch"
            )
        self.query_one("#plan", Static).update(plan_text(config, checked))
        self.query_one("#command", Static).update(Text(printable(self._shell_command())))

    def _command_arguments(self) -> list[str]:
        arguments = self.form.arguments()
        root = self.gputrain_app.runs_dir
        try:
            is_default = root.absolute() == runs_root()
        except UsageError:
            is_default = False
        return arguments if is_default else [*arguments, "--runs-dir", str(root)]

    def _shell_command(self) -> str:
        return shlex.join(["gputrain", *self._command_arguments()])

    def action_start(self) -> None:
        self._problems = form_problems(self.form)
        if problems := self._all_problems():
            self._mark_problems()
            lines = problem_lines([(problem.label, printable(problem.message)) for problem in problems])
            wrapped = [part for line in lines for part in line.wrap(self.app.console, 100)]
            self.app.push_screen(TextDialog(f"Not started: {pluralize(len(problems), 'error')} to fix", wrapped))
            return
        if self.gputrain_app.launch([*self._command_arguments(), "--headless"]):
            save_last_form(self.form)

    async def action_search(self) -> None:
        # Focus the search line first: keys typed while the fields are mounted belong to it.
        self.query_one("#search", Filter).activate()
        await self._mount_all_fields()
        self._show_fields()

    async def action_more(self) -> None:
        await self._mount_all_fields()
        self._show_all = not self._show_all
        self._show_fields()
        self._mark_problems()

    def action_reset(self) -> None:
        self.query_one("#search", Filter).action_dismiss()
        self.form = Form(self.form.base)
        self._show_values()

    def action_copy(self) -> None:
        if self._problems:
            self.gputrain_app.show_toast("Fix the errors first; the command needs a valid config", warning=True)
            return
        self.app.copy_to_clipboard(self._shell_command())
        self.gputrain_app.show_toast("Copied to the clipboard")

    def action_save_preset(self) -> None:
        def answer(name: str | None) -> None:
            if name is None:
                return
            try:
                path = self.form.save_preset(name)
            except UsageError as error:
                self.gputrain_app.show_toast(str(error), warning=True)
                return
            reference = path.stem if presets().get(path.stem) == path else shlex.quote(str(path))
            self.gputrain_app.show_toast(f"Saved as {path}. Start it with `gputrain run {reference}`.", timeout_s=8)

        note = "A name for `gputrain run NAME`, or the path of a YAML file."
        self.app.push_screen(TextInputDialog("Save as preset", "", note), answer)


def plan_text(config: Config, result: FormCheckResult | None) -> Text:
    """Summarize the run: devices, global batch size, steps and images."""
    if result is None:
        return Text("Checking this host …", MUTED)
    # In a terminal of 80 columns, the panel has 38 per line.
    devices = pluralize(result.total_ranks, {True: "GPU", False: "CPU rank", None: "rank"}[result.on_gpus])
    global_batch = "auto"
    if config.data.batch_size != "auto":
        global_batch = str(result.total_ranks * config.data.numeric_batch_size * config.optim.accumulate)
    lines = [f"{devices}, global batch size {global_batch}"]
    if result.sampler is not None:
        sampler = result.sampler
        steps = sampler.steps_per_epoch
        lines.append(f"{pluralize(steps, 'step')} per epoch, {steps * config.run.epochs:,} total")
        lines.append(f"{sampler.train_images:,} train, {sampler.val_images:,} val images")
    elif not result.problems:
        lines.append("Counting images …")
    style = BAD if result.problems else ""
    plan = Text(lines[0], style)
    if result.cpu_fallback:
        # Before the rest, which does not fit into a narrow panel.
        plan.append(f"\n{printable(result.cpu_fallback)}", WARNING)
    return plan.append("".join(f"\n{line}" for line in lines[1:]), style)
