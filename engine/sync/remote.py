"""What `engine.sync.run_sync` needs of a service: open a remote run, send rows to it, end it.

`engine.sync.mlflow_store` and `engine.sync.wandb_service` implement it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.runs.folder import RunState
from engine.sync.description import RunDescription
from engine.sync.rows import Row
from engine.sync.state import RemoteState
from engine.utils.errors import CodedError

MAX_REASON_CHARACTERS = 300


class SyncError(CodedError):
    """A service cannot be used. The message is one sentence. `temporary` errors may go away without the user."""

    def __init__(self, message: str, *, temporary: bool = False, code: str) -> None:
        super().__init__(message, code)
        self.temporary = temporary


class RemoteRun(ABC):
    """The copy of one run at a service. Its methods raise the errors of the library, see `Service.reported_errors`."""

    location: str
    """URL, or folder of an offline run."""
    held_step: int = 0
    """Rows up to this step are at the service and must not be sent again."""

    @abstractmethod
    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, which follow each other."""

    @abstractmethod
    def finish(self, state: RunState, figures: Row, message: str) -> None:
        """Record how the run ended, its final figures and the message of its end."""

    @abstractmethod
    def describe(self, description: RunDescription) -> None:
        """Send a name, config or labels that have changed."""

    @abstractmethod
    def leave(self) -> None:
        """Stop sending to a run that goes on."""


class Service(ABC):
    """A service that runs are copied to, with the project or experiment that they get into."""

    name: str
    """Value of `--service`."""
    destination: str
    """Which service, project or experiment, without credentials. A run has one remote run at each destination."""

    @abstractmethod
    def open(self, state: RemoteState, description: RunDescription, save: Callable[[], None]) -> RemoteRun:
        """Create the remote run, or continue the one in `state`; one that is void is replaced by an empty one.

        `save` stores changes of `state`. Raises the errors of the library.
        """

    @abstractmethod
    def to_sync_error(self, error: Exception) -> SyncError:
        """Return an error of the library as one sentence."""

    @contextmanager
    def reported_errors(self) -> Iterator[None]:
        """Raise SyncError for any error of the library in the block."""
        try:
            yield
        except SyncError:
            raise
        except Exception as error:
            raise self.to_sync_error(error) from error

    @abstractmethod
    def close(self) -> None:
        """End the connection, and processes that belong to it."""


def without_credentials(uri: str) -> str:
    """Return a URI without user, password, query and fragment, which may be secrets. `urlunsplit` would drop slashes of
    `sqlite:////DIR`."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def first_line(error: object) -> str:
    """Return the first line of a library's message, shortened."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= MAX_REASON_CHARACTERS else line[: MAX_REASON_CHARACTERS - 1] + "…"
