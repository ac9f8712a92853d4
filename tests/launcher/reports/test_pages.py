"""The pages of `ngsgd report` and `ngsgd compare` in a browser: legible, and nothing is cut off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ngsgd.launcher import cli
from tests.launcher.reports import browser
from tests.launcher.reports.test_report import make_run

pytestmark = [pytest.mark.services, pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())]


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
            shown = page.ask("[...document.querySelectorAll('svg')].map(one => "
                             "[one.viewBox.baseVal.width, one.getBoundingClientRect().width])")
            assert len(shown) >= 4 and all(natural for natural, _ in shown)
            assert min(wide / natural for natural, wide in shown) > 0.75, "letters of 9 points would be too small"
            assert page.ask("Math.min(...[...document.querySelectorAll('p, td, th, li, figcaption, span')]"
                            ".map(one => parseFloat(getComputedStyle(one).fontSize)))") >= 11
    shutil.rmtree(tmp_path / "runs")
