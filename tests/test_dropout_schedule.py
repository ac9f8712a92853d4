"""Kaldi's dropout schedules (steps/libs/nnet3/train/dropout_schedule.py)."""

from __future__ import annotations

import pytest

from ngsgd.errors import ConfigError
from ngsgd.schedules import DropoutSchedule

ROUNDING = 1e-12  # float64: one interpolation


def proportions(text: str, *fractions: float, component: str = "") -> list[float]:
    schedule = DropoutSchedule.parse(text)
    return [schedule.proportion(fraction, component) for fraction in fractions]


@pytest.mark.parametrize(("text", "expected"), [
    # recipes: none for a fifth of the data, up to a half in the middle, none at the end
    ("0,0@0.2,0.5@0.5,0", {0.0: 0.0, 0.1: 0.0, 0.2: 0.0, 0.35: 0.25, 0.5: 0.5, 0.75: 0.25, 1.0: 0.0}),
    ("0,0@0.20,0.3@0.50,0", {0.3: 0.1, 0.8: 0.12}),
    # without @ the value between stands at a half
    ("0,0.3,0", {0.0: 0.0, 0.25: 0.15, 0.5: 0.3, 0.75: 0.15, 1.0: 0.0}),
    ("0.1,0.1", {0.0: 0.1, 0.3: 0.1, 1.0: 0.1}),
    ("0.2,0.6", {0.0: 0.2, 0.25: 0.3, 1.0: 0.6}),
    # from the self-test of Kaldi's script
    ("0.0,0.5@0.25,0.0,0.6@0.75,0.0", {0.25: 0.5, 0.1: 0.2, 0.5: 0.0, 0.75: 0.6, 0.875: 0.3}),
    # fractions outside of the run are its ends
    ("0.1,0.5,0.3", {-0.5: 0.1, 1.5: 0.3})])
def test_proportions_are_kaldis(text: str, expected: dict[float, float]) -> None:
    assert proportions(text, *expected) == pytest.approx(list(expected.values()), abs=ROUNDING)


def test_components_get_the_schedule_of_the_last_pattern_that_fits() -> None:
    text = "0,0.1,0 lstm*=0,0.3,0"
    assert proportions(text, 0.5, component="lstm2") == pytest.approx([0.3], abs=ROUNDING)
    assert proportions(text, 0.5, 0.25, component="affine1") == pytest.approx([0.1, 0.05], abs=ROUNDING)
    three = "lstm*=0,0.3,0 lstm1=0,0.5,0 tdnn?=0,0.2,0"
    assert [proportions(three, 0.5, component=name)[0] for name in ("lstm1", "lstm2", "tdnn3", "tdnn10", "out")] == pytest.approx(
        [0.5, 0.3, 0.2, 0.0, 0.0], abs=ROUNDING)


def test_a_schedule_can_be_compared_and_hashed() -> None:
    found = DropoutSchedule.parse("  lstm*=0,0.3,0   0,0.1,0 ")
    assert found == DropoutSchedule.parse("lstm*=0,0.3,0 0,0.1,0")
    assert len({DropoutSchedule.parse("0,0.3,0"), DropoutSchedule.parse("0,0.3@0.5,0")}) == 1


@pytest.mark.parametrize("text", [
    "", "   ", "abc", "0,x,0", "0,0.3@half,0", "0,,0", "0,0.3@,0", "lstm*=", "lstm*=0,0.3,0 0,zero",
    # a single value
    "0.3", "lstm*=0.3", "0.3@0.5",
    # fractions that do not rise from 0 to 1
    "0,0.3@0.6,0.5@0.4,0", "0,0.1,0.2,0", "0,0.3@1.2,0", "0,0.3@-0.1,0", "0,0.3@nan,0", "0@0.1,0.3,0", "0,0.3,0@0.9",
    # proportions; 1 would drop everything
    "0,1,0", "0,1.5@0.5,0", "0,-0.1,0", "0,0.3,1.0", "nan,0", "0,inf,0"])
def test_an_invalid_schedule_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="dropout schedule"):
        DropoutSchedule.parse(text)
