"""Names of runs and sweeps: which text may be one, and its one form.

A name is a file name, an argument in a shell and a cell in a table, in any script. `engine.config.run_sections` and
`engine.runs` check names with it.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.schema import Config

MAX_NAME_CHARACTERS = 100
# A file name has at most 255 bytes. The rest is for what is appended: the number of a trial, or `~2` in the trash.
MAX_NAME_BYTES = 200
# The number that follows, as in digits-3, needs some of it.
MAX_STEM_CHARACTERS, MAX_STEM_BYTES = 80, 160
# Letters, marks, and decimal digits (Unicode Standard, table 4-4), without what is written like text: symbols and
# punctuation mean something to a shell or to an option, and format characters reverse or hide text.
_CATEGORIES = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd"}
# Letters and marks that are not displayed (Default_Ignorable_Code_Point in DerivedCoreProperties.txt).
_INVISIBLE = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
_INVISIBLE |= set(range(0xE0100, 0xE01F0))
RULE = "must start with a letter or digit and contain only letters, digits, dots, dashes and underscores"


def normalize_name(name: str) -> str:
    """Return the one form of a name: two spellings of é are the same name (Unicode normalization form C)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def name_problem(name: str, max_characters: int = MAX_NAME_CHARACTERS, max_bytes: int = MAX_NAME_BYTES) -> str | None:
    """Return why a normalized text cannot be the name of a run, as a clause that follows it; None if it can."""
    if any("\udc80" <= character <= "\udcff" for character in name):
        # What Python makes of an argument in another encoding.
        return f"is not text in the encoding {sys.getfilesystemencoding()}; set LC_ALL=C.UTF-8"
    if not name or not (name[0].isalnum() and _is_allowed(name[0])) or not all(map(_is_allowed, name)):
        return RULE
    if len(name) > max_characters or len(name.encode()) > max_bytes:
        return f"must have at most {max_characters} characters and {max_bytes} bytes in UTF-8"
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        return f"cannot be a file name in the encoding {error.encoding}; set LC_ALL=C.UTF-8, or use an ASCII name"
    return None


def name_from_stem(stem: str) -> str:
    """Convert the name of a config file to a valid beginning of a name: invalid characters become dashes."""
    marked = "".join(character if _is_allowed(character) else " " for character in normalize_name(stem))
    name = re.sub(" +", "-", marked).strip("-._")
    # A mark belongs to the letter before it.
    while name and not name[0].isalnum():
        name = name[1:]
    # The cut may leave a part of a character.
    name = name[:MAX_STEM_CHARACTERS].encode()[:MAX_STEM_BYTES].decode(errors="ignore")
    return name if name_problem(name) is None else "run"


def stem_of_numbered(name: str) -> str:
    """Return what precedes the number of a run: `digits` of `digits-3`, and a name without a number as it is."""
    return re.sub(r"-[0-9]+$", "", name)


def run_stem(base: str | None, config: Config, typed: Container[str]) -> str:
    """Return the beginning of the name of a run that has none: that of its config file, data folder or preset.

    `base` is the config as typed, and `typed` has the keys that were typed for this run. A preset with a folder of
    one's own says less about the run than the folder.
    """
    data, is_file = config.data, base is not None and Path(base).suffix != ""
    if (
        not is_file
        and "data.path" in typed
        and data.path is not None
        and data.dataset in ("folder", "csv", "webdataset")
    ):
        path = Path(data.path).expanduser().absolute()
        # Shards, unlike their folder, say less about the run than the dataset and the model.
        if path.name and path.suffix != ".tar":
            return name_from_stem(path.stem if data.dataset == "csv" else path.name)
    return name_from_stem(Path(base).stem if base is not None else f"{data.dataset}-{config.model.name}")


def _is_allowed(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character in "._-"
    return unicodedata.category(character) in _CATEGORIES and ord(character) not in _INVISIBLE
