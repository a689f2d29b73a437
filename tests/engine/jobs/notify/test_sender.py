"""Messages reach a local server through apprise; one that refuses, hangs or is gone has a reason without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.jobs.notify.message import test_message as make_test_message
from engine.jobs.notify.run_messages import Outbox, RunMessages
from engine.jobs.notify.sender import has_destinations, read_destinations, redact, send_logged, send_message, user_file
from support.gputrain_command import wait_for
from support.messages import has_problem, says
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


SECRET = "ntfy://topic-hunter2"  # noqa: S105 (made up)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    user_file().parent.mkdir(parents=True)
    return user_file()


def make_url_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_variables_and_files_give_labels_without_urls(tmp_path: Path, settings: Path) -> None:
    file = make_url_file(tmp_path / "urls", f"# mine\n\n{SECRET}\njson://localhost\n")
    make_url_file(settings, f"{SECRET}\njson://localhost/all\n")
    found, problems = read_destinations(["env:NTFY", f"file:{file}"], {"NTFY": "ntfy://other"})
    assert problems == []
    assert [item.label for item in found] == [
        "env:NTFY",
        f"file:{file} line 3",
        f"file:{file} line 4",
        f"file:{settings} line 2",
    ]
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = make_url_file(tmp_path / "urls", SECRET, mode)
    found, problems = read_destinations([f"file:{file}"])
    assert found == [] and len(problems) == 1
    assert has_problem(problems, "foreign-readable", "", f"file:{file}", f"chmod 600 {file}")


@pytest.mark.parametrize("text", ["-----BEGIN PRIVATE KEY-----\nhunter2\n", "ntfy://a b hunter2"])
def test_lines_that_are_no_url_are_named_by_number_only(tmp_path: Path, text: str) -> None:
    found, problems = read_destinations([f"file:{make_url_file(tmp_path / 'id_rsa', text)}"])
    assert found == [] and problems
    assert "hunter2" not in str(problems)


def test_line_that_is_no_url_leaves_the_others(tmp_path: Path) -> None:
    file = make_url_file(tmp_path / "urls", "ntfy://a\nno url\nntfy://b")
    found, problems = read_destinations([f"file:{file}"])
    assert [each.url for each in found] == ["ntfy://a", "ntfy://b"]
    assert len(problems) == 1


def test_unusable_references_are_reported(tmp_path: Path) -> None:
    empty = make_url_file(tmp_path / "empty", "# nothing\n")
    found, problems = read_destinations(["env:BLANK", "file:/nowhere", f"file:{empty}"], {"BLANK": " "})
    assert found == []
    assert [problem.code for problem in problems] == ["missing-value", "not-readable", "missing-value"]
    assert has_problem(problems, "missing-value", "", "env:BLANK", "export BLANK=URL")


def test_run_without_references_and_file_has_no_destinations(settings: Path) -> None:
    assert not has_destinations([])
    assert has_destinations(["env:A"])
    make_url_file(settings, SECRET)
    assert has_destinations([])
