"""The pages of `ngsgd report` and `ngsgd compare` in a browser: legible, and nothing is cut off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ngsgd.launcher import cli
from ngsgd.launcher.reports.page import COLORS
from tests.launcher.reports import browser
from tests.launcher.reports.test_report import make_run


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_and_marks_have_contrast(mode: int) -> None:
    bright = {name: luminance(pair[mode]) + 0.05 for name, pair in COLORS.items()}
    for name in ("ink", "soft", "green", "orange", "red", "blue"):
        ratio = bright[name] / bright["card"]
        assert max(ratio, 1 / ratio) >= 4.5, name


@pytest.mark.services
@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
@pytest.mark.parametrize(("width", "height", "is_phone"), [(1280, 900, False), (390, 844, True)])
def test_pages_are_readable_on_a_screen_and_on_a_phone(width: int, height: int, is_phone: bool, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path, "one", seed=1), make_run(tmp_path, "two", optimizer={"kind": "sgd"})]
    assert cli.main(["report", "one"]) == 0
    assert cli.main(["compare", "one", "two"]) == 0
    with browser.browser(width, height, is_phone=is_phone) as page:
        for file in (runs[0] / "report.html", tmp_path / "compare.html"):
            page.open(file.as_uri())
            assert page.console() == []
            assert page.ask("window.innerWidth") == width == page.ask("document.documentElement.scrollWidth"), "it is cut off"
            shown = page.ask("[...document.querySelectorAll('img')].map(one => "
                             "[one.naturalWidth, one.getBoundingClientRect().width])")
            # a figure of 10 inches: letters of 9 points have 9 pixels and more
            assert len(shown) == 1 and shown[0][0] == 1300 and shown[0][1] >= 760
            assert page.ask("Math.min(...[...document.querySelectorAll('p, td, th, li, figcaption, span')]"
                            ".map(one => parseFloat(getComputedStyle(one).fontSize)))") >= 11
    shutil.rmtree(tmp_path / "runs")
