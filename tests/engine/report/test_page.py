"""The page of a report: what it says, that it is self-contained, and that the same run gives the same page."""

from __future__ import annotations

import base64
import json
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.report.page import make_page
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.run_config import changed_values, read_changed_config
from support.gputrain_command import ROOT
from support.runs.compared_runs import make_compared_run
from support.runs.event_factories import make_epoch, make_run_started, make_step
from support.runs.factories import make_run_folder, write_config

HOSTILE = '<script>alert(1)</script> ](x) "quoted" \u202e\x1b[31m'
URL_ATTRIBUTES = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """Tags with their attributes, the visible text, and the ids of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value is not None]

    def charts(self) -> list[str]:
        """Return the charts as SVG."""
        pictures = [str(attributes["src"]) for _, attributes in self.tags if attributes.get("class") == "chart"]
        return [base64.b64decode(picture.partition(",")[2]).decode() for picture in pictures]

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture
def kept_run(tmp_path: Path) -> RunFolder:
    ignored = shutil.ignore_patterns("inspection.npz")
    run = RunFolder(shutil.copytree(ROOT / "tests/recordings/format-1/kept", tmp_path / "kept", ignore=ignored))
    events = [json.loads(line) for line in run.journal.read_text().splitlines()]
    # The wait for data depends on the host that recorded the run.
    events = [event | {"data_wait": 0.27, "work": []} if event["type"] == "epoch" else event for event in events]
    run.journal.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def test_page_of_one_run_is_complete_and_reproducible(kept_run: RunFolder) -> None:
    source = make_page([kept_run])
    page = Page(source)
    assert make_page([kept_run]) == source
    text = " ".join(page.text.split())
    started = json.loads(kept_run.journal.read_text().splitlines()[0])
    best = f"best val acc {json.loads(kept_run.summary.read_text())['best_val_accuracy']:.4f}"
    for part in (best, "lr", "Confusion matrix", "waiting for data 27% of the time"):
        assert part in text
    for part in (
        started["versions"]["torch"],
        "schedule.warmup_epochs=1.0",
    ):
        assert part in text
    assert len(page.charts()) == 4


def test_page_loads_nothing_and_runs_nothing(kept_run: RunFolder, tmp_path: Path) -> None:
    page = Page(make_page([kept_run, make_compared_run(tmp_path, "other")]))
    assert not {"script", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert "http:" not in str(attributes) and "https:" not in str(attributes)
        urls = {value for name, value in attributes.items() if name in URL_ATTRIBUTES and value}
        assert all(url.startswith(("data:", "#")) for url in urls)
    assert sorted(page.ids) == sorted(set(page.ids))
    (policy,) = [dict(attributes)["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert policy is not None and policy.startswith("default-src 'none';")


def test_page_shows_hostile_names_as_text(tmp_path: Path) -> None:
    events = (make_run_started(), WarningEvent(time=1.0, message=HOSTILE, code="bad-image"), make_epoch(1))
    run = make_run_folder(tmp_path, "a", *events, RunFinished(time=9.0, state="failed", message=HOSTILE))
    write_config(run, {"data": {"path": HOSTILE}})
    evaluation = {"epoch": 1, "loss": 1.0, "top1": 0.5, "top5": 1.0, "images": 4, "per_class": [0.5, 0.5]}
    evaluation |= {"confusion": {"layout": "dense", "rows": [[1, 1], [1, 1]]}}
    classes = [HOSTILE, "cat"]
    content = {"format": 1, "classes": classes, "last": evaluation, "best": evaluation}
    run.evaluation.write_text(json.dumps(content))
    run.labels.write_text(json.dumps({"format": 1, "tags": [], "note": HOSTILE}))
    source = make_page([run])
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script> ](x)") >= 5
    assert "\u202e" not in source and "\x1b" not in source
    images = [
        attributes["src"] for _, attributes in page.tags if attributes.get("class") != "chart" and "src" in attributes
    ]
    assert len(images) == 1 and all(str(image).startswith("data:image/png;base64,") for image in images)


def test_page_of_several_runs_has_differences_and_seed_groups(tmp_path: Path) -> None:
    runs = [make_compared_run(tmp_path, f"seed-{seed}", seed=seed) for seed in range(2)]
    page = Page(make_page([*runs, make_compared_run(tmp_path, "fast", lr=0.4)]))
    text = " ".join(page.text.split())
    assert "3 runs compared" in text and "run.seed optim.lr" in text
    assert "mean ± standard deviation of seed-0, seed-1 (seeds)" in text


@pytest.mark.parametrize("events", [(), (make_run_started(),), (make_run_started(), make_step(1))])
def test_page_of_run_without_epoch(events: tuple[object, ...], tmp_path: Path) -> None:
    text = Page(make_page([make_run_folder(tmp_path, "a", *events)])).text  # type: ignore[arg-type]
    assert "The run has no evaluation yet" in text


def test_repeat_command_resolves_to_the_config_of_the_run(kept_run: RunFolder) -> None:
    from engine.report.lines import read_reported_run
    from engine.report.sections import repeat_command

    command = repeat_command(read_reported_run(kept_run))
    words = shlex.split(command.replace("\\\n", ""))
    resolved = resolve_config(None, words[2:]).config
    assert changed_values(as_stored(resolved)) == read_changed_config(kept_run.config)
