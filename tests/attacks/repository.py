"""Repositories of the attacker and one that the victim has unpacked name programs that git runs; a run of the attacker
has recorded code that leads to files of the victim."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from attack import Stage, perform

from engine.base.codec import replace
from engine.runs.events import RunFinished
from engine.runs.journal import to_line

sys.path.append(str(Path(__file__).parent.parent))

from support.runs.event_factories import make_run_started

MAKE = """
import pathlib, subprocess, sys
folder, marker = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir()
folder.chmod(0o755)
(folder / "train.py").write_text("x = 1\\n")
(folder / ".gitattributes").write_text("*.py filter=evil diff=evil\\n")
git = ("git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(folder))
for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
    subprocess.run([*git, *arguments], check=True)
(folder / "train.py").write_text("x = 2\\n")
for name in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "filter.evil.clean", "filter.evil.smudge"):
    subprocess.run([*git, "config", name, f"touch {marker}"], check=True)
"""
# A run of the attacker whose recorded code names files of the victim. Its diff is given as [path, mode, content].
PLANT = """
import json, os, pathlib, sys
name, root, secret, start, files = sys.argv[1:]
run = pathlib.Path("runs", name)
(run / "code" / "untracked").mkdir(parents=True)
for folder in (run, run / "code", run / "code" / "untracked"):
    folder.chmod(0o755)
(run / "config.yaml").write_text("run: {}\\n")
(run / "lock").touch()
(run / "events.jsonl").write_text(start)
os.symlink(os.path.dirname(secret), run / "code" / "untracked" / "sub")
patch, changed = "", {}
for path, mode, content in json.loads(files):
    patch += f"diff --git a/{path} b/{path}\\nnew file mode {mode}\\n--- /dev/null\\n+++ b/{path}\\n"
    patch += f"@@ -0,0 +1 @@\\n+{content}\\n\\\\ No newline at end of file\\n"
    changed[path] = "1"
(run / "code" / "changes.patch").write_text(patch)
untracked = {"../" * 20 + secret.lstrip("/"): "1", "sub/" + os.path.basename(secret): "1"}
digests = {"commit": "", "changed": changed, "untracked": untracked}
record = {"format": 1, "root": root, "folder": ".", "digests": digests}
(run / "code" / "code.json").write_text(json.dumps(record))
"""
RUN = ("run", "--headless", "--gpus", "cpu")


def attack(stage: Stage) -> None:
    marker = stage.shared / "executed"
    stage.as_attacker(MAKE, stage.shared / "repository", marker)
    marker.unlink(missing_ok=True)
    done = stage.gputrain(*RUN, "--name", "foreign", "--cwd", stage.shared / "repository", "--", "true")
    stage.gained(done.returncode != 0, f"stopped the victim's run: {done.stderr}")
    refused = stage.gputrain(*RUN, "--snapshot", "--cwd", stage.shared / "repository", "--", "true")
    stage.gained(refused.returncode == 0, "had its repository copied, which git does not trust")
    stage.gained(marker.exists(), "executed code through its own repository")

    own = stage.home / "unpacked"
    shutil.copytree(stage.shared / "repository", own)
    for folder, _, names in os.walk(own):
        for name in ("", *names):
            os.chown(Path(folder) / name, os.geteuid(), os.getegid())
    for flags in ((), ("--snapshot",)):
        done = stage.gputrain(*RUN, *flags, "--cwd", own, "--", "true")
        assert done.returncode == 0, done.stderr
    stage.gained(marker.exists(), "executed code through a repository that the victim has unpacked")

    compare_planted_runs(stage, own)


def compare_planted_runs(stage: Stage, own: Path) -> None:
    """Compare a run of the victim with runs whose recorded code the attacker has written."""
    secret = stage.home / "secret.txt"
    secret.write_text("HIDDEN\n")
    done = stage.gputrain(*RUN, "--name", "mine", "--cwd", own, "--", "true")
    assert done.returncode == 0, done.stderr
    (stage.shared / "runs").chmod(0o1777)
    link = ("link", "120000", str(stage.home))
    # git applies the diffs of the first two, and refuses each of the others as a whole.
    refused = {"behind_link": "link/planted", "hook": ".git/hooks/post-checkout", "above": "../planted"}
    planted = {"file": [("planted.py", "100644", "PLANTED")], "link": [link]}
    planted |= {name: [link, (path, "100755", "PLANTED")] for name, path in refused.items()}
    planted |= {"absolute": [(str(own.parent / "planted"), "100755", "PLANTED")]}
    for name, files in planted.items():
        events = replace(make_run_started(), name=name), RunFinished(state="finished")
        journal = "".join(to_line(event) + "\n" for event in events)
        stage.as_attacker(PLANT, name, own, secret, journal, json.dumps(files))
        compared = stage.gputrain("compare", "mine", name, "--trust-owner")
        output = compared.stdout + compared.stderr
        stage.gained(f"Code of {name}" not in compared.stdout, f"hid its code: {output}")
        stage.gained("HIDDEN" in output, f"had a file of the victim shown as its code: {name}")
        assert ("In its place" not in compared.stdout) is (name in ("file", "link")), output
    names = (".git/hooks/post-checkout", "link", "planted.py", "planted", "../planted")
    written = [folder / name for folder in (own, stage.home) for name in names]
    stage.gained(any(map(os.path.lexists, written)), "wrote a file through its recorded diff")


if __name__ == "__main__":
    perform(attack)
