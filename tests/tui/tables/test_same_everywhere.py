"""A metric has the same label and the same text wherever it is shown: the registry says which ones are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape

import pytest

from engine.report.page import make_page
from engine.runs.columns import known_columns
from engine.runs.folder import RunFolder
from engine.runs.metrics import METRICS, format_metric
from engine.runs.run_row import RunRow
from engine.show.charts import find_chart
from engine.utils.units import UNKNOWN
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started, make_step
from support.runs.factories import make_run_folder, row_of
from support.runs.trained_run import call
from tui.charts.plot import PlotWindow
from tui.tables import styled
from tui.tables.preview import RunPreview, figure_lines
from tui.tables.runs import fit_run_list, run_list_line

RECORDED = [key for key, metric in METRICS.items() if metric.is_recorded]
# The list of runs shows `3/10` in this column, so that a run that trains shows how far it is.
OF_TOTAL = METRICS["epochs"].label


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    epochs = [replace(make_epoch(number, 0.1 * number, 10.0 * number), data_wait=0.125) for number in (1, 2, 3)]
    return make_run_folder(root, "a", make_run_started(), make_step(10), *epochs)


@pytest.fixture(scope="module")
def row(run: RunFolder) -> RunRow:
    return row_of(run)


def cells(header: str, line: str) -> dict[str, str]:
    """Map titles to cells, which are two blanks apart."""
    return dict(zip(re.split(r"  +", header.strip()), re.split(r"  +", line.strip()), strict=True))


def shown_by_command(run: RunFolder) -> Mapping[str, str]:
    result = call("runs", "--columns", ",".join(RECORDED), "--runs-dir", run.path.parent)
    return cells(*result.stdout.splitlines())


def shown_by_list(row: RunRow) -> Mapping[str, str]:
    table = fit_run_list([row], 1000, known_columns(RECORDED))
    return cells(styled(table.header()).plain, styled(run_list_line(table, row)).plain)


def shown_by_preview(row: RunRow) -> Mapping[str, str]:
    preview = RunPreview(row.folder, {}, PlotWindow(0.0, 1.0), row.record, ())
    text = "\n".join(line.plain.rstrip() for line in figure_lines(row, preview, 200))
    labels = "|".join(re.escape(METRICS[key].label) for key in RECORDED)
    return dict(re.findall(rf"(?:^|   )({labels}) +(\S+)", text, re.MULTILINE))


def shown_by_show(run: RunFolder) -> Mapping[str, str]:
    lines = call("runs", "show", run.path).stdout.splitlines()
    return dict(parts for line in lines if len(parts := re.split(r"  +", line.strip())) == 2)


def shown_by_compare(run: RunFolder) -> Mapping[str, str]:
    lines = call("compare", "a", "--runs-dir", run.path.parent).stdout.splitlines()
    return dict(parts for line in lines if len(parts := re.split(r"  +", line.strip())) == 2)


def shown_by_report(run: RunFolder) -> Mapping[str, str]:
    found = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", make_page([run]))
    return {unescape(label): unescape(text) for label, text in found}


def test_metric_has_one_label_and_one_text_in_all_places(run: RunFolder, row: RunRow) -> None:
    places = {
        "runs": shown_by_command(run),
        "list": shown_by_list(row),
        "preview": shown_by_preview(row),
        "show": shown_by_show(run),
        "compare": shown_by_compare(run),
        "report": shown_by_report(run),
    }
    values = {METRICS[key].label: (METRICS[key], METRICS[key].of_run(row.record)) for key in RECORDED}
    texts = {
        label: UNKNOWN if value is None else format_metric(metric, value) for label, (metric, value) in values.items()
    }
    shown = {name: texts.keys() & labels for name, labels in places.items()}
    assert shown["runs"] == shown["list"] == texts.keys()
    known = {label for label, (_, value) in values.items() if value is not None}
    assert shown["show"] == known
    assert len(shown["preview"]) >= 8 and len(shown["compare"]) >= 10 and len(shown["report"]) >= 12, shown
    for name, labels in shown.items():
        for label in labels:
            text = places[name][label]
            if label == OF_TOTAL:
                text = text.partition("/")[0]
            assert text == texts[label], (name, label)


@pytest.mark.parametrize("key", [key for key, metric in METRICS.items() if metric.epoch is not None])
def test_plot_names_curve_as_lists_name_metric(key: str) -> None:
    assert find_chart(key).title == METRICS[key.removeprefix("best_")].label


def test_report_heads_epochs_with_labels_of_registry(run: RunFolder) -> None:
    heads = [unescape(head) for head in re.findall(r'<th scope="col">([^<]*)</th>', make_page([run]))]
    labels = [metric.label for metric in METRICS.values() if metric.epoch is not None and metric.label in heads]
    start = heads.index("epoch") + 1
    assert heads[start : start + len(labels)] == labels and {"val acc", "val top-5", "lr"} <= set(labels)


def test_labels_tell_metrics_apart() -> None:
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
