"""The tree of commands: where each one is, its line of help, and what was meant by a word that is none.

A command is imported when it is called or its own help is shown: the help of `gputrain` needs this table alone.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN, PREPARE, RUNS, RESULTS, MACHINE = "Train", "Prepare", "Runs", "Results", "Machine"
"""Groups of commands, in the order of `gputrain --help`."""


@dataclass(frozen=True)
class Entry:
    """A command: `module:name` of its `Command` in `tui.cli`, and the first sentence of its help.

    With `needs_torch`, it is refused where the extra `train` is not installed."""

    target: str
    summary: str
    needs_torch: bool = False


@dataclass(frozen=True)
class Word:
    """The first word of a command line: a command, or a group that runs its `default` unless another one is typed."""

    panel: str
    summary: str
    default: str = ""


WORDS = {
    "run": Word(TRAIN, "Train a model, or run the command of another program."),
    "resume": Word(TRAIN, "Resume a run from its last checkpoint, or start its command again."),
    "sweep": Word(TRAIN, "Search the best values of config keys or script arguments.", "run"),
    "lr-find": Word(TRAIN, "Find a learning rate with a short test."),
    "bench": Word(TRAIN, "Measure how training scales with the number of GPUs or CPU ranks."),
    "config": Word(PREPARE, "Print the resolved config, or describe its keys.", "show"),
    "data": Word(PREPARE, "Show classes and images of a dataset, or pack it into one file.", "show"),
    "models": Word(PREPARE, "List the available models, or print the layers of one.", "list"),
    "runs": Word(RUNS, "List, filter, label, control, rename and delete runs.", "list"),
    "attach": Word(RUNS, "Open the screen of a run, or the comparison of several."),
    "watch": Word(RUNS, "Watch the runs that other trainers write below a path, or a process."),
    "wait": Word(RUNS, "Wait until runs have ended."),
    "logs": Word(RUNS, "Print the log of a run."),
    "stop": Word(RUNS, "Stop runs at their next step and save checkpoints."),
    "compare": Word(RUNS, "Compare runs: the config keys that differ, and their results."),
    "queue": Word(RUNS, "List the waiting runs, and change their order.", "list"),
    "evaluate": Word(RESULTS, "Evaluate a trained model on its validation set."),
    "predict": Word(RESULTS, "Classify images with a trained model, or extract their features."),
    "export": Word(RESULTS, "Export a trained model for other programs, and check it."),
    "report": Word(RESULTS, "Write a report of runs as one HTML file, or as a figure."),
    "gpus": Word(MACHINE, "Show GPU utilization, memory, power, temperature and users."),
    "doctor": Word(MACHINE, "Check this host for problems that affect training."),
}
"""First words in the order of the help."""

COMMANDS = {
    "run": Entry("train:run", WORDS["run"].summary, needs_torch=True),
    "resume": Entry("resume:resume", WORDS["resume"].summary),
    "sweep run": Entry("sweep:run", "Search the best values of config keys or script arguments.", needs_torch=True),
    "sweep list": Entry("sweep:list_sweeps", "List sweeps, the latest result first."),
    "sweep show": Entry("sweep:show", "List the trials of a sweep, and what matters."),
    "sweep stop": Entry("sweep:stop", "Stop a sweep and its trials."),
    "sweep resume": Entry("sweep:resume", "Continue a sweep with its settings."),
    "lr-find": Entry("lr_find:lr_find", WORDS["lr-find"].summary, needs_torch=True),
    "bench": Entry("bench:bench", WORDS["bench"].summary, needs_torch=True),
    "config show": Entry("config:show", "Print the resolved config."),
    "config describe": Entry("config:describe", "Describe config keys: choices and default."),
    "data show": Entry("data:show", "Show classes and images of a dataset before training.", needs_torch=True),
    "data pack": Entry("pack:pack", "Pack an image folder into one file that loads fast."),
    "data verify": Entry("pack:verify", "Check every byte of a packed set."),
    "models list": Entry("models:list_models", "List the available models."),
    "models show": Entry(
        "models:show", "Print the layers of a model: shapes, parameters, multiply-adds.", needs_torch=True
    ),
    "runs list": Entry("run_list:list_runs", "List runs, newest first."),
    "runs show": Entry("run_show:show", "Print what is known about a run."),
    "runs tag": Entry("run_labels:tag", "Add or remove tags of runs; without tags, print them."),
    "runs note": Entry("run_labels:note", "Set the note of a run, or print it."),
    "runs rename": Entry("run_labels:rename", "Rename a run that has ended."),
    "runs archive": Entry("run_labels:archive", "Leave runs out of lists; their files stay."),
    "runs unarchive": Entry("run_labels:unarchive", "List archived runs again."),
    "runs delete": Entry("run_labels:delete", "Move runs that have ended to the trash."),
    "runs restore": Entry("run_labels:restore", "Move a run from the trash back."),
    "runs trash": Entry("run_labels:trash", "List the trash, or empty it."),
    "runs better": Entry("run_labels:better", "Say which values of one of your own metrics are better."),
    "runs pause": Entry("run_control:pause", "Pause live runs at their next step."),
    "runs continue": Entry("run_control:continue_runs", "Continue paused runs."),
    "runs checkpoint": Entry("run_control:checkpoint", "Save checkpoints of live runs now."),
    "runs profile": Entry("profile:profile", "Profile training steps of a live run."),
    "runs sync": Entry("sync:sync", "Copy runs to Weights & Biases or MLflow."),
    "attach": Entry("runs:attach", WORDS["attach"].summary),
    "watch": Entry("watch:watch", WORDS["watch"].summary),
    "wait": Entry("wait:wait", WORDS["wait"].summary),
    "logs": Entry("runs:logs", WORDS["logs"].summary),
    "stop": Entry("run_control:stop", WORDS["stop"].summary),
    "compare": Entry("compare:compare", WORDS["compare"].summary),
    "queue list": Entry("queue:list_queue", "List the waiting runs of all users."),
    "queue begin": Entry("queue:begin", "Change the time before which a waiting run does not start."),
    "queue hold": Entry("queue:hold", "Keep a waiting run from starting until it is released."),
    "queue release": Entry("queue:release", "Let a held run start again."),
    "queue move": Entry("queue:move", "Change the order of your own waiting runs."),
    "queue priority": Entry("queue:priority", "Set the priority of a run among your own waiting runs."),
    "queue resume": Entry("queue:resume", "Start the runs again that a reboot interrupted."),
    "evaluate": Entry("evaluate:evaluate", WORDS["evaluate"].summary),
    "predict": Entry("predict:predict", WORDS["predict"].summary, needs_torch=True),
    "export": Entry("export:export", WORDS["export"].summary, needs_torch=True),
    "report": Entry("report:report", WORDS["report"].summary),
    "gpus": Entry("machine:gpus", WORDS["gpus"].summary),
    "doctor": Entry("machine:doctor", WORDS["doctor"].summary),
}
"""Every command by its words."""

GUESSES = {
    "cancel": "gputrain stop RUN",
    "exec": "gputrain run -- COMMAND",
    "eval": "gputrain evaluate RUN",
    "features": "gputrain predict RUN PATH --features LAYER -o FILE",
    "follow": "gputrain logs RUN -f",
    "inspect": "gputrain evaluate RUN --list mistakes",
    "kill": "gputrain stop RUN",
    "list": "gputrain runs",
    "ls": "gputrain runs",
    "monitor": "gputrain-tui",
    "notify": "gputrain doctor --send-test-message",
    "pack": "gputrain data pack FOLDER -o FILE",
    "plot": "gputrain report RUN -o curves.pdf",
    "profile": "gputrain runs profile RUN",
    "ps": "gputrain runs",
    "rm": "gputrain runs delete RUN",
    "show": "gputrain runs show RUN",
    "summary": "gputrain models show MODEL",
    "sync": "gputrain runs sync RUN --service mlflow",
    "tail": "gputrain logs RUN -f",
    "tensorboard": "gputrain watch PATH",
    "top": "gputrain-tui",
    "train": "gputrain run CONFIG",
    "queue cancel": "gputrain stop RUN",
    "queue rm": "gputrain stop RUN",
    "queue stop": "gputrain stop RUN",
    "runs attach": "gputrain attach RUN",
    "runs cancel": "gputrain stop RUN",
    "runs kill": "gputrain stop RUN",
    "runs logs": "gputrain logs RUN",
    "runs ls": "gputrain runs",
    "runs resume": "gputrain resume RUN",
    "runs rm": "gputrain runs delete RUN",
    "runs stop": "gputrain stop RUN",
    "runs wait": "gputrain wait RUN",
    "sweep ls": "gputrain sweep list",
}
"""What was meant by words that are no command."""

OPTION_GUESSES = {
    "config --describe": "gputrain config describe",
    "data --images": "--per-class",
    "data --part": "--split",
    "compare --low-bandwidth": "gputrain attach RUN RUN --low-bandwidth",
    "compare --screen": "gputrain attach RUN RUN",
    "data pack --verify": "gputrain data verify FILE",
    "data pack --workers": "--threads",
    "bench --limit": "--synthetic-data",
    "bench --strong": "--scaling strong",
    "evaluate --device": "--gpus",
    "evaluate --limit": "--count",
    "evaluate --part": "--split",
    "evaluate --raw": "--no-ema",
    "export --images": "--check-images",
    "export --raw": "--no-ema",
    "gpus --samples": "--count",
    "lr-find --wait": "--queue",
    "models show --batch-size": "--forward-batch",
    "models show --features": "--stages",
    "predict --device": "--gpus",
    "predict --layer": "--features",
    "predict --raw": "--no-ema",
    "run --wait": "--queue",
    "runs --limit": "--count",
    "runs restore --name": "gputrain runs restore RUN NAME",
    "runs sync --to": "--service",
    "sweep --metric": "--maximize or --minimize",
    "sweep --resume": "gputrain sweep resume NAME",
    "sweep --seed": "--sampler-seed or run.seed=N",
}
"""What was meant by options that a command does not have."""


def subcommands(word: str) -> list[str]:
    """Return the commands of a group, in the order of its help."""
    return [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{word} ")]
