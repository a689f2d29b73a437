"""Files that may come from someone else: links, pipes, sizes, ownership."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from engine.base import trust
from engine.base.files import append_to_file, open_regular_file, replace_file
from engine.base.trust import foreign_reason

OTHER_UID = 12345


def test_open_regular_file_refuses_link_pipe_and_large_file(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(b"12345")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(OSError):
            open_regular_file(path)
    with pytest.raises(OSError, match=" 4 "):
        open_regular_file(target, 4)
    with open_regular_file(target, 5) as file:
        assert file.read() == b"12345"


def test_append_to_file_refuses_link_and_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            append_to_file(tmp_path / name)
    assert not (tmp_path / "target").exists()


def test_replace_file_does_not_write_through_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".new.{os.getpid()}.tmp").symlink_to(victim)
    replace_file(tmp_path / "new", lambda file: file.write(b"text"))
    assert (victim.read_text(), (tmp_path / "new").read_text()) == ("kept", "text")


def status_of(path: Path, **changes: int) -> os.stat_result:
    """Return the status of a path with some fields changed."""
    values = list(path.stat())
    for name, value in changes.items():
        values[{"mode": 0, "uid": 4, "gid": 5}[name]] = value
    return os.stat_result(values)


def test_foreign_reason_names_owner_and_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = status_of(tmp_path, mode=0o40755, uid=os.geteuid())
    assert foreign_reason(private) is None
    assert foreign_reason(status_of(tmp_path, mode=0o40755, uid=OTHER_UID)) == f"belongs to uid {OTHER_UID}"
    assert foreign_reason(status_of(tmp_path, mode=0o40757, uid=os.geteuid())) == "is writable by all users"
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)
    of_root = status_of(tmp_path, mode=0o40755, uid=0)
    assert foreign_reason(of_root) is None
    assert foreign_reason(of_root, trust_root=False) == "belongs to root (uid 0)"


@pytest.mark.parametrize(
    ("group", "members", "is_foreign"),
    [("me", [], False), ("me", ["root"], False), ("me", ["other"], True), ("students", [], True), (None, [], True)],
)
def test_foreign_reason_depends_on_writing_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str | None, members: list[str], is_foreign: bool
) -> None:
    def find_group(gid: int) -> grp.struct_group:
        if group is None:
            raise KeyError(gid)
        return grp.struct_group((group, "x", gid, members))

    account = pwd.struct_passwd(("me", "x", os.geteuid(), 777, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    monkeypatch.setattr(grp, "getgrgid", find_group)
    trust._has_other_member.cache_clear()
    reason = foreign_reason(status_of(tmp_path, mode=0o40775, uid=os.geteuid(), gid=777))
    trust._has_other_member.cache_clear()
    assert reason == (f"is writable by the group {group or 'gid 777'}" if is_foreign else None)
