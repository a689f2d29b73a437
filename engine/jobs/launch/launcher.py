"""Carry out the request of a run, and return the exit code of `gputrain run`: the command line calls `launch`."""

from __future__ import annotations

import os
import signal

from engine.base.errors import UsageError
from engine.base.exit_codes import CommandExit, ExitCode
from engine.base.host import raise_open_files_limit
from engine.base.process import ignore_sighup
from engine.jobs.launch.phases import AlreadyFinishedError, EndedBeforeStartError, Held, Requested, RunListener
from engine.jobs.launch.request import RunRequest, settle_request, watch_other_claim
from engine.jobs.queue.dependencies import DependencyError
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.ownership import OwnershipLostError
from engine.runs.recorder import Listener
from engine.train.distributed.rank_env import detect_launcher


def launch(request: RunRequest, listener: Listener) -> int:
    """Run to the end and return the exit code; `listener` receives every event.

    Raises UsageError if the request is refused, with nothing left behind."""
    ignore_sighup()
    raise_open_files_limit()
    if request.command is None:
        launcher = detect_launcher(request.config.device.launcher, os.environ)
        if launcher != "spawn":
            from engine.jobs.launch.external import run_external_rank

            return run_external_rank(request, launcher, listener)
    code = _run(request, RunListener(listener))
    # A command has exit codes of its own, a run that has not started those of a training.
    is_refusal = isinstance(code, ExitCode) and code is not ExitCode.FINISHED and request.command is not None
    return CommandExit.FAILED if is_refusal else code


def _run(request: RunRequest, listener: RunListener) -> int:
    """Carry out a run. Whatever ends it before it starts, it leaves nothing behind, or a record of why it does not
    start if it had a place in the queue. Raises UsageError if it is refused."""
    # Until the run starts, a signal ends this process through the clauses below, which release what it holds.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    try:
        with Held() as held:
            watch_other_claim(request, listener)
            requested = Requested(settle_request(request), listener, held)
            if (program := request.command) is not None:
                from engine.jobs.launch.program_run import run_program

                return run_program(requested, program).exit_code
            from engine.jobs.launch.training import run_training

            return run_training(requested).exit_code
    except DependencyError as error:
        raise UsageError.one("queue.after", str(error), code=error.code) from error
    except EndedBeforeStartError as error:
        return error.exit_code
    except AlreadyFinishedError:
        return ExitCode.FINISHED
    except KeyboardInterrupt:
        listener(WarningEvent(message="stopped before the run began; nothing was created", code="stopped"))
        return ExitCode.FAILED
    except OwnershipLostError as error:
        listener(RunFinished(state="failed", message=str(error)))
        return ExitCode.FAILED
