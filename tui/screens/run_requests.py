"""What the screens of a run of gputrain share: requests to its owner, and how it is resumed."""

from __future__ import annotations

from functools import partial

from engine.runs.control import RequestName, send_request
from engine.runs.folder import RunFolder, RunState
from engine.utils.errors import Problem
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import stop_dialog

STOP_QUESTIONS = {
    RunState.RUNNING: "Stop the run? It saves a checkpoint and can be resumed.",
    RunState.PAUSED: "Stop the run? It saves a checkpoint and can be resumed.",
    RunState.STARTING: "Stop the run before its first step?",
    RunState.WAITING: "Cancel the run? It leaves the queue and does not start.",
}


class RunRequests(GputrainScreen):
    """A screen of one run, which has its folder and its state."""

    folder: RunFolder
    stop_questions = STOP_QUESTIONS

    @property
    def state(self) -> RunState | None:
        """The state of the run at the latest poll; None before the first one."""
        raise NotImplementedError

    def send_request(self, request: RequestName) -> None:
        """Send a request to the owner of a live run."""
        if self.state is None or not self.state.live:
            if self.state is None:
                self.gputrain_app.show_toast(Problem("", f"{self.folder.name} is still loading", code="not-loaded"))
            else:
                reason = f"{self.folder.name} is not running: it is {self.state}"
                self.gputrain_app.show_toast(Problem("", reason, code="not-running"))
            return

        def done(_: object) -> None:
            # Toasts of earlier requests would cover the charts.
            self.app.clear_notifications()
            self.gputrain_app.show_toast(f"Sent the {request} request; the log shows its effect")

        self.act(partial(send_request, self.folder.control, request), done)

    def action_stop(self) -> None:
        question = self.stop_questions.get(self.state) if self.state is not None else None
        if question is None:
            self.send_request("stop")
            return

        def answer(key: str | None) -> None:
            if key == "yes":
                self.send_request("stop")

        self.app.push_screen(stop_dialog(question), answer)

    def action_resume(self) -> None:
        self.gputrain_app.resume_run(self.folder, self.state)
