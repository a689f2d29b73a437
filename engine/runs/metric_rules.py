"""What the user wants metrics of the runs in a folder to be called, which are hidden, and which one is the x axis.

Kept in the user's state folder. They hold for the curves of a run (`engine.watch.renaming`); records and lists keep
the names of the program.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from engine.base.codec import FileRecord, Meta, Record, find_user_record, write_record
from engine.base.files import make_user_folder, state_folder
from engine.watch.folders import ForeignRun
from engine.watch.renaming import AS_LOGGED, Renaming

RULES_FILE = "metric-rules.json"
MAX_FOLDERS = 200
MAX_NAMES = 200

Name = Annotated[str, Meta(max_length=3000)]


class FolderRules(Record, frozen=True, kw_only=True):
    """The rules of one folder. `names` are pairs of a metric and its new name, empty for a hidden one, and `x` is the
    metric over which the others are plotted."""

    folder: Annotated[str, Meta(max_length=4096)]
    names: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_NAMES)] = ()
    x: Name = ""

    @property
    def renaming(self) -> Renaming:
        """The rules as readers take them."""
        return Renaming(dict(self.names), self.x)


class MetricRules(FileRecord, frozen=True, kw_only=True):
    """Content of the file: the rules of folders, those that were changed last at the end."""

    folders: Annotated[tuple[FolderRules, ...], Meta(max_length=MAX_FOLDERS)] = ()


def _read_all() -> tuple[FolderRules, ...]:
    return (find_user_record(state_folder(), RULES_FILE, MetricRules) or MetricRules()).folders


def read_rules(folder: Path) -> FolderRules:
    """Return the rules of the runs in a folder."""
    key = os.path.realpath(folder)
    return next((rules for rules in _read_all() if rules.folder == key), FolderRules(folder=key))


def write_rules(changed: FolderRules) -> None:
    """Remember the rules of a folder, and forget those that were changed first beyond `MAX_FOLDERS`. Raises OSError."""
    others = [rules for rules in _read_all() if rules.folder != changed.folder]
    rules = MetricRules(folders=(*others, changed)[-MAX_FOLDERS:])
    write_record(make_user_folder(state_folder()) / RULES_FILE, rules, private=True)


def renaming_of(run: ForeignRun) -> Renaming:
    """Return what the user chose for the runs beside a run; the journal of a training has names of ours."""
    return AS_LOGGED if run.formats == ("journal",) else read_rules(run.folder.parent).renaming
