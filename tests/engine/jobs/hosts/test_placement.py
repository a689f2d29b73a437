"""Runs that start on another host: in which folder, with which words, and on which of several hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.base.codec import encode, replace
from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.gpus.snapshot import DRIVER, Gpu, Measurement, Snapshot
from engine.jobs.hosts.channel import HostUnreachableError
from engine.jobs.hosts.placement import RemoteRequest, start_on
from support.repositories import make_repository
from support.servers.ssh_stand_in import SshStandIn

GPUTRAIN = """\
#!/bin/sh
case "$1" in
  run) {{ pwd; echo "$GPUTRAIN_RUNS"; echo "$KEY"; printf '%s\\n' "$@"; }} > {folder}/start; {run} ;;
  *) cat {folder}/$1 ;;
esac
"""


class Lab:
    """Hosts with a stand-in for gputrain, which notes how a run was started."""

    def __init__(self, ssh: SshStandIn, folder: Path) -> None:
        self.ssh, self.folder = ssh, folder
        self.notes: list[str] = []

    def add(
        self, host: str, *gpus: str, waiting: int = 0, run: str = "echo x-1", shared: bool = True, noise: str = ""
    ) -> None:
        """Add a host with GPUs that are "free", hold a "process" or are "reserved"."""
        own = self.folder / host
        own.mkdir()
        program = own / "gputrain"
        program.write_text(GPUTRAIN.format(folder=own, run=run))
        program.chmod(0o755)
        (own / "gpus").write_bytes(encode(make_snapshot(gpus)))
        rows = ",".join(['{"place": 1}'] * waiting + ['{"place": null}'])
        (own / "queue").write_text(f'{{"format": 1, "queue": [{rows}]}}')
        if not shared:
            (own / "cat").write_text('#!/bin/sh\ncase "$1" in */.gputrain-*) exit 1;; esac; exec /bin/cat "$@"\n')
            (own / "cat").chmod(0o755)
        self.ssh.set_host(host, f'export PATH={own}:"$PATH" HOME={own}', "unset GPUTRAIN_RUNS", noise)

    def request(
        self, *words: str, folder: Path | None = None, is_command: bool = True, **options: Any
    ) -> RemoteRequest:
        memory = [f"queue.min_free={memory}"] if (memory := options.pop("min_free", "")) else []
        config = resolve_config(None, [f"device.gpus={options.pop('gpus', 'free:1')}", *memory]).config
        folder = folder or self.folder
        return RemoteRequest(
            words, config, folder, folder / "runs", self.notes.append, is_command=is_command, **options
        )

    def start(self, host: str) -> list[str]:
        """Return working folder, runs folder, the variable KEY, and the words of the run that started on a host."""
        return (self.folder / host / "start").read_text().splitlines()

    def started_on(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/start"))


def make_snapshot(uses: Sequence[str]) -> Snapshot:
    def measured(value: object) -> Measurement[Any]:
        return Measurement(value, 1.0)

    gpus = [
        Gpu(
            index=index,
            uuid=f"GPU-{index}",
            state="ok",
            age=0.0,
            time=1.0,
            memory_used=measured(0 if use == "free" else 9 << 30),
            memory_total=measured(80 << 30),
            processes=measured(()),
            runs=("other",) if use == "reserved" else (),
        )
        for index, use in enumerate(uses)
    ]
    return Snapshot(time=1.0, host="h", source=DRIVER, driver=measured("580"), cuda=measured("13"), gpus=tuple(gpus))


@pytest.fixture
def lab(ssh: SshStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "lab"
    folder.mkdir()
    return Lab(ssh, folder)


def test_run_starts_in_shared_folder_with_words_as_typed(lab: Lab) -> None:
    lab.add("lab1")
    started = start_on("lab1", lab.request("--ngpu", "1", "--", "python", "a b.py", "$HOME"))
    assert (started.host, started.name, started.code) == ("lab1", "x-1", 0)
    words = ["run", "--detach", "--ngpu", "1", "--", "python", "a b.py", "$HOME"]
    assert lab.start("lab1") == [str(lab.folder), str(lab.folder / "runs"), "", *words]
    assert not [*lab.folder.glob(".gputrain-*")]


def test_variables_are_in_no_argument(lab: Lab) -> None:
    lab.add("lab1")
    start_on("lab1", lab.request("--", "train", environment={"KEY": "it's secret"}))
    assert lab.start("lab1")[2] == "it's secret"
    assert "secret" not in "".join(lab.ssh.calls)


def test_virtual_environment_of_this_shell_is_used(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add("lab1")
    programs = lab.folder / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "gputrain").write_text("#!/bin/sh\necho from-venv\n")
    (programs / "gputrain").chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(programs.parent))
    assert start_on("lab1", lab.request("--", "train")).name == "from-venv"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_virtual_environment_of_another_owner_there_is_not_used(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add("lab1")
    programs = lab.folder / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "gputrain").write_text("#!/bin/sh\necho from-venv\n")
    (programs / "gputrain").chmod(0o755)
    os.chown(programs, 65534, 65534)
    monkeypatch.setenv("VIRTUAL_ENV", str(programs.parent))
    assert start_on("lab1", lab.request("--", "train")).name == "from-venv"
    (lab.folder / "lab1" / "stat").write_text("#!/bin/sh\necho 7\n")
    (lab.folder / "lab1" / "stat").chmod(0o755)
    assert start_on("lab1", lab.request("--", "train")).name == "x-1"


def test_host_without_folder_refuses_command(lab: Lab) -> None:
    lab.add("far", shared=False)
    with pytest.raises(UsageError, match=r"far does not share .*--copy"):
        start_on("far", lab.request("--", "train"))
    assert not lab.started_on()


def test_host_without_folder_runs_preset_in_home(lab: Lab) -> None:
    lab.add("far", shared=False)
    start_on("far", lab.request("digits", is_command=False))
    home = str(lab.folder / "far")
    assert lab.start("far")[:2] == [home, f"{home}/runs"]


def test_copy_has_code_and_paths_lead_there(lab: Lab) -> None:
    lab.add("far", shared=False)
    code = make_repository(lab.folder / "my code", train__py="x\n", __gitignore="data\n")
    (code / "data").mkdir()
    (code / "new.py").write_text("y\n")
    words = ("--snapshot", "--", "python", str(code / "train.py"), f"--data={code / 'data'}")
    start_on("far", lab.request(*words, folder=code, copies=True))
    folder, runs, _, *started = lab.start("far")
    assert folder.startswith(f"{lab.folder}/far/gputrain-copies/my code-") and runs == f"{lab.folder}/far/runs"
    assert started == ["run", "--detach", "--", "python", f"{folder}/train.py", f"--data={code / 'data'}"]
    assert sorted(path.name for path in Path(folder).iterdir()) == [".gitignore", "new.py", "train.py"]
    assert lab.notes == ["Copying 3 files with 9 B to far; not copied: data, which --snapshot would link."]


def test_copy_of_a_refused_run_is_removed(lab: Lab) -> None:
    lab.add("far", shared=False, run="echo error: no >&2; exit 2")
    code = make_repository(lab.folder / "code", train__py="x\n")
    started = start_on("far", lab.request("--", "train", folder=code, copies=True))
    assert (started.code, started.messages) == (2, ["error: no"])
    assert not [*(lab.folder / "far" / "gputrain-copies").iterdir()]


def test_copy_without_config_is_refused(lab: Lab) -> None:
    lab.add("far", shared=False)
    code = make_repository(lab.folder / "code", __gitignore="*.yaml\n")
    (code / "a.yaml").write_text("\n")
    with pytest.raises(UsageError, match=r"^a.yaml: is not copied: git ignores it"):
        start_on("far", lab.request("a.yaml", folder=code, copies=True, files=["a.yaml"]))


def test_copy_outside_of_git_is_refused(lab: Lab) -> None:
    lab.add("far", shared=False)
    with pytest.raises(UsageError, match=r"^--copy: .* is in no git repository"):
        start_on("far", lab.request("--", "train", copies=True))


def test_refusal_of_host_is_passed_on_without_noise(lab: Lab) -> None:
    lab.add("lab1", run="echo error: no >&2; exit 2", noise="echo Welcome; echo quota >&2")
    started = start_on("lab1", lab.request("--", "train"))
    assert (started.code, started.messages) == (2, ["error: no"])


def test_escapes_of_host_are_dropped(lab: Lab) -> None:
    lab.add("lab1", run="printf 'a\\033[2J\\n' >&2; echo x-1")
    assert start_on("lab1", lab.request("--", "train")).messages == ["a\\x1b[2J"]


def test_answer_without_name_is_no_start(lab: Lab) -> None:
    lab.add("lab1", run="echo '../../etc'")
    with pytest.raises(HostUnreachableError, match="no name of a run"):
        start_on("lab1", lab.request("--", "train"))


@pytest.mark.parametrize("place", ["bare", "any:bare"])
def test_host_without_gputrain_is_told_in_a_sentence(lab: Lab, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nonexistent")
    lab.ssh.set_host("bare", "export PATH=/usr/bin:/bin HOME=/nonexistent")
    try:
        sentences = start_on(place, lab.request("--", "train")).messages
    except UsageError:
        sentences = lab.notes
    [sentence] = sentences
    assert "no gputrain in the PATH of a command over ssh" in sentence


@pytest.mark.parametrize("place", ["slurm", "ray:127.0.0.1", "any:slurm", "-oProxyCommand=x"])
def test_reserved_word_is_no_host(lab: Lab, place: str) -> None:
    with pytest.raises(UsageError):
        start_on(place, lab.request("--", "train"))
    assert not lab.ssh.calls


def test_any_takes_first_host_with_free_gpus(lab: Lab) -> None:
    lab.add("small", "free")
    lab.add("busy", "process", "free")
    lab.add("held", "reserved", "reserved")
    lab.add("free", "free", "free")
    lab.add("later", "free", "free")
    started = start_on("any:small,busy,held,gone,free,later", lab.request("--", "train", gpus="free:2"))
    assert started.host == "free"
    # Somebody else may be faster.
    assert lab.start("free")[3:] == ["run", "--detach", "--queue", "--", "train"]
    assert not lab.notes


def test_any_queues_where_fewest_wait(lab: Lab) -> None:
    lab.add("lab1", "reserved", waiting=3)
    lab.add("lab2", "process", waiting=1)
    lab.add("lab3", "process", waiting=2)
    assert start_on("any:lab1,lab2,lab3,gone", lab.request("--", "train")).host == "lab2"
    left_out, queued = lab.notes
    assert left_out.startswith("Left out: gone: ssh: Could not resolve hostname gone")
    assert "lab2 has the shortest queue (runs that wait: lab1 3, lab2 1, lab3 2)" in queued


def test_any_keeps_queue_option_as_set(lab: Lab) -> None:
    lab.add("lab1", "free")
    start_on("any:lab1", lab.request("device.wait=false", "--", "train"))
    assert "--queue" not in lab.start("lab1")


def test_any_takes_cpu_where_no_host_has_gpus(lab: Lab) -> None:
    lab.add("lab1")
    start_on("any:lab1", lab.request("digits", is_command=False, gpus="auto"))
    assert lab.start("lab1")[3:] == ["run", "--detach", "digits"]


def test_any_is_refused_where_no_host_has_enough(lab: Lab) -> None:
    lab.add("lab1", "free")
    with pytest.raises(UsageError, match="no host can start a run with --gpus free:2"):
        start_on("any:lab1", lab.request("--", "train", gpus="free:2"))
    assert lab.notes == ["Left out: lab1: 2 free GPUs requested, but only 1 can be used."]


def test_any_says_once_that_there_is_no_ssh(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="no host can start a run"):
        start_on("any:lab1,lab2", lab.request("--", "train"))
    assert lab.notes == ["Left out: ssh cannot be started: No such file or directory."]


def test_any_counts_reserved_memory(lab: Lab) -> None:
    lab.add("lab1", "reserved")
    snapshot = make_snapshot(["free"])
    gpu = replace(snapshot.gpus[0], runs=("other",), reserved_by_runs=60 << 30)
    (lab.folder / "lab1" / "gpus").write_bytes(encode(replace(snapshot, gpus=(gpu,))))
    for memory, is_free in (("19G", True), ("21G", False), ("", False)):
        lab.notes.clear()
        start_on("any:lab1", lab.request("--", "train", min_free=memory))
        assert (lab.notes == []) is is_free, memory


def test_any_without_hosts_names_setting(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(UsageError, match=r"set hosts: \[lab1, lab2\] in .*settings.yaml, or type --on any:lab1,lab2"):
        start_on("any", lab.request("--", "train"))


def test_any_reads_hosts_of_settings(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "config" / "gputrain" / "settings.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("hosts: [lab2, lab1]\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lab.add("lab1", "free")
    lab.add("lab2", "free")
    assert start_on("any", lab.request("--", "train")).host == "lab2"
