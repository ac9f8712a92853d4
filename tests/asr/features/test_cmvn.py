"""Statistics of features, and the mean so far, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ngsgd.asr import speech_set
from ngsgd.asr.features import cmvn
from ngsgd.asr.utterance import FramedUtterance
from ngsgd.config import FeatureConfig
from ngsgd.errors import DataError
from tests.reference import ivectors as reference

RANDOM = np.random.default_rng(0)
UTTERANCES = [RANDOM.normal(5.0, 2.0, size=(length, 3)).astype(np.float32) for length in (40, 7, 25)]
ALL = np.concatenate(UTTERANCES)
ONLINE = FeatureConfig(cmvn="online")
SAID = [FramedUtterance(f"u{number}", speaker, ("A",), frames_TD,
                        np.zeros(len(frames_TD), np.int32))
        for number, (speaker, frames_TD) in enumerate(zip("aba", UTTERANCES, strict=True))]


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that utterances of 40 frames leave."""
    for name, value in {"WINDOW": 20, "SPEAKER_FRAMES": 15, "GLOBAL_FRAMES": 6}.items():
        monkeypatch.setattr(cmvn, name, value)


def test_statistics_are_sums_and_give_mean_and_deviation() -> None:
    stats = cmvn.statistics(ALL)
    np.testing.assert_allclose(stats[0], [*ALL.astype(np.float64).sum(axis=0), len(ALL)])
    np.testing.assert_allclose(stats[1], [*(ALL.astype(np.float64) ** 2).sum(axis=0), 0.0])
    mean_D, deviation_D = cmvn.mean_and_deviation(stats)
    np.testing.assert_allclose(mean_D, ALL.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(deviation_D, ALL.std(axis=0, dtype=np.float64))


def test_normalization_is_undone() -> None:
    units = cmvn.units(map(cmvn.statistics, UTTERANCES), ["a", "b", "a"])
    np.testing.assert_allclose(units.stats["a"], cmvn.statistics(np.concatenate([UTTERANCES[0], UTTERANCES[2]])))
    normal_TD = cmvn.normalized(UTTERANCES[0], units.stats["a"])
    # float32
    np.testing.assert_allclose(cmvn.restored(normal_TD, units.stats["a"]), UTTERANCES[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("stats", "told"), [
    (np.ones((3, 4)), "3.*4; statistics.*2.*4"), (np.ones((2, 5)), "2 x 5"), (np.zeros((2, 4)), "0 frames"),
    (np.full((2, 4), np.nan), "not finite")])
def test_invalid_statistics_are_reported(stats: np.ndarray, told: str) -> None:
    with pytest.raises(DataError, match=f"cmvn.scp:1.*{told}"):
        cmvn.check(stats, "cmvn.scp:1", 3)


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize("step", [1, 4, 40])
def test_the_mean_so_far_is_its_definition_to_a_bit_whatever_comes_at_once(step: int) -> None:
    stats, heard = cmvn.statistics(ALL), None
    for number, frames_TD in enumerate(UTTERANCES):
        whole_TD = cmvn.OnlineMean(stats, heard).accept(frames_TD)
        stream = cmvn.OnlineMean(stats, heard)
        found_TD = np.concatenate([stream.accept(frames_TD[at:at + step]) for at in range(0, len(frames_TD), step)])
        np.testing.assert_array_equal(found_TD, whole_TD)
        before = [one.astype(np.float64) for one in UTTERANCES[:number]]
        expected_TD = reference.running_means(frames_TD.astype(np.float64), window=20, before=before, most_before=15,
                                              global_mean_D=ALL.mean(axis=0, dtype=np.float64), most_global=6)
        np.testing.assert_allclose(found_TD, expected_TD, rtol=1e-12)
        heard = stream.heard()
    assert isinstance(heard, cmvn.CmnState) and heard.count == len(ALL)


@pytest.mark.usefixtures("short_window")
def test_online_normalization_processes_speakers_in_order_and_keeps_raw_features() -> None:
    stats = cmvn.statistics(ALL)
    online = speech_set.normalized_online(speech_set.assemble(SAID, ONLINE), stats)
    third = cmvn.OnlineMean(stats, cmvn.CmnState(UTTERANCES[0].sum(axis=0, dtype=np.float64), 40.0))
    expected = (UTTERANCES[2] - third.accept(UTTERANCES[2])) / ALL.std(axis=0, dtype=np.float64)
    # float32
    np.testing.assert_allclose(online.split_features()[2], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(online.raw(2), UTTERANCES[2])


@pytest.mark.parametrize("kind", ["none", "utterance", "speaker"])
def test_raw_features_are_restored_after_any_normalization(kind: Any) -> None:
    speech = speech_set.assemble(SAID, FeatureConfig(cmvn=kind))
    for u, frames_TD in enumerate(UTTERANCES):
        np.testing.assert_allclose(speech.raw(u), frames_TD, rtol=1e-6, atol=2e-6)  # float32
