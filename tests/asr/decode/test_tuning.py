import numpy as np
import pytest

from ngsgd.asr.decode import tuning
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights, Sweep
from ngsgd.word_errors import WordErrors

SCALES, PENALTIES = (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 2.0, 4.0)


def sweep(errors: dict[tuple[float, float], tuple[int, int]], usual: tuple[int, int]) -> Sweep:
    """Insertions and deletions at some settings, and at all others."""
    return tuple((DecodingWeights(scale, penalty),
                  WordErrors(100, *errors.get((scale, penalty), usual), 0))
                 for scale in SCALES for penalty in PENALTIES)


def test_a_minimum_among_much_worse_settings_does_not_win() -> None:
    good = {(s, p): (2, 0) for s in (0.4, 0.5) for p in PENALTIES}
    chosen, errors = tuning.choose(sweep({(0.1, 0.0): (1, 0), **good}, (20, 0)))
    assert chosen.acoustic_scale >= 0.4 and errors.num_errors == 2


def test_among_equals_insertions_and_deletions_are_balanced() -> None:
    for balanced in (0.2, 0.4):
        chosen, errors = tuning.choose(sweep({(balanced, p): (9, 9) for p in PENALTIES}, (14, 4)))
        assert chosen.acoustic_scale == balanced and errors.insertions == errors.deletions
    # fewer errors win, balanced or not
    assert tuning.choose(sweep({(0.2, p): (9, 9) for p in PENALTIES}, (14, 3)))[0].acoustic_scale != 0.2


@pytest.mark.parametrize("edge", [(0.1, 0.0), (0.1, 2.0), (0.5, 4.0), (0.3, 0.0), (0.3, 4.0)])
@pytest.mark.entry("Nc9", "scale and penalty for other voices than those of the validation set", "works",
                   "Within one standard error of the best a setting inside the grid is preferred, and of equals the balanced one.")
def test_a_setting_inside_the_grid_wins_within_one_standard_error(edge: tuple[float, float]) -> None:
    chosen, _ = tuning.choose(sweep({edge: (4, 4)}, (6, 5)))
    assert chosen.acoustic_scale in SCALES[1:-1] and chosen.word_penalty == 2.0
    # an edge wins if it is much better
    better = {(edge[0], p): (1, 1) for p in PENALTIES} if edge[0] != 0.3 else {(s, edge[1]): (1, 1) for s in SCALES}
    chosen, _ = tuning.choose(sweep(better, (60, 60)))
    assert edge[0] in (0.3, chosen.acoustic_scale) and (edge[0] != 0.3 or chosen.word_penalty == edge[1])


def test_the_center_of_a_flat_region_wins_whatever_the_order() -> None:
    tried = sweep({}, (1, 0))
    for settings in (tried, tried[::-1]):
        assert tuning.choose(settings)[0] == DecodingWeights(0.3, 2.0)
    assert tuning.choose(tried[:1])[0] == tried[0][0]


def test_a_fitted_map_gives_the_share_of_correct_words() -> None:
    rng = np.random.default_rng(0)
    posterior_N = rng.uniform(0.02, 0.98, size=20_000)
    logit_N = np.log(posterior_N / (1.0 - posterior_N))
    is_correct_N = rng.uniform(size=20_000) < 1.0 / (1.0 + np.exp(-0.5 * logit_N + 1.0))
    found = tuning.fit(posterior_N.tolist(), is_correct_N.tolist())
    # about 5 standard errors
    assert (found.slope, found.offset) == pytest.approx((0.5, -1.0), abs=0.1)
    bins = tuning.reliability([found(p) for p in posterior_N], is_correct_N.tolist())
    assert tuning.expected_calibration_error(bins) < 0.02


@pytest.mark.parametrize(("posteriors", "is_correct"), [
    ([], []), ([0.9], [True]), ([1.0] * 50, [True] * 50), ([0.0, 1.0], [False, False]),
    ([0.1, 0.9], [True, False])])
def test_a_map_is_finite_and_does_not_fall(posteriors: list[float], is_correct: list[bool]) -> None:
    found = tuning.fit(posteriors, is_correct)
    confidences = [found(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(0.0 <= one <= 1.0 for one in confidences)
    assert confidences == sorted(confidences)


def test_the_default_map_changes_nothing() -> None:
    assert [Calibration()(p) for p in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]


def test_bins_hold_every_word_once() -> None:
    bins = tuning.reliability([0.0, 0.05, 0.95, 1.0], [False, True, True, True])
    assert [(one.num_words, one.accuracy) for one in bins] == [(2, 0.5), (2, 1.0)]
    assert tuning.expected_calibration_error(bins) == pytest.approx((2 * 0.475 + 2 * 0.025) / 4)
