"""The commit and the digests by which the code of two working trees is compared.

`engine.code.state` reads them from a working tree, `engine.code.record` stores them, and `engine.code.difference`
compares those of two runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

from engine.code.kinds import is_code
from engine.utils.codec import ENTRIES, Meta, Record, encode, field

Entries = Annotated[dict[str, str], ENTRIES]


class CodeDigests(Record, frozen=True, kw_only=True):
    """The code in a working tree, without its content. Paths are relative to the root of the tree."""

    commit: Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})?\Z")] = ""
    """The commit that was checked out; "" before the first one."""
    changed: Entries = field(default_factory=dict)
    """Digests of the diffs of changed tracked files; of a file without a diff, that of its content."""
    untracked: Entries = field(default_factory=dict)
    """Digests of the untracked text files, also of those that do not count as code."""
    unread: Entries = field(default_factory=dict)
    """Digests of size and time of files that count as code but are not stored, at most 1000."""
    rest: str = ""
    """One digest of such files beyond these."""
    modules: Entries = field(default_factory=dict)
    """Fingerprints of the code in submodules and nested repositories."""
    unknown: str = ""
    """What cannot be compared, as a clause; "" if all can."""
    skipped: Entries = field(default_factory=dict)
    """Why files are not stored, at most 1000."""

    @property
    def is_dirty(self) -> bool:
        """Whether the code is not that of the commit."""
        has_files = self.changed or self.unread or self.rest or any(map(is_code, self.untracked))
        # A clean submodule is no change.
        return bool(has_files) or not self.modules.keys().isdisjoint(self.skipped)

    @property
    def compared(self) -> Mapping[str, str]:
        """The digests of all files that count as code."""
        compared = dict(self.changed)
        untracked = {path: digest for path, digest in self.untracked.items() if is_code(path)}
        for digests in (untracked, self.unread, self.modules):
            for path, digest in digests.items():
                # A file that was only removed from the index is deleted and untracked.
                compared[path] = compared.get(path, "") + digest
        return compared

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same code. What runs write beside it (`engine.code.kinds`) does not count."""
        return digest_of(encode([self.commit, sorted(self.compared.items()), self.rest, self.unknown]))


def digest_of(data: bytes) -> str:
    """Return the SHA-256 digest of data as text."""
    return hashlib.sha256(data).hexdigest()
