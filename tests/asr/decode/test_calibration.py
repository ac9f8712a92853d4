import numpy as np
import pytest

from ngsgd.asr.decode import calibration
from ngsgd.asr.decode.calibration import Calibration


def test_a_fitted_map_gives_the_share_of_correct_words() -> None:
    rng = np.random.default_rng(0)
    posterior_N = rng.uniform(0.02, 0.98, size=20_000)
    logit_N = np.log(posterior_N / (1.0 - posterior_N))
    is_correct_N = rng.uniform(size=20_000) < 1.0 / (1.0 + np.exp(-0.5 * logit_N + 1.0))
    found = calibration.fit(posterior_N.tolist(), is_correct_N.tolist())
    # about 5 standard errors
    assert (found.slope, found.offset) == pytest.approx((0.5, -1.0), abs=0.1)
    bins = calibration.reliability([found(p) for p in posterior_N], is_correct_N.tolist())
    assert calibration.expected_calibration_error(bins) < 0.02


@pytest.mark.parametrize(
    ("posteriors", "is_correct"),
    [
        ([], []),
        ([0.9], [True]),
        ([1.0] * 50, [True] * 50),
        ([0.0, 1.0], [False, False]),
        ([0.1, 0.9], [True, False]),
    ],
)
def test_a_map_is_finite_and_does_not_fall(posteriors: list[float], is_correct: list[bool]) -> None:
    found = calibration.fit(posteriors, is_correct)
    confidences = [found(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(0.0 <= one <= 1.0 for one in confidences)
    assert confidences == sorted(confidences)


def test_the_default_map_changes_nothing() -> None:
    assert [Calibration()(p) for p in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]


def test_bins_hold_every_word_once() -> None:
    bins = calibration.reliability([0.0, 0.05, 0.95, 1.0], [False, True, True, True])
    assert [(one.num_words, one.accuracy) for one in bins] == [(2, 0.5), (2, 1.0)]
    assert calibration.expected_calibration_error(bins) == pytest.approx(
        (2 * 0.475 + 2 * 0.025) / 4
    )
