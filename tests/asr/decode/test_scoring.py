import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ngsgd import phase
from ngsgd.asr.decode import evaluation, scoring
from ngsgd.asr.decode.evaluation import DecodingResult, tune_and_decode
from ngsgd.asr.decode.tuning import DecodingWeights
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import DecodeConfig
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError
from ngsgd.word_errors import WordErrors
from tests.asr.decode.test_decoding import SMALL, spell
from tests.reported import silent

pytest.importorskip("kaldialign")


def test_total_is_printed_as_kaldi_prints_it() -> None:
    assert str(WordErrors(1000, 4, 7, 20)) == "%WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"


def test_errors_are_counted_by_kind_and_by_utterance() -> None:
    refs = [["one", "two", "three"], ["four", "five"], ["six"]]
    hyps = [["one", "three"], ["four", "nine"], ["six", "six"]]
    total, rows = scoring.score(refs, hyps, ["a", "b", "c"])
    assert total == WordErrors(num_words=6, insertions=1, deletions=1, substitutions=1)
    assert [row.errors.num_errors for row in rows] == [1, 1, 1]
    assert rows[0].pairs == (("one", "one"), ("two", scoring.NOTHING), ("three", "three"))
    assert total.wer == pytest.approx(50.0)


def test_an_empty_hypothesis_is_all_deletions_and_references_without_words_are_refused() -> None:
    assert scoring.score([["one", "two"]], [[]], ["a"])[0] == WordErrors(2, 0, 2, 0)
    with pytest.raises(DataError, match="no word"):
        scoring.score([[]], [["one"]], ["a"])


def test_per_utterance_file_shows_reference_over_hypothesis(tmp_path: Path) -> None:
    total, rows = scoring.score([["one", "seven"]], [["one", "two", "six"]], ["utt-1"])
    scoring.write_per_utterance(tmp_path / "per_utt.txt", total, rows)
    lines = (tmp_path / "per_utt.txt").read_text().splitlines()
    assert lines[0] == "%WER 100.00 [ 2 / 2, 1 ins, 0 del, 1 sub ]"
    assert lines[2].startswith("utt-1 %WER")
    ref, hyp = (line.split()[1:] for line in lines[3:5])
    assert len(ref) == len(hyp)
    assert [[word for word in words if word != "***"]
            for words in (ref, hyp)] == [["one", "seven"], ["one", "two", "six"]]
    assert [path.name for path in tmp_path.iterdir()] == ["per_utt.txt"]


@pytest.mark.entry("Sp14", "have the word `***` in a transcript", "works",
                   "it is a word like others; in `ops.txt` and `per_utt.txt` it has a backslash, since `***` is a missing word")
@pytest.mark.parametrize("word", ["***", "\\***", "\\\\***", "****", "\\"])
def test_a_word_like_the_placeholder_is_a_word_in_every_file(word: str, tmp_path: Path) -> None:
    refs, hyps = [[word, "a"], ["a", word], ["a"]], [["b", "a"], ["a"], ["a", word]]
    total, rows = scoring.score(refs, hyps, ["u1", "u2", "u3"])
    assert total == WordErrors(5, 1, 1, 1)
    assert scoring.operations(rows) == {(word, "b"): 1, ("a", "a"): 3, (word, scoring.NOTHING): 1, (scoring.NOTHING, word): 1}
    scoring.write_per_utterance(tmp_path / "per_utt.txt", total, rows)
    assert scoring.read_per_utterance((tmp_path / "per_utt.txt").read_text()) == rows
    scoring.write_operations(tmp_path / "ops.txt", rows)
    found = [line.split() for line in (tmp_path / "ops.txt").read_text().splitlines()]
    shown = scoring.word_form(word)
    assert found == [["correct", "a", "a", "3"], ["substitution", shown, "b", "1"], ["insertion", "***", shown, "1"],
                     ["deletion", shown, "***", "1"]]
    scoring.write_recogs(tmp_path / "recogs.txt", rows)
    assert f"u1:\tref={[word, 'a']}" in (tmp_path / "recogs.txt").read_text()


@pytest.mark.entry("Sp7", "evaluate utterances, speakers or groups without reference words", "works",
                   "insertions are counted, and the line has `(no words)` instead of a WER")
def test_speakers_and_utterances_without_words_are_counted_in_every_file(tmp_path: Path) -> None:
    refs, hyps = [["a", "b"], [], [], []], [["a"], ["c", "d"], [], ["e"]]
    total, rows = scoring.score(refs, hyps, ["u1", "u2", "u3", "u4"])
    assert total == WordErrors(2, 3, 1, 0) and total.wer == 200.0
    assert math.isnan(rows[1].errors.wer)
    scoring.write_per_speaker(tmp_path / "per_spk.txt", rows, ["s1", "s2", "s2", "s3"])
    text = (tmp_path / "per_spk.txt").read_text()
    assert "s2  %WER (no words) [ 2 / 0, 2 ins, 0 del, 0 sub ]" in text
    scoring.write_per_utterance(tmp_path / "per_utt.txt", total, rows)
    assert scoring.read_per_utterance((tmp_path / "per_utt.txt").read_text()) == rows
    interval = scoring.confidence_interval(refs, hyps)
    assert 0.0 <= interval.low <= interval.high < math.inf


