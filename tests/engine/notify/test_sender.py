"""Messages reach a local server through apprise; one that refuses, hangs or is gone has a reason without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.notify.message import test_message as make_test_message
from engine.notify.run_messages import Outbox, RunMessages
from engine.notify.sender import redact, send_logged, send_message
from support.gputrain_command import wait_for
from support.messages import says
from support.runs.factories import make_run_folder
from support.servers.notify_server import PASSWORD, gone_server, hanging_server, notify_server


@pytest.fixture(autouse=True)
def _no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def test_sender_delivers_to_each_destination_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with notify_server() as answers, notify_server(403) as refuses, hanging_server() as hangs:
        monkeypatch.setenv("ANSWERS", answers.url)
        monkeypatch.setenv("REFUSES", refuses.url)
        monkeypatch.setenv("HANGS", f"{hangs.url}?rto=1")
        monkeypatch.setenv("GONE", gone_server().url)
        monkeypatch.setenv("UNKNOWN", "nosuchservice://hunter2secret")
        monkeypatch.setenv("TEMPLATE", f"slack://TAAAAAAAA/BAAAAAAAA/{'c' * 24}?Temp%6Cate=/etc/hostname")
        names = ["ANSWERS", "REFUSES", "HANGS", "GONE", "UNKNOWN", "TEMPLATE"]
        deliveries = send_message(make_test_message("host"), [f"env:{name}" for name in names])
    by_name = {delivery.label.removeprefix("env:"): delivery for delivery in deliveries}
    assert sorted(by_name) == sorted(names)
    assert [name for name, delivery in by_name.items() if delivery.sent] == ["ANSWERS"]
    assert answers.titles == ["gputrain on host"]
    assert by_name["ANSWERS"].line == "env:ANSWERS (JSON at 127.0.0.1): sent"
    assert by_name["HANGS"].reason and "403" in by_name["REFUSES"].reason
    codes = [by_name[name].code for name in ("UNKNOWN", "GONE", "TEMPLATE")]
    assert codes == ["invalid-value", "connection-failed", "not-supported"]
    assert PASSWORD not in str(deliveries)


def test_message_without_destinations_is_not_sent() -> None:
    assert send_message(make_test_message("host"), []) == []
    [delivery] = send_message(make_test_message("host"), ["env:UNSET_X"])
    assert (delivery.sent, delivery.code) == (False, "missing-value")
    assert says(delivery.line, "missing-value", "env:UNSET_X", "export UNSET_X=URL")


def test_redact_hides_user_password_token_and_topic() -> None:
    url = "mailtos://me%40x:p%40ssw@mail.example.org/token123?to=you&key=abcdef"
    text = redact(f"{url} failed: me@x p@ssw token123 abcdef", url)
    assert "failed" in text and not any(secret in text for secret in ("ssw", "token123", "abcdef"))


def test_message_about_held_batch_names_reason_and_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a-3").identified()
    with notify_server() as answers:
        monkeypatch.setenv("ANSWERS", answers.url)
        for when in ([], ["held"]):
            config = Config.model_validate({"notify": {"urls": ["env:ANSWERS"], "when": when}})
            outbox = Outbox(lambda message, urls=config.notify.urls: send_logged(folder, message, urls))
            RunMessages(folder, config, outbox).hold("a-1 and a-2 failed within 30 s")
        wait_for(lambda: folder.notify_log.exists() and "sent" in folder.notify_log.read_text(), "the message")
    [message] = answers.received
    assert "a-3" in message["title"]
    for part in ("a-1 and a-2 failed", f"gputrain queue release a-3 --runs-dir {tmp_path}"):
        assert part in message["message"]
