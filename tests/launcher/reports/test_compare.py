"""Which of several runs is better, and the verdicts where that cannot be known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.decode.scoring import UtteranceErrors, write_per_utterance
from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.launcher.reports import comparison
from ngsgd.launcher.reports.comparison import LOSS, WER, ComparedRun, Group, identity
from ngsgd.launcher.reports.figures import RUN_COLORS, comparison_figure
from ngsgd.runs.run_folder import RunFolder
from ngsgd.word_errors import WordErrors
from tests.launcher.records import Command, outer_iteration
from tests.launcher.reports.test_report import Page, make_run


def run(name: str, /, *, wer: float | None = None, loss: float = 1.0, **settings: object) -> ComparedRun:
    points = tuple(replace(outer_iteration(number, valid_objf=-2.0 + number / 4), elapsed_s=3.0 * number)
                   for number in range(1, 5))
    found = {**flatten(RunConfig()),
             **{path.replace("__", "."): value for path, value in settings.items()}}
    return ComparedRun(RunFolder(Path(name)), points, found,
                       None if wer is None else (wer, wer - 1, wer + 1), -loss)


def said(*runs: ComparedRun, measure: str = LOSS) -> str:
    groups = sorted(comparison.groups_of(runs), key=lambda group: group.mean(measure))
    return comparison.verdict(groups, measure)[0]


def test_matched_seeds_decide_by_the_t_interval() -> None:
    losses = {"ngsgd": (1.0, 1.1, 1.2), "sgd": (1.3, 1.4, 1.51)}
    runs = [run(f"{kind}{seed}", loss=value, seed=seed, optimizer__kind=kind)
            for kind, values in losses.items()
            for seed, value in enumerate(values)]
    first, second = comparison.groups_of(runs)
    found = comparison.difference(first, second, LOSS)
    # mean 0.30333, standard deviation 0.0057735, t of 2 degrees of freedom 4.30265
    assert found.value == pytest.approx(0.303333, abs=1e-6)
    assert found.high - found.value == pytest.approx(4.302653 * 0.00577350 / 3**0.5, abs=1e-6)
    assert found.is_significant and said(*runs) == "better"
    noisy = [replace(one, final_objf=-1.0 - 0.3 * (index % 3 == 0)) for index, one in enumerate(runs)]
    assert said(*noisy) == "not significant"


def test_other_seeds_are_compared_by_welch() -> None:
    runs = [run("a", loss=1.0, seed=0), run("b", loss=1.2, seed=1),
            run("c", loss=3.0, seed=2, optimizer__kind="sgd"),
            run("d", loss=3.2, seed=3, optimizer__kind="sgd")]
    first, second = comparison.groups_of(runs)
    found = comparison.difference(first, second, LOSS)
    # both variances 0.02, two degrees of freedom
    assert found.high - found.value == pytest.approx(4.302653 * (0.02 / 2 * 2) ** 0.5, abs=1e-5)


def test_one_run_each_without_words_has_no_interval() -> None:
    assert said(run("a", loss=1.0), run("b", loss=2.0, optimizer__kind="sgd")) == "no interval"
    assert said(run("a", loss=1.0, seed=0), run("b", loss=2.0, seed=1)) == "no difference"
    # losses of different objectives
    assert said(run("a"), run("b", objective__kind="mmi")) == "not comparable"


@pytest.mark.entry("Lo5", "`ngsgd compare` of runs with equal seeds, such as a run and its copy", "works",
                   "The sentence reports the number of seeds, and that runs of one seed are not independent.")
@pytest.mark.parametrize(("seeds", "said_of_seeds"), [((0, 0), "their seeds"), ((0, 1), "the seed:"),
                                                      ((0, 0, 1), "are 2")])
def test_runs_of_equal_seeds_are_not_said_to_differ_in_it(seeds: tuple[int, ...], said_of_seeds: str) -> None:
    runs = [run(f"run{index}", loss=1.0 + index, seed=seed) for index, seed in enumerate(seeds)]
    word, sentence = comparison.verdict(comparison.groups_of(runs), LOSS)
    assert word == "no difference" and said_of_seeds in sentence


def decoded(folder: Path, errors: list[int]) -> ComparedRun:
    rows = [UtteranceErrors(f"u{index}", (("a", "b"),) * 10, WordErrors(10, 0, 0, count))
            for index, count in enumerate(errors)]
    (folder / "decode").mkdir(parents=True)
    write_per_utterance(folder / "decode" / "test.per_utt.txt",
                        WordErrors(10 * len(rows), 0, 0, sum(errors)), rows)
    found = run(folder.name, wer=10.0 * sum(errors) / len(rows), optimizer__kind=folder.name)
    return replace(found, folder=RunFolder(folder))


def test_one_run_each_is_compared_utterance_by_utterance(tmp_path: Path) -> None:
    """Each pair differs by one word, so the bootstrap has no spread, while each WER has."""
    errors = np.random.default_rng(0).integers(0, 6, 50).tolist()
    first = decoded(tmp_path / "ngsgd", errors)
    second = decoded(tmp_path / "sgd", [count + 1 for count in errors])
    better, worse = comparison.groups_of([first, second])
    found = comparison.difference(better, worse, WER)
    assert (found.value, found.low, found.high) == pytest.approx((10.0, 10.0, 10.0))
    assert said(first, second, measure=WER) == "better"
    # of a group, the run with the same seed is taken
    extra = replace(decoded(tmp_path / "extra", [9] * 50), settings={**second.settings, "seed": 5})
    found = comparison.difference(better, Group("sgd", (extra, second)), WER)
    assert (found.value, found.low) == pytest.approx((10.0, 10.0))
    assert said(first, decoded(tmp_path / "adam", errors[::-1]), measure=WER) == "not significant"
    assert said(first, decoded(tmp_path / "kfac", errors[:20]), measure=WER) == "not comparable"


def finished(folder: Path, content: str, **settings: Any) -> ComparedRun:
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "model.safetensors").write_text(content)
    return run(str(folder), **settings)


def test_identical_final_models_are_found_whatever_the_settings(tmp_path: Path) -> None:
    first = finished(tmp_path / "a", "x")
    again = finished(tmp_path / "b", "x")
    slower = finished(tmp_path / "c", "x", cluster__num_workers=7)
    for runs in ([first, again], [first, again, slower], [first, slower, run("unfinished")]):
        found = identity(runs)
        assert found and found.num_different == 0 and not found.are_equal_runs
    assert identity([first, run("unfinished")]) is None


def test_final_models_of_equal_settings_and_seed_that_differ_are_counted(tmp_path: Path) -> None:
    runs = [finished(tmp_path / str(number), "x" if number else "y") for number in range(4)]
    other = finished(tmp_path / "other", "z", seed=3)
    found = identity([*runs, other])
    assert found and (found.num_compared, found.num_different, found.are_equal_runs) == (4, 3, True)
    found = identity([*runs[1:], other])
    assert found and (found.num_compared, found.num_different, found.are_equal_runs) == (3, 0, True)
    # another seed is another model
    assert identity([runs[0], other]) is None


def test_runs_are_named_by_the_settings_that_differ() -> None:
    runs = [run("a", seed=1), run("b", seed=2),
            run("c", seed=2, optimizer__kind="sgd", schedule__num_epochs=9.0)]
    names = comparison.names_of(runs)
    assert names[2] == "optimizer=sgd, num_epochs=9.0, seed=2"
    groups = [group.name for group in comparison.groups_of(runs)]
    assert groups == [name.rpartition(", seed")[0] for name in names[1:]]
    assert comparison.names_of([run("a"), run("b")]) == ["a", "b"]
    named = [run("first-2026", name="first"), run("other-2026", name="other", optimizer__kind="sgd")]
    assert comparison.names_of(named) == ["first, optimizer=ngsgd", "other, optimizer=sgd"]
    assert comparison.names_of([run("x-1", name="x"), run("x-2", name="x"), run("c")]) == ["x, x-1", "x, x-2", "c"]
    assert [one.figures(0.0)["name"] for one in named] == ["first", "other"]
    more = dict.fromkeys(("cluster__num_workers", "schedule__num_jobs_final", "schedule__num_jobs_initial"), 4)
    # one job per worker: one of the names is enough
    assert list(comparison.differences([run("a"), run("b", **more)])) == ["cluster.num_workers"]


def test_time_to_an_objective_is_interpolated() -> None:
    one = run("a")
    assert one.seconds_to(-1.75) == pytest.approx(3.0)
    assert one.seconds_to(-1.625) == pytest.approx(4.5)
    assert np.isnan(one.seconds_to(0.0))
    short = replace(one, points=one.points[:2])
    assert comparison.common_objf([one, short]) == short.points[-1].valid.objf


def test_a_run_is_read_with_its_settings_scores_and_interval(tmp_path: Path) -> None:
    from ngsgd.config.build import flatten
    from ngsgd.runs.config_file import read_config

    folder = RunFolder(make_run(tmp_path, "first", seed=7, wer=2.0))
    found = comparison.read(folder)
    slow = flatten(read_config(folder.config)).items()
    assert found.settings == {path: list(value) if isinstance(value, tuple) else value
                              for path, value in slow}
    assert found.wer == (2.0, 1.0, 3.0) and len(found.points) == 10
    assert found.points[3].num_jobs == 2 and found.valid_loss == pytest.approx(1.1)
    folder.events.write_text(folder.events.read_text() + "{cut")
    assert comparison.read(folder).points == found.points


@pytest.mark.slow
def test_compare_prints_a_verdict_and_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "slow")
    make_run(tmp_path, "fast", optimizer={"kind": "sgd"}, speed=2.0, wer=4.0)
    found = json.loads(command("compare", "slow", "fast", "--json", "--png", "c.png").out)
    assert found["common_objf"] == pytest.approx(-1.0)
    assert [one["seconds_to_common_objf"] for one in found["runs"]] == pytest.approx([30.0, 15.0])
    assert [one["wer_percent"] for one in found["runs"]] == [3.1, 4.0]
    assert (found["verdict"], found["final_models"]) == ("not significant", None)
    page = Page((tmp_path / "compare.html").read_text())
    assert page.loaded == [] and page.open == [] and len(page.alts) == 1
    assert "optimizer.kind" in page.cells and "name" not in page.cells and "-" not in page.cells
    assert (tmp_path / "c.png").stat().st_size > 1000
    assert "optimizer=sgd" in command("compare", "slow", "fast").out


@pytest.mark.slow
def test_many_settings_are_drawn_with_a_bounded_number_of_colors() -> None:
    groups = [Group(str(index), (run(str(index), wer=index + 1.0),)) for index in range(30)]
    epochs, minutes, bars = comparison_figure(groups).axes
    assert len(bars.patches) == 20 and len(epochs.lines) == len(minutes.lines) == 60
    assert {line.get_color() for line in epochs.lines} == {*RUN_COLORS}