def test_interval_holds_the_wer_and_is_repeatable() -> None:
    rng = np.random.default_rng(0)
    refs = [list("abcde") for _ in range(60)]
    hyps = [[word if rng.random() > 0.2 else "x" for word in ref] for ref in refs]
    wer = scoring.score(refs, hyps, [str(i) for i in range(60)])[0].wer
    interval = scoring.confidence_interval(refs, hyps)
    assert interval.low < wer < interval.high
    assert interval == scoring.confidence_interval(refs, hyps)


def test_interval_without_errors_ends_above_zero() -> None:
    refs = [["a", "b"]] * 100
    interval = scoring.confidence_interval(refs, refs)
    assert interval.low == 0.0 and interval.high == pytest.approx(1.5)
    assert scoring.confidence_interval(refs[:1], refs[:1]).high == 100.0


Said = tuple[SpeechSet, list[np.ndarray]]


def speech_that_says(texts: list[list[str]], topology: Topology = SMALL) -> Said:
    logliks = [spell(topology, words, frames_per_state=2) for words in texts]
    offsets = np.cumsum([0, *map(len, logliks)], dtype=np.int64)
    frames = FrameSet(np.zeros((offsets[-1], 1), np.float32), np.zeros(offsets[-1], np.int32),
                      offsets, tuple(map(str, range(len(texts)))))
    return SpeechSet(frames=frames, texts=tuple(map(tuple, texts)), speakers=("s",) * len(texts)), logliks


def tuned(config: DecodeConfig, valid: Said, test: Said,
          report: Callable[[str], None] = silent) -> DecodingResult:
    return tune_and_decode(Language(SMALL), config, valid=valid[0], valid_logliks=valid[1],
                           test=test[0], test_logliks=test[1], report=report)


VALID, TEST = (speech_that_says(texts)
               for texts in ([["ab", "b", "aa"], ["aa", "ab"]], [["b", "ab"], ["aa"]]))


def test_the_setting_that_is_best_on_valid_is_used_on_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "REPORT_S", 0.0)
    phases: list[str] = []
    # at scale 1e-6 frames weigh nothing against the cost of a word, and at penalty 1e4 no word is
    # worth it
    config = DecodeConfig(acoustic_scales=(1e-6, 1.0), word_penalties=(1e4, 0.0), beam=1e6)
    result = tuned(config, VALID, TEST, phases.append)
    assert any("1 of 2" in phase for phase in phases)
    assert (result.setting.acoustic_scale, result.setting.word_penalty) == (1.0, 0.0)
    assert result.valid.num_errors == result.test.num_errors == 0
    assert len(result.sweep) == 4
    assert result.sweep[0][1].deletions == sum(map(len, VALID[0].texts))
    assert result.hypotheses == TEST[0].texts


def test_a_chance_minimum_on_valid_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    said = speech_that_says([["ab"]])
    # errors at the scales 0.1, 0.2 ... 0.5
    tried = tuple((DecodingWeights(scale / 10, 0.0), WordErrors(100, 0, 0, errors))
                  for scale, errors in zip(range(1, 6), (1, 20, 3, 2, 3), strict=True))
    monkeypatch.setattr(evaluation, "sweep", lambda *_: tried)
    result = tuned(DecodeConfig(oracle=True), said, said)
    assert (result.setting.acoustic_scale, result.valid.num_errors) == (0.4, 2)
    # Kaldi's choice for comparison is the minimum itself
    assert result.oracle is not None and result.oracle[0].acoustic_scale == 0.1


def test_scores_of_another_models_states_are_refused() -> None:
    speech, logliks = speech_that_says([["ab"]])
    narrow = speech, [loglik_TP[:, 1:] for loglik_TP in logliks]
    with pytest.raises(DataError, match=r"6 HMM.*7"):
        tuned(DecodeConfig(), narrow, narrow)


@pytest.mark.entry("Nc10", "the steps after the training: decoding, oracle, calibration", "works",
                   "The WER is printed before the calibration, every step reports how many utterances are done, "
                   "and the calibration takes at most 6 minutes of speech from all speakers.")
def test_the_wer_is_known_before_the_calibration_and_every_step_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "REPORT_S", 0.0)
    lines: list[str] = []
    config = DecodeConfig(acoustic_scales=(1.0,), word_penalties=(0.0, 1.0), beam=1e6, oracle=True)
    result = tuned(config, VALID, TEST, lines.append)
    wer = next(n for n, line in enumerate(lines) if str(result.test) in line)
    steps = {line.partition(":")[0] for line in lines if isinstance(line, phase.Phase) and ": 1 of " in line}
    assert steps == {"scale selection", "decoding the test set", "oracle", "calibrating confidences"}
    later = [n for n, line in enumerate(lines) if line.startswith(("oracle", "calibrating"))]
    assert min(later) > wer


@pytest.mark.entry("Nc10")
def test_the_calibration_is_bounded_and_takes_all_speakers() -> None:
    for num_utterances, num_frames in ((1, 10**6), (299, 100), (301, 100), (10_000, 1), (200, 500), (1000, 3000)):
        chosen = evaluation.spread_subset([num_frames] * num_utterances)
        assert len(chosen) == 1 or (len(chosen) <= 300 and len(chosen) * num_frames <= 36_000)
        # the last utterances too
        assert chosen[-1] + 2 * chosen.step > num_utterances
    assert evaluation.spread_subset([100] * 299) == range(299)
