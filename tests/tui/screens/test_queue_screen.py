"""The queue screen: keys that hold, order and cancel runs of this user, and say why others cannot be changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.base.codec import or_none
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation import Reservation
from engine.jobs.queue.listing import QueueRow, RowState
from engine.jobs.queue.state import write_queue_state
from engine.runs.batch.job import write_job
from engine.runs.control import consume_requests
from engine.runs.events import WaitingForGpus
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.messages import says
from support.runs.factories import make_queue_state, make_run_folder
from support.screen.demo_app import demo_app, toasts, visible_text, wait_until
from support.screen.screen_driver import drive, press
from support.servers.slurm_stand_in import SlurmStandIn
from tui.screens.dialogs import ChoiceDialog
from tui.screens.queue import QueueScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
Act = Callable[[Pilot[None], QueueScreen], Awaitable[None]]


class WaitingSupervisor:
    """The reservation and the folder of a waiting run, and the requests that it has received."""

    def __init__(self, root: Path, name: str, position: float) -> None:
        self.folder = make_run_folder(root, name)
        self.ownership = Ownership(self.folder)
        self.entry, self.terms = Reservation(), QueueTerms(position=position, folder=str(self.folder.path))
        self.entry.set_terms(self.terms, "GPU 0: reserved by run holder (user me)")
        self.entry.enqueue("free:1", ["GPU-0"], name)

    def requests(self) -> list[tuple[str, object]]:
        return [(request.request, or_none(request.priority)) for request in consume_requests(self.folder.control)]

    def close(self) -> None:
        self.entry.release()
        self.ownership.release()


@pytest.fixture
def supervisors(
    tmp_path: Path, isolated_folder: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[WaitingSupervisor]]:
    # They receive requests and do not carry them out.
    monkeypatch.setattr("engine.jobs.queue.edit.APPLY_TIMEOUT_SECONDS", 0.1)
    (tmp_path / "GPUTRAIN_RESERVATIONS").mkdir()
    waiting = [WaitingSupervisor(tmp_path / "runs", name, position) for position, name in enumerate("ab")]
    yield waiting
    for each in waiting:
        each.close()


def drive_queue(root: Path, act: Act) -> None:
    async def open_and_act(pilot: Pilot[None]) -> None:
        await press(pilot, "Q")
        screen = pilot.app.screen
        assert isinstance(screen, QueueScreen)
        await wait_until(pilot, lambda: screen.queue_poller.value is not None)
        screen.update_content()
        await act(pilot, screen)

    drive(demo_app(root, demo=None), open_and_act, (110, 24))


def test_keys_send_requests_to_the_selected_run(tmp_path: Path, supervisors: list[WaitingSupervisor]) -> None:
    first, second = supervisors

    async def act(pilot: Pilot[None], screen: QueueScreen) -> None:
        assert "GPU 0: reserved by run holder" in " ".join(
            visible_text(pilot, "#queue-reason").replace("│", "").split()
        )
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "q quit" in visible_text(pilot, "Keys")
        await press(pilot, "h")
        await wait_until(pilot, lambda: first.requests() == [("hold", None)])
        await press(pilot, "down", "K")
        await wait_until(pilot, lambda: second.requests() == [("order", 0)])
        await press(pilot, "s")
        assert isinstance(pilot.app.screen, ChoiceDialog), "it asks first"
        await press(pilot, "enter")
        assert second.requests() == []
        await press(pilot, "s", "down", "enter")
        await wait_until(pilot, lambda: second.requests() == [("stop", None)])

    drive_queue(tmp_path / "runs", act)


def test_keys_refuse_runs_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = QueueRow("theirs", "bob", -1, RowState.WAITING, 1, 0.0, "\x1b[2J", "free:1", key="theirs")
    monkeypatch.setattr("tui.screens.pollers.files.list_queue", lambda: [foreign])

    async def act(pilot: Pilot[None], screen: QueueScreen) -> None:
        assert "\\x1b[2J" in visible_text(pilot, "#queue-reason")
        for key in ("h", "s", "K", "enter"):
            await press(pilot, key)
            assert isinstance(pilot.app.screen, QueueScreen)
        assert says(toasts(pilot)[0], "foreign-owner", "theirs ", " bob")

    drive_queue(tmp_path / "runs", act)


def test_interrupted_run_is_listed_and_can_be_cancelled(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "gone")
    folder.config.touch()
    write_queue_state(folder, make_queue_state())

    async def act(pilot: Pilot[None], screen: QueueScreen) -> None:
        assert "interrupted" in visible_text(pilot, "#queue")
        assert "u resume" in visible_text(pilot, "Keys")
        await press(pilot, "s", "down", "enter")
        await wait_until(pilot, lambda: RunFolder(folder.path).history().finished is not None)
        await wait_until(pilot, lambda: screen.rows == [])

    drive_queue(tmp_path / "runs", act)


def test_pending_job_is_listed_and_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmStandIn(tmp_path / "slurm", monkeypatch)
    folder = make_run_folder(tmp_path / "runs", "a", WaitingForGpus(message="submitted"))
    write_job(folder, "slurm", "7")
    slurm.tell("squeue", "7|PENDING|N/A||Priority\n")

    async def act(pilot: Pilot[None], screen: QueueScreen) -> None:
        await wait_until(pilot, lambda: "pending (Priority)" in visible_text(pilot, "#queue"))
        assert "u resume" not in visible_text(pilot, "Keys")
        await press(pilot, "s", "down", "enter")
        await wait_until(pilot, lambda: screen.rows == [])
        assert slurm.calls[-1] == "scancel 7"

    drive_queue(tmp_path / "runs", act)


def test_several_interrupted_runs_are_resumed_after_a_question_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[str] = []
    monkeypatch.setattr(
        "tui.screens.queue.resume_all", lambda rows: resumed.extend(row.name for row in rows) or "In the queue again"
    )
    for name in ("first", "second"):
        folder = make_run_folder(tmp_path / "runs", name)
        folder.config.touch()
        write_queue_state(folder, make_queue_state())

    async def act(pilot: Pilot[None], screen: QueueScreen) -> None:
        await press(pilot, "u")
        assert {"first", "second"} <= set(visible_text(pilot).replace("?", "").replace(",", "").split())
        await press(pilot, "enter")
        assert resumed == []
        await press(pilot, "u", "down", "enter")
        await wait_until(pilot, lambda: sorted(resumed) == ["first", "second"])

    drive_queue(tmp_path / "runs", act)
