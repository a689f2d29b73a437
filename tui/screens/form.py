"""The form for a new run: its fields in sections, beside the plan and the command.

`tui.form` holds the values, describes the fields and checks them against this host. A key only changes the values and
the lines that show them; validation and plan follow when no key has been pressed for `CHECK_DELAY_SECONDS`.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.containers import Container
from textual.timer import Timer

from engine.base.errors import Problem, UsageError
from engine.base.text import pluralize, printable
from engine.base.units import UNKNOWN
from engine.config.schema import Config, as_dict
from engine.config.settings import read_settings
from engine.jobs.launch.preflight_process import PreflightResult
from engine.runs.batch.states import found_engines
from engine.runs.run_config import changed_values
from tui.form.checks import FormChecker, FormCheckResult
from tui.form.fields import (
    HOST_KEY,
    NO_PRESET,
    PRESET_KEY,
    THIS_HOST,
    ConfigField,
    form_sections,
    help_text,
    host_field,
    preset_field,
)
from tui.form.model import Form, form_from_run, load_last_form, next_run_name, save_last_form, validate_form
from tui.form.plan import check_title, field_facts, form_title, gpu_use, plan_text
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import (
    TextDialog,
    ask_to_share_gpus,
    confirm,
    problem_lines,
)
from tui.screens.form_rows import GPUS_KEY, KnownFacts, ask_gpus, field_rows, picked_gpus, preset_choices
from tui.screens.keymap import FORM_KEYS, TYPING_GLOBAL_KEYS, Key
from tui.screens.launcher import call_gputrain
from tui.screens.services import AppServices
from tui.screens.widgets.field_lines import FieldRow, Heading
from tui.screens.widgets.field_list import FieldList
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import MUTED

CHECK_DELAY_SECONDS = 0.3
# Below this share of the lines in use, the common fields leave so much room that all fields are shown.
FULL_LIST_SHARE = 0.75
TWO_COLUMNS_MIN_WIDTH = 76


class FormScreen(GputrainScreen):
    """The form for a new run, or for another run with the config of an existing one."""

    CSS_PATH = "form.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = FORM_KEYS
    SHARED_KEYS: ClassVar[Sequence[Key]] = TYPING_GLOBAL_KEYS
    AUTO_FOCUS = "#field-entry"

    def __init__(self, app: AppServices, run_config: Path | None = None) -> None:
        """Start from the config of an existing run (`run_config`), or from the form of the last run that began."""
        super().__init__(app)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (TWO_COLUMNS_MIN_WIDTH, "-wide")]
        self._run_config = run_config
        self._sections = form_sections()
        self.form = Form()
        self._saved = Form()
        """The form as it was opened or started, without which changes would be lost."""
        self._show_all: bool | None = None
        """Whether all fields are shown; None to decide by the height of the screen."""
        self._shows_all = False
        self._checker = FormChecker(self.gputrain_app.runs_dir)
        self._check_timer: Timer | None = None
        self._config: Config | None = None
        """The valid part of the form at the last check, None if its base cannot be read."""
        self._problems: list[Problem] = []
        self._result: FormCheckResult | None = None
        """The latest answer of the host; it is that of the current values if `_is_checked`."""
        self._is_checked = False
        self._facts: dict[str, str] = {}
        self._host_field: ConfigField | None = None
        """Where the run starts; None if the settings name no hosts, and there is no batch system."""
        self._host = THIS_HOST
        self._gpu_use: object = None
        self._shown_check: object = None

    def compose_body(self) -> ComposeResult:
        if self._run_config is not None:
            self.form = form_from_run(self._run_config)
        else:
            # The demo always shows the same form.
            self.form = load_last_form() if self.gputrain_app.demo_notice is None else Form.new()
        self._is_draft = self._run_config is None and self.form != Form.new()
        if picked := picked_gpus(self.gputrain_app.gpu_poller.snapshot, self.gputrain_app.picked_gpu_uuids):
            self.form.set_value(GPUS_KEY, picked)
        with suppress(UsageError):
            hosts, engines = read_settings().hosts, found_engines()
            if (hosts or engines) and self.gputrain_app.demo_notice is None:
                self._host_field = host_field(hosts, engines)
        self._saved = self.form.copy()
        self._preset = preset_field(preset_choices(self.form.base))
        with Container(id="form"):
            yield FieldList(self.edit, self._show_rows, self._dialog_keys)
            with Container(id="sidebar"):
                for name, title in (("plan", "Plan"), ("command", "As a command")):
                    block = TextLine(id=name)
                    block.border_title = title
                    yield block
        yield TextLine(id="about")

    def on_mount(self) -> None:
        self._gpu_use = gpu_use(self.gputrain_app.gpu_poller.snapshot)
        self._show_rows()
        self._begin_check()

    def on_resize(self, event: events.Resize) -> None:
        # The widgets have their new sizes after the refresh.
        self.call_after_refresh(self._show_rows)

    def on_unmount(self) -> None:
        self._checker.cancel()

    @property
    def fields(self) -> FieldList:
        return self.query_one(FieldList)

    @property
    def _shows_draft(self) -> bool:
        """Whether the values are those of the last form, unchanged."""
        return self._is_draft and self.form == self._saved

    # Rows

    def _show_rows(self) -> None:
        """Show the fields that match the search or, without one, that take effect with the current values."""
        rows = self._rows(show_all=bool(self._show_all))
        self._shows_all = bool(self._show_all)
        if self._show_all is None and len(rows) < FULL_LIST_SHARE * (self.fields.size.height - 2):
            rows, self._shows_all = self._rows(show_all=True), True
        self.fields.set_title("Fields" if not self.fields.query_text else "Fields found")
        self.fields.show(rows)
        self._show_state()

    def _rows(self, *, show_all: bool) -> list[FieldRow | Heading]:
        errors: dict[str, str] = {}
        for problem in self._all_problems():
            errors.setdefault(problem.location, problem.message)
        snapshot, query = self.gputrain_app.gpu_poller.snapshot, self.fields.query_text.strip().lower()
        no_gpus = snapshot is None or not snapshot.gpus
        run_name = "" if self._result is None else self._result.run_name
        known = KnownFacts(errors, self._facts, run_name, no_gpus=no_gpus)
        rows: list[FieldRow | Heading] = []
        if not query:
            rows.append(FieldRow(self._preset, self.form.base or NO_PRESET))
            rows += [FieldRow(self._host_field, self._host)] if self._host_field is not None else []
        selected = "" if self.fields.selected is None else self.fields.selected.key
        return rows + field_rows(self._sections, self.form, known, query, show_all=show_all, selected_key=selected)

    def _show_state(self) -> None:
        """Show title, help and footer for the current values."""
        self.update_title()
        self._show_help()
        self.update_keys()

    def update_title(self) -> None:
        self.show_title(form_title(self.form, self._run_config, is_draft=self._shows_draft))
        state = check_title(len(self._all_problems()), is_checked=self._is_checked)
        self.query_one("#plan", TextLine).border_title = f"Plan  {state}"

    def _show_help(self) -> None:
        info, about = self.fields.selected, Text("Enter goes to the fields found, esc shows all.", MUTED)
        if info is not None:
            errors = [problem.message for problem in self._all_problems() if problem.location == info.key]
            about = help_text(info, errors[0] if errors else "")
        self.query_one("#about", TextLine).show(about)

    def update_content(self) -> None:
        if (use := gpu_use(self.gputrain_app.gpu_poller.snapshot)) != self._gpu_use:
            self._gpu_use = use
            self._begin_check()

    def is_available(self, action: str) -> bool:
        info = self.fields.selected
        available = {
            "open": info is not None and (bool(info.choices) or info.key in self._dialog_keys()),
            "copy": self._config is not None and not self._problems,
            "reset": bool(self.form.overrides) or self._shows_draft or self.form.is_reset,
        }
        return available.get(action, True)

    def title_of(self, key: Key) -> str:
        if key.action == "more" and self._shows_all:
            return "fewer"
        if key.action == "open":
            return "choose"
        return "errors" if key.action == "start" and self._all_problems() else super().title_of(key)

    # Values

    def edit(self, key: str, text: str) -> None:
        """Set the value of a field."""
        if key == PRESET_KEY:
            if text not in self._preset.choices:
                self._preset = preset_field(preset_choices(text))
            self.form = self.form.with_base(None if text == NO_PRESET else text)
        elif key == HOST_KEY:
            self._host = text
        else:
            self.form.set_value(key, text)
        self._is_checked = False
        self._show_rows()
        if self._check_timer is not None:
            self._check_timer.stop()
        self._check_timer = self.set_timer(CHECK_DELAY_SECONDS, self._begin_check)

    def _dialog_keys(self) -> tuple[str, ...]:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        return (GPUS_KEY,) if snapshot is not None and snapshot.gpus else ()

    def on_field_list_selected(self, event: FieldList.Selected) -> None:
        self._show_help()
        self.update_keys()

    def on_field_list_activated(self, event: FieldList.Activated) -> None:
        if (snapshot := self.gputrain_app.gpu_poller.snapshot) is not None:
            ask_gpus(self.app, snapshot, self.form.values()[GPUS_KEY], partial(self.edit, GPUS_KEY))

    # Validation and plan

    def _begin_check(self) -> None:
        """Validate the values, and check them against this host in a thread."""
        if self._check_timer is not None:
            self._check_timer.stop()
            self._check_timer = None
        config, self._problems = validate_form(self.form)
        self._config, self._is_checked = config, self._is_elsewhere
        if self._is_elsewhere:
            self._checker.cancel()
            self._result, self._facts = None, {}
        elif config is not None:
            self._run_machine_checks(self._checker.begin(config), self.form.copy(), config, self._problems)
        if self._problems or self._result is None:
            self._show_check()
        else:
            # The rest follows with the answer of the host, a moment later.
            self._show_command(self._shell_command())

    def validate_now(self) -> None:
        """Validate what was typed a moment ago, without waiting until the typing rests."""
        if self._check_timer is not None:
            self._begin_check()

    @work(thread=True, group="checks", exit_on_error=False)
    def _run_machine_checks(
        self, canceled: threading.Event, form: Form, config: Config, problems: list[Problem]
    ) -> None:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        try:
            checked = self._checker.check(
                canceled, config, snapshot, problems, typed=form.overrides, warnings=form.warnings()
            )
            if checked is None:
                return
            checked = replace(checked, run_name=next_run_name(form, config, self.gputrain_app.runs_dir))
            self._show_check_result(canceled, checked)
        except Exception as error:
            # A fault of the host, such as a broken mount, must not crash the screen.
            all_problems = [*problems, Problem("", f"checking this host failed: {error}", code="internal-error")]
            self._show_check_result(canceled, FormCheckResult(PreflightResult(problems=all_problems)))

    def _show_check_result(self, canceled: threading.Event, result: FormCheckResult) -> None:
        if self.is_attached:
            self.app.call_from_thread(self._apply_check_result, canceled, result)

    def _apply_check_result(self, canceled: threading.Event, result: FormCheckResult) -> None:
        # A key pressed since then starts a new check.
        if self.is_attached and not canceled.is_set() and self._check_timer is None:
            self._result, self._is_checked = result, True
            self._show_check()

    def _all_problems(self) -> list[Problem]:
        return self._result.problems if self._is_checked and self._result is not None else self._problems

    def _show_check(self) -> None:
        """Show what is known about the values: errors, facts, plan and command."""
        config, result, problems = self._config, self._result, self._all_problems()
        if config is not None and result is not None and self._is_checked:
            self._facts = field_facts(config, result)
        shown = (problems, self._facts, result and result.run_name)
        if shown != self._shown_check:
            self._shown_check = shown
            self._show_rows()
        else:
            self._show_state()
        if self._is_checked or problems or result is None:
            other_host = self._host if self._is_elsewhere else ""
            self.show_line("#plan", plan_text(config, problems, result if self._is_checked else None, other_host))
        self._show_command(None if self._problems else self._shell_command())

    def _show_command(self, command: str | None) -> None:
        """Show the command of a valid config, None if it is invalid."""
        self.show_line("#command", Text(UNKNOWN, MUTED) if command is None else Text(printable(command)))

    @property
    def _is_elsewhere(self) -> bool:
        return self._host != THIS_HOST

    def _command_arguments(self) -> list[str]:
        words = self.form.arguments_for(self._config or self.form.config(), self.gputrain_app.runs_dir)
        return [words[0], "--on", self._host, *words[1:]] if self._is_elsewhere else words

    def _shell_command(self) -> str:
        return shlex.join(["gputrain", *self._command_arguments()])

    # Actions

    def action_start(self) -> None:
        self.validate_now()
        if problems := self._all_problems():
            self.app.push_screen(problems_dialog(problems))
            return
        if self._is_elsewhere:
            self._start_elsewhere()
            return
        config = changed_values(as_dict(self._config or self.form.config()))
        ask_to_share_gpus(self.gputrain_app, config, self._start)

    def _start(self) -> None:
        started = self.form.copy()
        if self.gputrain_app.launch([*self._command_arguments(), "--headless"], begun=partial(save_last_form, started)):
            self._saved = started
            self.gputrain_app.picked_gpu_uuids.clear()

    def _start_elsewhere(self) -> None:
        started, words = self.form.copy(), self._command_arguments()

        def show(answer: str) -> None:
            self._saved = started
            save_last_form(started)
            self.gputrain_app.show_toast(f"Started {answer}")

        self.gputrain_app.show_toast(f"Starting on {self._host} …")
        start = partial(call_gputrain, words, self.gputrain_app.runs_dir)
        self.act(start, show, in_thread=True, is_awaited=False)

    def action_search(self) -> None:
        self.fields.start_search()

    def action_open(self) -> None:
        self.fields.consume_key("enter")

    def action_more(self) -> None:
        self._show_all = not self._shows_all
        self._show_rows()

    def action_reset(self) -> None:
        restores, self.form = self.form.is_reset, self.form.reset(to_new=self._shows_draft)
        self.gputrain_app.show_toast("Restored the changes" if restores else "Reset the form; ^r undoes it")
        self._show_rows()
        self._begin_check()

    def action_copy(self) -> None:
        self.validate_now()
        if self._problems:
            self.gputrain_app.show_toast(NEEDS_VALID_CONFIG)
            return
        self.gputrain_app.copy_to_clipboard(self._shell_command())

    async def action_back(self) -> None:
        """Return to the previous screen; ask first if that would lose what the user typed."""
        if self.form == self._saved:
            await super().action_back()
            return
        confirm(self.app, "Discard the changes?", "Continue to edit", "Discard the changes", self.app.pop_screen)


NEEDS_VALID_CONFIG = Problem("", "Fix the errors first; the command needs a valid config", code="invalid-value")


def problems_dialog(problems: Sequence[Problem]) -> TextDialog:
    """Return the dialog that says why a run is not started."""
    lines = problem_lines([(problem.label, printable(problem.message)) for problem in problems])
    return TextDialog(f"Not started: {pluralize(len(problems), 'error')} to fix", lines)
