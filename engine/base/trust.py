"""Whether only this user can change a file or a folder, judged by its owner and mode.

Callers refuse what is foreign: run folders, configs, user code, presets and reservations of other users.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path


def foreign_reason(status: os.stat_result, *, trust_root: bool = True) -> str | None:
    """Return why other users can change a file or a folder, as a clause that follows its name; None if they cannot.

    root can change everything; `trust_root=False` excludes what belongs to root for questions of identity, such as
    whose run a folder is.
    """
    trusted_uids = {os.geteuid(), 0} if trust_root else {os.geteuid()}
    if status.st_uid not in trusted_uids:
        return f"belongs to {describe_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "is writable by all users"
    if status.st_mode & stat.S_IWGRP and _has_other_member(status.st_gid, os.geteuid()):
        return f"is writable by the group {_group_name(status.st_gid)}"
    return None


def foreign_path_reason(path: Path) -> str | None:
    """Return why other users can change what a path names, as `foreign_reason` does. Follows a link of this user or
    root. Raises OSError."""
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        return f"is a link that belongs to {describe_user(link.st_uid)}"
    return foreign_reason(path.stat())


def is_shared(folder: os.stat_result) -> bool:
    """Whether other users can create entries in a folder: it belongs to one of them, or is writable by them."""
    return foreign_reason(folder) is not None


def describe_user(uid: int) -> str:
    """Return a user's name and ID, or only the ID of a user without a name."""
    name, shown_uid = name_of_user(uid), f"uid {uid}"
    return name if name == shown_uid else f"{name} ({shown_uid})"


def name_of_user(uid: int) -> str:
    """Return a user's name, or the ID of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


@cache
def _has_other_member(gid: int, uid: int) -> bool:
    """Whether a group may have a member beside this user and root.

    Only a user private group has none: distributions that create them set umask 002, so that group-writable folders are
    usual. Accounts are not enumerated, because LDAP and SSSD do not list theirs.
    """
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid).pw_name
    except KeyError:
        return True
    return group.gr_name != user or not {user, "root"}.issuperset(group.gr_mem)
