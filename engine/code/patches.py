"""Diffs as git prints them, file by file: read from a working tree, and split again after they were stored."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from engine.code.git import Repository

MAX_PATCH_BYTES = 1 << 24
NO_TRANSFORMATION = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty")
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}


def read_diff(
    repository: Repository, tree: str, paths: Sequence[str], excluded: Iterable[str]
) -> tuple[dict[str, bytes], bool]:
    """Return the diff of each path, and whether there is no more. Raises GitError."""
    pathspecs = [".", *(f":(top,literal,exclude){path}" for path in excluded)]
    output, is_complete = repository.read(
        *("diff-index", "--patch", "--binary", "--full-index", "--unified=3", *NO_TRANSFORMATION),
        *("--src-prefix=a/", "--dst-prefix=b/", tree, "--", *pathspecs),
        max_bytes=MAX_PATCH_BYTES,
    )
    return split_patch(output, paths, is_complete=is_complete), is_complete


def split_patch(output: bytes, paths: Iterable[str], *, is_complete: bool = True) -> dict[str, bytes]:
    """Return the diff of each path in the output of git. The last one is cut off unless the output is complete."""
    headers = {patch_header(os.fsencode(path)): path for path in paths}
    patches: dict[str, bytes] = {}
    # No line of content begins so: it begins with a blank, a sign, or the length of base 85.
    sections = output.split(b"\ndiff --git ")
    for index, section in enumerate(sections):
        text = (b"diff --git " if index else b"") + section + (b"\n" if index < len(sections) - 1 else b"")
        header, _, body = text.partition(b"\n")
        is_cut = not is_complete and index == len(sections) - 1
        # Only the time of the file has changed if nothing follows.
        if body and not is_cut and (path := headers.get(header)) is not None:
            # A file that became a link is deleted and added.
            patches[path] = patches.get(path, b"") + text
    return patches


def patch_header(path: bytes) -> bytes:
    """Return the first line of the diff of a file."""
    return b"diff --git " + quote_path(b"a/" + path) + b" " + quote_path(b"b/" + path)


def quote_path(path: bytes) -> bytes:
    """Return a path as git prints it: one with unusual characters is quoted as in C."""
    if not any(byte < 32 or byte in (34, 92, 127) for byte in path):
        return path
    escaped = (
        f"\\{_ESCAPES[byte]}".encode() if byte in _ESCAPES
        else f"\\{byte:03o}".encode() if byte < 32 or byte == 127
        else bytes([byte])
        for byte in path
    )  # fmt: skip
    return b'"' + b"".join(escaped) + b'"'
