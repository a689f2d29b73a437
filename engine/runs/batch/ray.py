"""Ray: jobs through the REST API of a cluster's job server, and Ray Train for the ranks of a training.

Only a training needs ray itself, on the nodes: `python -m engine.runs.batch.ray` is its driver. Each worker of Ray
Train starts one rank with the variables of torchrun, as torchrun's agent does, and Ray restarts workers that are lost.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.base.codec import Integer, InvalidRecordError, Record, decode, encode
from engine.base.errors import UsageError, not_installed
from engine.base.exit_codes import ExitCode
from engine.base.exits import exit_status
from engine.base.files import replace_file
from engine.base.text import pluralize, printable
from engine.runs.batch.engine import MAX_WORDS_CHARS, TOOL_TIMEOUT_SECONDS, BatchError, JobPhase, JobRequest, JobState

MAX_ANSWER_BYTES = 1 << 26  # Ray keeps thousands of jobs, each with up to 20,000 characters of its output
STOP_SECONDS = 60  # to save a checkpoint; Ray's own default is 3
MAX_PENDING_SECONDS = 365 * 86400
# Beyond that, a rank that is killed again and again, as without memory, would hold its nodes for ever.
MAX_LOST_WORKERS = 20
_ADDRESS = re.compile(r"(https?://)?[\w.-]+(?(1)(:\d+)?[\w./-]*|:\d+)", re.ASCII)
_PHASES = {
    "PENDING": JobPhase.PENDING, "SUCCEEDED": JobPhase.COMPLETED, "STOPPED": JobPhase.CANCELLED,
    "FAILED": JobPhase.FAILED,
}  # fmt: skip
_PENDING_GROUPS = "v0/placement_groups?detail=1&filter_keys=state&filter_predicates=%3D&filter_values=PENDING"
_ENVIRONMENT = "job.env"
_DRIVER = f"{shlex.quote(sys.executable)} -P -m engine.runs.batch.ray"
# Not passed on: variables that Ray sets in each process, or Slurm in each job.
_INHERITED = re.compile(r"(?!RAY_|SLURM_|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_ORDER$)[A-Za-z_]\w*", re.ASCII)
_RANK = re.compile(r"(LOCAL_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|CUDA_VISIBLE_DEVICES$")


class _Job(Record, frozen=True, kw_only=True):
    """A job as the job server lists it; `submission_id` is null for a driver that was started by hand."""

    submission_id: str | None = None
    job_id: str | None = None
    status: str = ""
    message: str | None = None
    driver_exit_code: Integer | None = None
    driver_agent_http_address: str | None = None


class Ray:
    """The Ray cluster whose job server has this address, `HOST:PORT` or a URL."""

    job_variable = "GPUTRAIN_RAY_JOB"
    requeues = False
    # Ray shows it those of the workers on its node, whose number Ray chooses.
    rank_gpus = "all"

    def __init__(self, address: str) -> None:
        if not _ADDRESS.fullmatch(address):
            problem = f"{printable(address)!r} is no address of a cluster" if address else "ray needs an address"
            raise BatchError(f"{problem}; type --on ray:HOST:8265, that of its dashboard")
        self._url = (address if "://" in address else f"http://{address}").rstrip("/")

    def starts_ranks(self, nodes: int) -> bool:
        return True

    def script(self, request: JobRequest) -> str:
        if request.partition or request.options:
            raise UsageError.one("--partition, --slurm", "are for --on slurm", code="no-effect")
        if request.array_size:
            raise UsageError.one(
                "--on", "Ray has no arrays of jobs; a sweep starts here or on slurm", code="not-supported"
            )
        workers, command = request.nodes * request.tasks_per_node, request.command
        gpus = min(request.gpus, 1)
        environment = shlex.quote(str(request.log.with_name(_ENVIRONMENT)))
        if workers == 0 and request.nodes > 1:
            raise UsageError.one("--nodes", "a command runs on one node of a Ray cluster", code="not-supported")
        if workers and find_spec("ray") is None:
            raise UsageError.one("--on", not_installed("ray"), code="not-installed")
        if workers:
            command = f"{_DRIVER} {workers} {gpus} {shlex.quote(str(request.log))} {command}"
        lines = [
            "#!/bin/bash",
            f"# Ray reserves {encode(_resources(request)).decode()}.",
            f"exec >>{shlex.quote(str(request.log))} 2>&1",
            f"cd {shlex.quote(str(request.folder))} || exit 1",
            f". {environment} && rm {environment} || exit 1",
            *request.setup,
            f"exec {command}",
        ]
        return "\n".join(lines) + "\n"

    def submit(self, script: Path, request: JobRequest) -> str:
        job = f"{request.name[:60]}-{os.urandom(4).hex()}"
        # Not in the request: everybody who sees the dashboard would see its secrets.
        names = sorted(name for name in os.environ if _INHERITED.fullmatch(name))
        lines = [f"export {name}={shlex.quote(os.environ[name])}" for name in names]
        text = "\n".join([*lines, f"export {self.job_variable}={job}", ""])
        data = text.encode(errors="surrogateescape")
        replace_file(script.with_name(_ENVIRONMENT), lambda file: file.write(data), private=True)
        content = {"submission_id": job, "entrypoint": f"exec bash {shlex.quote(str(script))}"}
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}}
        self._ask("jobs/", content | _resources(request) | {"runtime_env": environment})
        return job

    def states(self, since: float | None) -> Mapping[str, JobState]:
        try:
            jobs = decode(self._ask("jobs/"), list[_Job])
        except InvalidRecordError as error:
            raise BatchError(f"the answer of {self._url} {error}") from error
        waiting = dict[str, str]()
        if any(job.status == "RUNNING" for job in jobs):
            # Without an answer, the workers of a training wait without a reason.
            with suppress(BatchError, ValueError, LookupError, TypeError, AttributeError):
                # What Ray has not placed yet of a job has a bundle for each worker of a training.
                for group in decode(self._ask(_PENDING_GROUPS), dict[str, Any])["data"]["result"]["result"]:
                    why = printable(group["stats"]["scheduling_state"])[:MAX_WORDS_CHARS]
                    waiting[group["creator_job_id"]] = f"pending ({why}, {pluralize(len(group['bundles']), 'worker')})"
        return {job.submission_id: _read_state(job, waiting) for job in jobs if job.submission_id}

    def cancel(self, job: str) -> None:
        self._ask(f"jobs/{job}/stop", {})

    def per_node(self, words: Sequence[str]) -> list[str]:
        raise UsageError.one("--on", "{nodes}, {head} and {port} are for --on slurm", code="not-supported")

    def _ask(self, path: str, content: Mapping[str, object] | None = None) -> bytes:
        """Return what the job server answers to a request, a POST with content. Raises BatchError."""
        # They take 30 ms to import, and few runs have a job.
        import http.client
        import urllib.error
        import urllib.request

        data = None if content is None else encode(content)
        request = urllib.request.Request(  # noqa: S310 (the address is of HTTP)
            f"{self._url}/api/{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TOOL_TIMEOUT_SECONDS) as answer:  # noqa: S310
                found: bytes = answer.read(MAX_ANSWER_BYTES)
                return found
        except urllib.error.HTTPError as error:
            # Ray answers with a traceback.
            raise BatchError(
                f"{self._url}: {_last_line(error.read(MAX_ANSWER_BYTES).decode(errors='replace')) or error.reason}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise BatchError(f"no job server of Ray answers at {self._url}: {printable(str(reason))}") from error


def _resources(request: JobRequest) -> dict[str, int]:
    """Return what the process of a job reserves; nothing for the driver of a training, whose workers do."""
    if request.tasks_per_node:
        return {}
    return {"entrypoint_num_cpus": request.cores, "entrypoint_num_gpus": request.gpus}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return printable(lines[-1].strip())[:MAX_WORDS_CHARS] if lines else ""


def _read_state(job: _Job, waiting: Mapping[str, str]) -> JobState:
    """Return the state of a job. `waiting` says why workers wait, by the ID of the driver."""
    word = job.status.casefold()
    if job.status == "RUNNING" and (job.job_id or "") in waiting:
        return JobState(JobPhase.PENDING, waiting[job.job_id or ""])
    if job.status == "RUNNING":
        host = urlsplit(job.driver_agent_http_address or "").hostname
        # It starts the run again whenever Ray has lost workers.
        return JobState(JobPhase.RUNNING, f"running on {printable(host)}" if host else word, math.inf)
    reason = printable((job.message or "").partition("\n")[0])[:MAX_WORDS_CHARS]
    if job.driver_exit_code is not None:
        # The message is longer, and ends with the output.
        reason = f"exit code {job.driver_exit_code}"
    is_told = job.status in ("PENDING", "FAILED") and reason
    return JobState(_PHASES.get(job.status, JobPhase.RUNNING), f"{word} ({reason})" if is_told else word)


# ---- The driver of a training, in its job ----


def run_rank(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run one rank as a child of this worker of Ray Train, and return its exit code. Raises RuntimeError, at which Ray
    restarts all workers, if a signal ended it."""
    own = {name: value for name, value in os.environ.items() if _RANK.match(name)}
    # The store is that of the process group that Ray has opened.
    own |= {"TORCHELASTIC_RUN_ID": "ray", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with log.open("ab") as output:
        code = subprocess.run(  # noqa: S603 (the gputrain that submitted the job)
            command,
            cwd=environment["PWD"],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code < 0:
        raise RuntimeError(f"rank {own['RANK']} on {socket.gethostname()} {exit_status(code)}")
    return code


def main(workers: int, gpus: int, log: Path, command: Sequence[str]) -> int:
    """Train with a TorchTrainer, and return the exit code of rank 0. The ranks print to `log`."""
    # Those of the job, before ray adds its own.
    environment = {**os.environ, "PWD": str(Path.cwd())}
    # Workers wait for a free node as long as it takes; each timeout would print a traceback.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(MAX_PENDING_SECONDS)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    class Losses(UserCallback):  # type: ignore[misc] # of a library without types
        def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
            with log.open("a") as output:
                for rank, error in sorted(worker_exceptions.items()):
                    output.write(f"Ray lost rank {rank}: {_last_line(str(error))}\n")

    class Config(TorchConfig):  # type: ignore[misc] # as above
        # That of Ray calls torch.cuda.set_device, which opens a CUDA context beside that of the rank.
        train_func_context = nullcontext

    def stop(*_: object) -> None:
        # `gputrain stop`, `ray job stop` and the dashboard send SIGTERM. Ranks that train save a checkpoint first.
        program, name = command[0], log.parent.name
        shown = subprocess.run([program, "runs", "show", name, "--json"], capture_output=True, check=False)  # noqa: S603
        if decode(shown.stdout, dict[str, Any])["state"] not in ("running", "paused", "stopping"):
            sys.exit(ExitCode.STOPPED)
        subprocess.run([program, "stop", name, "--no-wait"], check=False)  # noqa: S603

    # The address is that of the cluster of this job. The log of Ray repeats itself, and has tracebacks.
    runtime_env = {"py_executable": sys.executable}
    ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, stop)
    storage = log.with_name("ray")
    trainer = TorchTrainer(
        partial(run_rank, command, environment, log),
        torch_config=Config(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 1, "GPU": gpus}, use_gpu=gpus > 0
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=MAX_LOST_WORKERS),
            callbacks=[Losses()],
        ),
    )
    try:
        return int(trainer.fit().return_value)
    except TrainingFailedError as error:
        print(f"error: {_last_line(str(error))}")
        return ExitCode.FAILED
    finally:
        shutil.rmtree(storage, ignore_errors=True)


if __name__ == "__main__":
    workers, gpus, log, *command = sys.argv[1:]
    sys.exit(main(int(workers), int(gpus), Path(log), command))
