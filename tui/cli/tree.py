"""The tree of commands: where each one is, and its line of help.

A command is imported when it is called or its own help is shown: the help of `gputrain` needs this table alone.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN, RUNS, RESULTS, PREPARE = TOP_PANELS = "Train", "Runs", "Results", "Prepare"
"""Groups of commands, in the order of `gputrain --help`."""


@dataclass(frozen=True)
class Entry:
    """A command: `module:name` of its `Subcommand` in `tui.cli`, and the first sentence of its help.

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
    "run": Word(TRAIN, "Train an image classifier, or run any other program."),
    "resume": Word(TRAIN, "Resume a run from its last checkpoint, or start its command again."),
    "sweep": Word(TRAIN, "Search the best values of config keys or script arguments.", "run"),
    "lr-find": Word(TRAIN, "Find a learning rate with a short test."),
    "bench": Word(TRAIN, "Measure how training scales with the number of GPUs or CPU ranks."),
    "runs": Word(RUNS, "List, filter, label, control, rename and delete runs.", "list"),
    "attach": Word(RUNS, "Open the screen of a run, or the comparison of several."),
    "watch": Word(RUNS, "Watch what other programs log below a path, or one process."),
    "wait": Word(RUNS, "Wait until runs have ended."),
    "logs": Word(RUNS, "Print the log of a run."),
    "stop": Word(RUNS, "Stop runs at their next step and save checkpoints."),
    "compare": Word(RUNS, "Compare runs: the config keys that differ, and their results."),
    "queue": Word(RUNS, "List the waiting runs, and change their order.", "list"),
    "evaluate": Word(RESULTS, "Evaluate a trained model on its validation set."),
    "predict": Word(RESULTS, "Predict classes, labels or numbers of images."),
    "export": Word(RESULTS, "Export a trained model for other programs, and check it."),
    "report": Word(RESULTS, "Write a report of runs as one HTML file, or as a figure."),
    "config": Word(PREPARE, "Print the resolved config, or describe its keys.", "show"),
    "data": Word(PREPARE, "Show classes and images of a dataset, or pack it into tar shards.", "show"),
    "models": Word(PREPARE, "List the available models, or print the layers of one.", "list"),
    "gpus": Word(PREPARE, "Show GPU utilization, memory, power, temperature and users."),
    "doctor": Word(PREPARE, "Check this host for problems that affect training."),
    "clean": Word(PREPARE, "Delete caches and what dead runs left, after a question."),
}
"""First words in the order of the help."""

COMMANDS = {
    "run": Entry("train:run", WORDS["run"].summary, needs_torch=True),
    "resume": Entry("resume:resume", WORDS["resume"].summary),
    "sweep run": Entry("sweep:run", "Search the best values of config keys or script arguments.", needs_torch=True),
    "sweep list": Entry("sweep:list_sweeps", "List sweeps, the latest result first."),
    "sweep show": Entry("sweep:show", "List the trials of a sweep."),
    "sweep stop": Entry("sweep:stop", "Stop a sweep and its trials."),
    "sweep resume": Entry("sweep:resume", "Continue a sweep with its settings."),
    "lr-find": Entry("lr_find:lr_find", WORDS["lr-find"].summary, needs_torch=True),
    "bench": Entry("bench:bench", WORDS["bench"].summary, needs_torch=True),
    "runs list": Entry("run_list:list_runs", "List runs, newest first."),
    "runs show": Entry("runs:show", "Print what is known about a run."),
    "runs tag": Entry("run_labels:tag", "Add or remove tags of runs; without tags, print them."),
    "runs note": Entry("run_labels:note", "Set the note of a run, or print it."),
    "runs rename": Entry("run_labels:rename", "Rename a run that has ended."),
    "runs archive": Entry("run_labels:archive", "Leave runs out of lists; their files stay."),
    "runs unarchive": Entry("run_labels:unarchive", "List archived runs again."),
    "runs delete": Entry("run_labels:delete", "Move runs that have ended to the trash."),
    "runs restore": Entry("run_labels:restore", "Move a run from the trash back."),
    "runs trash": Entry("run_labels:trash", "List the trash, or empty it."),
    "runs better": Entry("run_labels:better", "Set which values of one of your own metrics are better."),
    "runs pause": Entry("run_control:pause", "Pause live runs at their next step."),
    "runs continue": Entry("run_control:continue_runs", "Continue paused runs."),
    "runs checkpoint": Entry("run_control:checkpoint", "Save checkpoints of live runs now."),
    "runs profile": Entry("run_control:profile", "Profile training steps of a live run."),
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
    "config show": Entry("config:show", "Print the resolved config."),
    "config describe": Entry("config:describe", "Describe config keys: choices and default."),
    "data show": Entry("data:show", "Show classes and images of a dataset before training.", needs_torch=True),
    "data pack": Entry("data:pack", "Pack an image folder into tar shards that load fast."),
    "models list": Entry("models:list_models", "List the available models."),
    "models show": Entry(
        "models:show", "Print the layers of a model: shapes, parameters, multiply-adds.", needs_torch=True
    ),
    "gpus": Entry("machine:gpus", WORDS["gpus"].summary),
    "doctor": Entry("machine:doctor", WORDS["doctor"].summary),
    "clean": Entry("machine:clean", WORDS["clean"].summary),
}
"""Every command by its words."""


def subcommands(word: str) -> list[str]:
    """Return the commands of a group, in the order of its help."""
    return [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{word} ")]
