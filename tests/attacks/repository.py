"""Repositories of the attacker, and one that the victim has unpacked, name programs that git runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from attack import Stage, perform

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
    for flags in ((), ("--snapshot",), ("--needed",)):
        done = stage.gputrain(*RUN, *flags, "--cwd", own, "--", "true")
        assert done.returncode == 0, done.stderr
    stage.gained(marker.exists(), "executed code through a repository that the victim has unpacked")

    # A filter behind more settings than are read.
    many = f"x = {'x' * 1000}\n" * 1100
    with (own / ".git" / "config").open("a") as config:
        config.write(f'[filter "a"]\n{many}[filter "late"]\nclean = touch {marker}\n')
    (own / ".gitattributes").write_text("*.py filter=late\n")
    done = stage.gputrain(*RUN, "--cwd", own, "--", "true")
    stage.gained(done.returncode != 0, f"stopped the victim's run: {done.stderr}")
    stage.gained(marker.exists(), "executed a filter behind settings that are too large to read")


if __name__ == "__main__":
    perform(attack)
