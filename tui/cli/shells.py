"""Completion in shells: the script of bash, and what `gputrain` prints when a shell asks for words.

typer's script of bash breaks words at `=`, appends a blank to `optim.lr=`, and expands patterns in names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

from typer import _completion_classes, _completion_shared
from typer._click.shell_completion import add_completion_class

# What follows the last = of a word is one of its own to bash, as COMP_WORDBREAKS says.
BASH_SCRIPT = """
%(complete_func)s() {
    mapfile -t COMPREPLY < <(_TYPER_COMPLETE_ARGS="${COMP_LINE:0:COMP_POINT}" \\
        %(autocomplete_var)s=complete_bash "$1" 2> /dev/null)
    [[ ${COMPREPLY[0]} ]] || COMPREPLY=()
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
# Characters that mean something to bash within a word.
BASH_SPECIAL = re.compile(r"[^\w@%+=:,./~-]")


class Bash(_completion_classes.FishComplete):
    """Completion of bash 4.4 or newer. It gets the line up to the cursor, as fish."""

    name = "bash"

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        done = incomplete[: incomplete.rfind("=") + 1]
        words = [str(item.value).removeprefix(done) for item in self.get_completions(args, incomplete)]
        return "\n".join(BASH_SPECIAL.sub(r"\\\g<0>", word) for word in words)


def prepare_shells() -> None:
    """Replace typer's completion of bash. Its other shells get help texts as they are: it imports rich for them, which
    takes what stands in brackets for markup."""
    _completion_shared._completion_scripts["bash"] = BASH_SCRIPT
    _completion_classes._sanitize_help_text = str  # type: ignore[assignment]
    add_completion_class(Bash, "bash")


def complete_words(answer: Callable[[], None]) -> None:
    """Call typer's answer to a shell: it prints the words and exits if one asks, else it returns. A fault has no words,
    and prints nothing into the prompt."""
    prepare_shells()
    with redirect_stderr(StringIO()):
        try:
            answer()
        except Exception:
            raise SystemExit(1) from None
