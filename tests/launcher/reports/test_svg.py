"""Colors that can be seen on light and dark screens, and charts that show their values."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from ngsgd.launcher.reports import svg
from ngsgd.launcher.reports.plots import new_figure
from ngsgd.launcher.reports.svg import PALETTE, SURFACES, Spot, contrast, inline_svg, strips


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("color", PALETTE)
def test_lines_have_contrast_to_the_card_and_to_the_page(color: str, mode: int) -> None:
    for surface in ("card", "back"):
        assert contrast(PALETTE[color][mode], SURFACES[surface][mode]) >= 3.0


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(mode: int) -> None:
    # colors of verdicts and differing words are text, too
    for ink in (
        SURFACES["ink"],
        SURFACES["soft"],
        *(PALETTE[name] for name in ("green", "orange", "red", "blue")),
    ):
        assert contrast(ink[mode], SURFACES["card"][mode]) >= 4.5


def chart() -> str:
    with svg.themed():
        figure = new_figure(4.0, 3.0)
        axes = figure.subplots()
        axes.plot([0.0, 1.0, 2.0], [3.0, 4.0, 5.0], color=svg.BLUE)
    spots = [
        *strips([0.0, 1.0, 2.0], [("a <b>",), ("c",), ("d",)]),
        Spot(0.0, 1.0, ("box",), 3.0, 4.0),
    ]
    return inline_svg(figure, spots, name="chart", alt='three "points"')


def test_a_chart_is_an_element_with_values_and_colors_of_the_page() -> None:
    text = chart()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == 'three "points"' and root.get("role") == "img"
    assert root.get("width") is None and root.get("viewBox")
    found = [one for one in root.iter() if one.get("class") == "spot"]
    assert ["".join(one.itertext()) for one in found] == ["a <b>", "c", "d", "box"]
    assert "var(--blue)" in text and "var(--ink)" in text
    assert not any(light in text for light, _ in PALETTE.values())
    ids = [value for one in root.iter() if (value := one.get("id"))]
    assert len(ids) == len(set(ids)) and all(one.startswith("chart-") for one in ids)
    assert chart() == text


def test_a_spot_lies_over_its_point() -> None:
    hits = [one for one in ElementTree.fromstring(chart()).iter() if one.get("class") == "hit"]
    lefts, widths = ([float(hit.get(name, "nan")) for hit in hits] for name in ("x", "width"))
    assert lefts[0] < lefts[1] < lefts[2]
    assert lefts[0] + widths[0] == pytest.approx(lefts[1], abs=0.11)
    box = hits[3]
    assert float(box.get("height", "nan")) == pytest.approx(
        float(hits[0].get("height", "nan")) / 2.2, abs=0.2
    )


def test_a_long_curve_has_a_bounded_number_of_spots_and_keeps_its_end() -> None:
    places = [float(place) for place in range(1000)]
    spots = strips(places, [(str(place),) for place in places], most=80)
    assert len(spots) <= 80 and spots[-1].lines == ("999.0",)
    assert all(before.right == after.left for before, after in itertools.pairwise(spots))
