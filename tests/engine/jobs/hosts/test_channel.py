"""Commands on another host: names, quoting, and what a host that fails or floods can do."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.gpus.reservation_reader import FOLDER_NAME
from engine.jobs.hosts.channel import HostUnreachableError, check_host_name, parse_hosts, run_on, ssh_argv
from support.messages import has_problem, raises_problem
from support.servers.ssh_stand_in import CHANGED_WORDS, HOST_KEY_CHANGED, SshStandIn


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch x", "", "a b", "x;y", "user@-l", "lab\x1b[2J", "any", "ray:lab"]
)
def test_host_name_with_other_meaning_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_host_name(name)
    assert has_problem(refused.value.problems, "invalid-value", "host")
    assert "\x1b" not in str(refused.value)


def test_hosts_are_named_once_in_order() -> None:
    assert parse_hosts("lab2, ann@lab-1.org,lab2") == ("lab2", "ann@lab-1.org")


def test_ssh_asks_only_on_request() -> None:
    assert "BatchMode=yes" in ssh_argv("lab1", "true")
    assert "BatchMode=no" in ssh_argv("lab1", "true", ask=True)


def test_control_sockets_are_in_folder_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    # Short: the path of a socket has at most 108 bytes, unix(7).
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        [path] = (word for word in ssh_argv("lab1", "true") if word.startswith("ControlPath="))
        folder = Path(path.partition("=")[2]).parent
        assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (Path(temporary), 0o700)
        assert FOLDER_NAME.fullmatch(folder.name) is None
        folder.chmod(0o777)
        assert "ControlPath=none" in ssh_argv("lab1", "true")


def test_control_socket_of_the_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\nprintf 'controlmaster auto\\ncontrolpersist %s\\ncontrolpath /x\\n' $PERSIST\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for set_by_user, used in (("3600", "3600"), ("no", "10")):
        monkeypatch.setenv("PERSIST", set_by_user)
        options = ssh_argv("lab1", "true", shares=True)
        assert not [word for word in options if word.startswith("ControlPath")]
        assert f"ControlPersist={used}" in options and "ControlMaster=auto" in options


def test_lost_connection_is_no_exit_code(ssh: SshStandIn) -> None:
    ssh.set_host("lab1")
    with raises_problem("unreachable", None, "the connection was lost", kind=HostUnreachableError):
        run_on("lab1", ["sh", "-c", "echo here; exit 255"])


def test_lines_are_shown_as_they_come(ssh: SshStandIn, tmp_path: Path) -> None:
    ssh.set_host("lab1", "echo Welcome; echo quota >&2")
    shown: list[tuple[bytes, int]] = []
    script = f"echo a; echo b >&2; while ! [ -e {tmp_path}/seen ]; do sleep 0.05; done; printf last"

    def show(line: bytes, stream: int) -> None:
        shown.append((line, stream))
        if len(shown) == 2:
            (tmp_path / "seen").touch()

    answer = run_on("lab1", script=script, show=show)
    assert (sorted(shown[:2]), shown[2:]) == ([(b"a", 1), (b"b", 2)], [(b"last", 1)])
    assert (answer.stdout, answer.stderr) == (b"", b"")


def test_arguments_reach_host_as_typed(ssh: SshStandIn) -> None:
    ssh.set_host("lab1")
    arguments = ["it's", "$HOME", "a  b", "*", "line\nfeed", "-n", ""]
    answer = run_on("lab1", ["printf", "%s|", *arguments])
    assert answer.stdout.decode() == "".join(f"{argument}|" for argument in arguments)


def test_answer_begins_after_noise_of_rc_files(ssh: SshStandIn) -> None:
    ssh.set_host("lab1", "echo Welcome; echo quota: 93% >&2; set -x")
    answer = run_on("lab1", ["sh", "-c", "echo here; exit 3"])
    assert (answer.stdout, answer.code) == (b"here\n", 3)


def test_unreachable_host_is_told_in_words_of_ssh(ssh: SshStandIn) -> None:
    ssh.set_host("rekeyed", HOST_KEY_CHANGED)
    with raises_problem("unreachable", None, CHANGED_WORDS, kind=HostUnreachableError):
        run_on("rekeyed", ["true"])


def test_silent_host_is_given_up(ssh: SshStandIn) -> None:
    ssh.set_host("slow")
    with raises_problem("timed-out", None, "slow", kind=HostUnreachableError):
        run_on("slow", ["sleep", "100"], timeout_s=0.2)


def test_flood_of_host_is_cut_off(ssh: SshStandIn) -> None:
    ssh.set_host("flood")
    with raises_problem("too-large", None, "flood", kind=HostUnreachableError):
        run_on("flood", ["cat", "/dev/zero"])
