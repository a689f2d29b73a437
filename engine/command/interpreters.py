"""What to type for a script that is not executable."""

from __future__ import annotations

import shlex
from pathlib import PurePath

INTERPRETERS = {
    ".py": "python", ".sh": "sh", ".bash": "bash", ".pl": "perl", ".rb": "ruby", ".r": "Rscript", ".R": "Rscript",
    ".jl": "julia",
}  # fmt: skip
"""Programs that run scripts, by the ends of their names."""


def script_line(path: str) -> str:
    """Return the words that run a script, or what to do first if its interpreter is unknown."""
    interpreter, quoted = INTERPRETERS.get(PurePath(path).suffix), shlex.quote(path)
    return (
        f"{interpreter} {quoted}" if interpreter else f"`chmod +x {quoted}` first, or the interpreter before its name"
    )
