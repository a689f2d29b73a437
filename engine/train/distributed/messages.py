"""Messages between the ranks of a run: records in the store of their rendezvous.

`engine.jobs.launch` and `engine.train.loop` declare the records. All ranks run the same version of gputrain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from engine.base.answers import Answer
from engine.base.codec import InvalidRecordError, Record, decode, encode
from engine.base.errors import CodedError, Problem, UsageError
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import await_keys

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Record)


class PeerFailedError(CodedError):
    """Another rank failed, stopped responding or sent an invalid message. The text says which one and why."""


class HostProblems(Record, frozen=True, kw_only=True):
    """What a rank refuses on its host."""

    host: str
    problems: tuple[Problem, ...]


def send(store: Store, key: str, message: Record) -> None:
    """Store a message for other ranks under `key`, which ends in the number of its rank if each rank sends one."""
    store.set(key, encode(message).decode())


def receive(store: Store, rank: int, key: str, kind: type[MessageT]) -> MessageT:
    """Return the message that a rank stores under `key`. Raises RendezvousTimeoutError and PeerFailedError."""
    await_keys(store, {rank: key})
    return decode_message(store.get(key), key, kind)


def exchange(store: Store, rank_info: RankInfo, key: str, message: MessageT) -> list[MessageT]:
    """Return the message of each rank. A collective on the store. Raises as `receive` does."""
    keys = {rank: f"{key}/{rank}" for rank in range(rank_info.world_size)}
    send(store, keys[rank_info.rank], message)
    await_keys(store, keys)
    return [decode_message(store.get(each), each, type(message)) for each in keys.values()]


def decode_message(data: bytes, key: str, kind: type[MessageT]) -> MessageT:
    """Return the message that another rank stored under `key`. Raises PeerFailedError if it is not valid."""
    try:
        return decode(data, kind)
    except InvalidRecordError as error:
        raise PeerFailedError(
            f"the message {key} of another rank {error}; install the same version of gputrain on all hosts",
            code=error.code,
        ) from error


def decide_on_rank_0(key: str, decide: Callable[[], T], kind: type[Answer[T]], rank_info: RankInfo, store: Store) -> T:
    """Return the decision of rank 0, which sends it to the other ranks under `key`. Raises UsageError on all ranks."""
    if rank_info.rank != 0:
        return receive(store, 0, key, kind).get()
    answer = kind(problems=(Problem("", f"rank 0 could not choose a {key}", code="rank-failed"),))
    try:
        value = decide()
        answer = kind(value)
        return value
    except UsageError as error:
        answer = kind.refuse(error)
        raise
    finally:
        send(store, key, answer)


def merge_problems(own: Iterable[Problem], others: Iterable[HostProblems]) -> list[Problem]:
    """Return the distinct problems of all ranks. One that this rank does not have names the host that has it."""
    problems = {str(problem): problem for problem in own}
    for other in others:
        for problem in other.problems:
            if str(problem) not in problems:
                elsewhere = replace(problem, reason=f"{problem.reason} (on {other.host})")
                problems.setdefault(str(elsewhere), elsewhere)
    return list(problems.values())
