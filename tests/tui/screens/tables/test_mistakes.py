"""Lines of the lists of images, and the facts about one image."""

from __future__ import annotations

import math

from rich.cells import cell_len

from engine.report.table import fit, line_text
from support.runs.inspections import make_info, make_inspection
from tui.screens.tables.mistakes import fact_lines, format_probability, image_columns

NAMES = ("a class with a long name", "犬の種類", "owl\x1b[2J")


def test_format_probability_shows_only_exact_0_and_1_as_such() -> None:
    probabilities = (0.0, 1e-9, 0.00005, 0.5, 0.99996, 1.0, math.nan)
    shown = [format_probability(probability) for probability in probabilities]
    assert shown == ["0.00%", "<0.01%", "0.01%", "50.00%", ">99.99%", "100.00%", "–"]


def test_image_line_begins_with_the_figure_of_its_list_and_has_the_end_of_a_path() -> None:
    paths = ["a/犬.jpg", "b/long\x1b name.jpg"]
    inspection = make_inspection([[0.2, 0.5, 0.3], [math.nan] * 3], [0, 2], paths=paths, info={"classes": NAMES})
    images = inspection.images(range(2))
    wide = line_text(fit(image_columns("uncertain", NAMES), images, 140).line(images[0]))
    assert wide.split()[:4] == ["0.2000", "1.6094", "50.00%", "20.00%"]
    assert "a class with a long name → 犬の種類" in wide
    assert "ame.jpg" in line_text(fit(image_columns("cell", NAMES), images, 38).line(images[1]))


def test_fact_lines_fit_width_with_long_path() -> None:
    inspection = make_inspection([[0.2, 0.5, 0.3]], [0], paths=["photo/" * 60 + "last.jpg"], info={"classes": NAMES})
    lines = fact_lines(inspection.image(0), make_info(classes=NAMES), 34)
    assert all(cell_len(line.plain) <= 34 for line in lines)
    assert len(lines) <= 8
    assert lines[-1].plain.endswith("last.jpg")
