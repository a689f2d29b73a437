"""Find the files of rows in a folder: CSV, JSON lines and JSON documents, whose content says whether they are logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath

from engine.watch import csv_file, json_file, json_lines
from engine.watch.csv_file import CsvFile
from engine.watch.growing_file import RowFile, lines_of, read_head
from engine.watch.json_file import SERIES_FILE, JsonFile
from engine.watch.json_lines import JsonLines
from engine.watch.line_names import is_result, may_be_metric
from engine.watch.reading import (
    MAX_SNIFFED_FILES,
    SNIFFED_BYTES,
    ColumnChoice,
    Listing,
    Log,
    files_below,
    flat_numbers,
)
from engine.watch.trainer_state import STATE_FILE

TABLE_ENDINGS, TEXT_ENDINGS = (".csv", ".tsv"), (".txt", ".log", ".dat")
JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
# Of tables with these names, no heading has to tell that they are logs.
KNOWN_TABLES = frozenset({"metrics.csv", "results.csv", "summary.csv", "training.csv", "progress.csv", "monitor.csv"})
# Of a document with these names, the only row may be the first one.
KNOWN_ROWS = frozenset({"metrics.json", "scalars.json", "log.json", "result.json"})
# Files with such names come first, and are named if nothing of them can be read.
_LIKELY = re.compile(
    r"(?<![a-z])(?:metrics?|logs?|hist|history|results?|progress|loss|losses|monitor|train|training|scalars?|eval|summary"
    r"|curves?)(?![a-z])",
    re.IGNORECASE,
)
# A pattern of them takes twenty times as long.
_NAME_PARTS = (
    b"epoch step iter updates frames episodes loss acc prec f1 auc recall iou dice psnr ssim bleu rouge mae mse nll "
    b"ppl perplex rew return err fid wer cer ent"
).split()
BINARY_ENDINGS = (
    ".parquet", ".pkl", ".pickle", ".joblib", ".npz", ".npy", ".h5", ".hdf5", ".feather", ".arrow", ".mat", ".xlsx",
)  # fmt: skip
# DVCLive writes a table for each metric below `plots/metrics`.
PLOTS = ("plots", "metrics")
MAX_PLOTS, MAX_PLOT_DEPTH = 50, 6


def find(listing: Listing) -> list[Log]:
    """Return a log for each file of rows with metrics. A copy of another one counts once."""
    heads, logs, rows = list[bytes](), list(_plots(listing)), list[Log]()
    for path, head in _sniffed(listing):
        log = _series(path, listing) or _log(path, head, listing)
        if log is not None and not any(head[: len(other)] == other[: len(head)] for other in heads):
            heads.append(head)
            (rows if path.name in KNOWN_ROWS and head.count(b"\n") < 2 else logs).append(log)
    # The only row of a file may be the last one of another one.
    return logs or rows


def unread(listing: Listing) -> Iterator[str]:
    """Yield a sentence on each file that looks like metrics, of a folder in which no log was found."""
    for name in listing.files:
        if name.endswith(BINARY_ENDINGS) and _LIKELY.search(name):
            yield f"{name} may have metrics, but {PurePath(name).suffix} files are not read"
        elif name.endswith((*TABLE_ENDINGS, *JSON_ENDINGS)) and not os.access(listing.folder / name, os.R_OK):
            yield f"{name} cannot be read: permission denied"
    for path, head in _sniffed(listing):
        lines = [line.decode(errors="replace") for line in lines_of(head)]
        words = re.split(r'[,;\t":]+', "\t".join(lines[: json_lines.MAX_SNIFFED_LINES]))
        if path.suffix in TEXT_ENDINGS:
            rows = [line for line in lines if may_be_metric(line) or sum(map(str.isdigit, line.split())) > 1]
            line = rows[0] if rows and _LIKELY.search(path.name) else None
            advice = f"gputrain run --try-parse {path.name} shows what is found in its lines"
        else:
            line = next((word.strip() for word in words if is_result(word.strip())), None)
            advice = "--x NAME and --metrics PATTERN say which columns are its x axis and its metrics"
        if line is not None:
            yield f"{path.name} looks like metrics ({line.strip()[:60]}), but none was read; {advice}"


def _sniffed(listing: Listing) -> Iterator[tuple[Path, bytes]]:
    """Yield the files that may be logs, and their beginnings."""
    endings = (*TABLE_ENDINGS, *JSON_ENDINGS, *TEXT_ENDINGS)
    names = [name for name in listing.files if name.endswith(endings) and name != STATE_FILE]
    names.sort(key=lambda name: (_is_known(name), _LIKELY.search(name) is not None), reverse=True)
    for name in names[:MAX_SNIFFED_FILES]:
        yield (path := listing.folder / name), read_head(path, SNIFFED_BYTES)


def _is_known(name: str) -> bool:
    # `0.monitor.csv`
    return name in KNOWN_TABLES or ".".join(name.split(".")[-2:]) in KNOWN_TABLES or name in KNOWN_ROWS


def _log(path: Path, head: bytes, listing: Listing) -> Log | None:
    """Return the log that a file is, by its beginning."""
    choice, lines = listing.choice, lines_of(head)
    lowered = head.lower().replace(b"\0", b"")
    if not (
        any(part in lowered for part in _NAME_PARTS) or is_result(path.stem) or _is_known(path.name) or any(choice)
    ):
        return None
    is_whole = len(head) < SNIFFED_BYTES
    if path.suffix in TABLE_ENDINGS:
        is_log = csv_file.is_log(lines, path.stem, choice, is_known=_is_known(path.name))
        return _rows("csv", CsvFile, path, choice) if is_log else None
    # A program may have written other lines before.
    first = lines[: json_lines.MAX_SNIFFED_LINES] if path.suffix in (".jsonl", ".ndjson") else lines[:1]
    rows = next(filter(None, map(json_lines.rows_of_line, first)), [])
    is_document = path.suffix == ".json" and is_whole and len([line for line in lines if line.strip()]) == 1
    is_row = path.name in KNOWN_ROWS and not any(json_file.rows_of(row, path.stem) for row in rows)
    if rows and (not is_document or is_row) and json_lines.is_log(lines, choice):
        return _rows("json", JsonLines, path, choice)
    if path.suffix in JSON_ENDINGS:
        text = b"\n".join(lines).decode(errors="replace")
        is_log = text.lstrip()[:1] in ("[", "{") and json_file.is_log(text, path.stem, is_whole=is_whole, choice=choice)
        return Log("json", (path,), lambda: JsonFile(path, choice)) if is_log else None
    return _rows("csv", CsvFile, path, choice) if csv_file.is_log(lines, path.stem, choice) else None


def _rows(name: str, kind: type[RowFile], path: Path, choice: ColumnChoice, group: str = "") -> Log:
    return Log(
        name, (path,), lambda: kind(path, None, choice, group),
        open_from=lambda begin, end: kind(path, end, choice, group, begin),
    )  # fmt: skip


def _series(path: Path, listing: Listing) -> Log | None:
    """Return the log of numbered files, such as `metrics_epoch_0.json`. `path` is the first of them."""
    match = SERIES_FILE.fullmatch(path.name) if path.suffix == ".json" else None
    if match is None or int(match[2]) or not _LIKELY.search(match[1]):
        return None
    found = json_lines.rows_of_line(read_head(path, SNIFFED_BYTES))
    if not found or not any(map(is_result, flat_numbers(found[0]))):
        return None
    return Log("json", (path,), lambda: JsonFile(path, listing.choice, match[1]))


def _plots(listing: Listing) -> Iterator[Log]:
    """Yield the logs of DVCLive's tables, which are of one run."""
    top = listing.folder.joinpath(*PLOTS)
    files = files_below(top, MAX_PLOT_DEPTH) if PLOTS[0] in listing.folders else ()
    for name, path in islice((file for file in files if file[0].endswith(TABLE_ENDINGS)), MAX_PLOTS):
        log = _rows("csv", CsvFile, path, listing.choice, name.rpartition("/")[0])
        yield replace(log, owned_folders=(PLOTS[0],))
