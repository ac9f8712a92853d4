from ngsgd.asr.decode import tuning
from ngsgd.asr.decode.scoring import WordErrors
from ngsgd.asr.decode.tuning import DecodingWeights, Sweep

SCALES, PENALTIES = (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 2.0, 4.0)


def sweep(errors: dict[tuple[float, float], tuple[int, int]], usual: tuple[int, int]) -> Sweep:
    """Insertions and deletions at some settings, and at all others."""
    return tuple(
        (DecodingWeights(scale, penalty), WordErrors(100, *errors.get((scale, penalty), usual), 0))
        for scale in SCALES
        for penalty in PENALTIES
    )


def test_a_minimum_among_much_worse_settings_does_not_win() -> None:
    good = {(s, p): (2, 0) for s in (0.4, 0.5) for p in PENALTIES}
    chosen, errors = tuning.choose(sweep({(0.1, 0.0): (1, 0), **good}, (20, 0)))
    assert chosen.acoustic_scale >= 0.4
    assert errors.num_errors == 2


def test_among_equals_the_most_words_win() -> None:
    deletions = {(s, p): (0, 3) for s in (0.1, 0.2) for p in PENALTIES}
    assert tuning.choose(sweep(deletions, (3, 0)))[0].acoustic_scale >= 0.3
    insertions = {(s, p): (3, 0) for s in (0.1, 0.2) for p in PENALTIES}
    assert tuning.choose(sweep(insertions, (0, 3)))[0].acoustic_scale <= 0.2


def test_the_center_of_a_flat_region_wins_whatever_the_order() -> None:
    tried = sweep({}, (1, 0))
    assert tuning.choose(tried)[0] == DecodingWeights(0.3, 2.0)
    assert tuning.choose(tried[::-1])[0] == DecodingWeights(0.3, 2.0)


def test_one_setting_is_chosen() -> None:
    only = DecodingWeights(0.1, 0.5)
    assert tuning.choose(((only, WordErrors(1, 0, 0, 0)),))[0] == only
