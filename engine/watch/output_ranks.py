"""Tell apart the lines of several ranks or workers, which launchers print with a label."""

from __future__ import annotations

import re

# torchrun's `[rank0]:` and `[default0]:`, `[train.py/0]:`, accelerate's `[RANK 0]`, `[GPU0]`, mpirun's `[1,0]<stdout>:`
_RANK = re.compile(
    r"\[(?!epoch|step|iter|batch)(?:[a-z_]{1,30} ?|[\w.-]{1,60}/)(?P<rank>\d{1,6})\]: ?"
    r"|\[(?:rank|gpu|cuda|worker|process)[ :]?(?P<own>\d{1,6})\] ?|\[\d{1,6},(?P<mpi>\d{1,6})\]<std(?:out|err)>: ?"
    r"|(?:worker|rank)-?(?P<named>\d{1,6}): ",
    re.ASCII | re.IGNORECASE,
)
# Ray: `(RayTrainWorker pid=4711, ip=10.0.0.7) `
_WORKER = re.compile(r"\((?P<name>[\w.:]{1,80}) (?:pid=)?(?P<pid>\d{1,10})(?:, ip=[\d.]{7,15})?\) ?", re.ASCII)
_REPEATED = re.compile(r" ?\[repeated \d{1,9}x across cluster\]")
# Behind time and logger: `INFO [train.py:10] (0/4) `, `[2026-11-20 10:00:00] [rank 0] `
_INNER_RANK = re.compile(r"\] (?:\((?P<rank>\d{1,6})/\d{1,6}\)|\[rank ?(?P<own>\d{1,6})\]) ", re.IGNORECASE)
MAX_PREFIX_CHARS = 120
MAX_WORKER_NAMES = 100
MAX_HELD_LINES = 3  # of a rank above 0
# srun --label
_LABEL = re.compile(r"\s{0,5}(\d{1,6}): ?")


class PrintedRanks:
    """Strips what launchers put before the lines of each rank. Only the lines of one rank count: the lowest one, or the
    first worker of a name."""

    def __init__(self) -> None:
        self._lowest: int | None = None
        self._held: list[str] = []
        """Lines of the lowest rank so far, while a lower one may follow."""
        self._may_be_lower = True
        self._workers: dict[str, str] = {}
        """The first worker of each name: that of the trainer prints no metrics."""
        self.has_skipped = False
        """Whether lines of other ranks or workers were skipped."""
        self.may_be_labeled = True
        """Whether the lines may begin with the rank alone."""
        self._last_label: int | None = None
        self._has_labels = False

    def strip(self, line: str) -> list[str]:
        """Return the lines that count now, without their rank."""
        if (line[:1].isalpha() and line[:1] not in "wr") or line[:1] == "{":
            self.may_be_labeled = False
            return [line]
        worker = _WORKER.match(line)
        if worker is not None:
            if len(self._workers) < MAX_WORKER_NAMES:
                self._workers.setdefault(worker["name"], worker["pid"])
            if worker["pid"] == self._workers.get(worker["name"]):
                return [_REPEATED.sub("", line[worker.end() :])]
            self.has_skipped = True
            return []
        rank = _RANK.match(line)
        if rank is not None:
            return self._of_rank(int(rank[rank.lastgroup or 0]), line[rank.end() :])
        inner = _INNER_RANK.search(line, 0, MAX_PREFIX_CHARS) if "] " in line else None
        if inner is not None:
            return self._of_rank(int(inner[inner.lastgroup or 0]), line[: inner.start() + 2] + line[inner.end() :])
        if not self.may_be_labeled or (label := _LABEL.match(line)) is None:
            self.may_be_labeled = self.may_be_labeled and not line.strip()
            return [line]
        number = int(label[1])
        # A script may begin its lines with a step: that does not go back again and again.
        if self.may_be_labeled and self._last_label is not None and number < self._last_label:
            self._has_labels = True
        self._last_label = number
        return self._of_rank(number, line[label.end() :]) if self._has_labels else [line]

    def counts(self, rank: int) -> bool:
        """Whether a line that names its rank counts."""
        self._lowest = rank if self._lowest is None else min(rank, self._lowest)
        self.has_skipped = self.has_skipped or rank != self._lowest
        return rank == self._lowest

    def _of_rank(self, rank: int, text: str) -> list[str]:
        if self._lowest is None or rank < self._lowest:
            self._lowest, self._held = rank, []
        if rank != self._lowest:
            self.has_skipped = True
            return []
        if rank == 0 or not self._may_be_lower:
            return [text]
        self._held.append(text)
        if len(self._held) <= MAX_HELD_LINES:
            return []
        # No lower rank prints anything.
        self._may_be_lower, held, self._held = False, self._held, []
        return held
