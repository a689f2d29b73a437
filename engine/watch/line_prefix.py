"""What programs print before a line: time, level, logger, file and line, process."""

from __future__ import annotations

import re

MAX_LEVEL_COLUMN = 100
MAX_ITEMS = 12
# The first character comes first, so that `re` skips all others at once.
_LEVEL = re.compile(r"([CDEFINW](?<!\w.)(?:EBUG|NFO|OTICE|ARN(?:ING)?|RROR|RITICAL|ATAL))\b")
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_DATE = r"(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d[-/.]\d\d(?:[-/.]\d{2,4})?|\d{8})"
# Python's basicConfig: `INFO:name:message`
_BASIC = re.compile(r":[\w.]{0,80}:")
_ITEM = re.compile(
    # `[2026-11-20 10:00:00,123 name]`, `2026-11-20T10:00:00.123456:`
    rf"\[?(?:[A-Z]{{2,8}} )?{_DATE}[ T,_-]{_TIME}(?=[^\w]|$)(?:[ \w.]{{0,60}}\])?\]?:?"
    rf"|\[?{_TIME}\]?(?=[\s|-])"
    # syslog: `Nov 30 12:00:01 host train[12]:`
    rf"|[A-Z][a-z]{{2}} [ \d]\d {_TIME}(?: [\w.-]{{1,60}} [\w./-]{{1,60}}(?:\[\d+\])?:)?"
    # glog: `I1120 10:00:26.230209 140110937163584 metric_logger.py:214]`
    rf"|[IWEF]\d{{4,8}} {_TIME}\s+\d+\s(?:\w{{1,40}}\s)?[\w.]{{1,80}}:\d+\]"
    # `[logging.py:96:log_dist]`, `train.py:12`, `name.of.logger:143`
    r"|\[?(?:[\w/-]+\.)+\w+:\d+(?::\w+)?\]?:?"
    # `[0101 10:00:00 @monitor.py:467]`
    r"|\[\d{4} [\d:]{8} @[\w.]{1,60}:\d+\]"
    r"|\[(?:DEBUG|INFO|NOTICE)\]"
    # `root - `, `name.of.logger ` before a level
    r"|[\w.]{1,60} -(?= )"
    r"|\[rank ?\d+\]"
    r"|[|:\]>-]{1,3}(?=\s|$|\[)"
    r"|\s+",
    re.IGNORECASE,
)


def strip_prefix(text: str) -> str | None:
    """Return a line without time, level and logger; None for a warning or an error.

    Blanks at the beginning stay, because a line may be below its heading.
    """
    if text[:1] == "{":
        return text
    level = _LEVEL.search(text, 0, MAX_LEVEL_COLUMN)
    position = 0
    if level is not None:
        if level[1] not in ("DEBUG", "INFO", "NOTICE"):
            return None
        position = level.end()
        basic = _BASIC.match(text, position) if level.start() == 0 else None
        position = basic.end() if basic is not None else position
        while position < len(text) and text[position] in "|:]":
            position += 1
    elif not (text[:1].isdigit() or text[:1] in "[" or text[:1].isupper() or text[:2].strip()[:1] == "["):
        return text
    begin = position
    for _ in range(MAX_ITEMS):
        item = _ITEM.match(text, position)
        if item is None or (item[0].isspace() and level is None and position == 0):
            break
        position = item.end()
    return (skipped if (skipped := text[begin:position]).isspace() else "") + text[position:]
