"""The parts of typer that are private, and what happens without them: a missing one takes typer's plain way.

- typer's script of bash breaks words at `=`, appends a blank to `optim.lr=`, and expands patterns in names.
- typer imports rich for the help texts of fish and zsh, a third of the time of a completion, and takes what stands in
  brackets for markup.
"""

from __future__ import annotations

from typing import Any

try:
    from typer import _completion_classes as classes
    from typer import _completion_shared as shared
except ImportError:
    classes = shared = None  # type: ignore[assignment]

# Asks as fish, which gets the line up to the cursor. What follows the last = of a word is one of its own to bash, as
# COMP_WORDBREAKS says.
BASH_SCRIPT = """
%(complete_func)s() {
    local word help line="${COMP_LINE:0:COMP_POINT}"
    local typed="${line##* }"
    COMPREPLY=()
    while IFS=$'\\t' read -r word help; do
        [[ $word ]] || continue
        printf -v word %%q "${word#"${typed%%"${typed##*=}"}"}"
        COMPREPLY+=("${word/#\\\\~/\\~}")
    done < <(_TYPER_COMPLETE_ARGS="$line" _TYPER_COMPLETE_FISH_ACTION=get-args \\
        %(autocomplete_var)s=complete_fish "$1" 2> /dev/null)
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""


def prepare_shells() -> None:
    """Replace typer's script of bash 4.4 or newer, and give shells the help texts as they are."""
    scripts: Any = getattr(shared, "_completion_scripts", None)
    if isinstance(scripts, dict):
        scripts["bash"] = BASH_SCRIPT
    if hasattr(classes, "_sanitize_help_text"):
        classes._sanitize_help_text = str  # type: ignore[assignment]
