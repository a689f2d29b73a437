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

# Steps of one path lookup; a cycle of links exceeds it.
MAX_LOOKUP_STEPS = 4096


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


def foreign_lookup_reason(path: Path, root: Path) -> str | None:
    """Return why other users can change what a path leads to, as a clause that names the folder, link or file.

    Checks each folder and link from `/` on. A folder outside of `root` (a path without links) may be writable by others
    if it has the sticky bit, which lets only the owner of an entry rename it, and if it contains the next entry.
    """
    folder, names = Path("/"), list(path.absolute().parts[1:])
    for _ in range(MAX_LOOKUP_STEPS):
        try:
            status = folder.stat()
        except OSError as error:
            return f"{folder} cannot be examined: {error.strerror}"
        reason = foreign_reason(status)
        is_sticky = status.st_mode & stat.S_ISVTX and status.st_uid in (os.geteuid(), 0)
        if reason is not None and (not is_sticky or folder.is_relative_to(root)):
            return f"{folder} {reason}"
        if not names:
            return None
        entry = folder / names.pop(0)
        try:
            link = entry.lstat()
            target = entry.readlink() if stat.S_ISLNK(link.st_mode) else None
        except OSError:
            # Whoever can create the missing entry decides what the path leads to.
            return None if reason is None else f"{folder} {reason}"
        if target is None:
            folder = folder.parent if entry.name == ".." else entry
        elif link.st_uid not in (os.geteuid(), 0):
            return f"{entry} is a link that belongs to {describe_user(link.st_uid)}"
        else:
            folder = Path("/") if target.is_absolute() else folder
            names = [*target.parts[target.is_absolute() :], *names]
    return None


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
