"""Alignment of recordings with their text: against a search of all paths, labels, and formats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

import ngsgd
from ngsgd.asr import aligner as module
from ngsgd.asr.aligner import Aligner
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.corpora import fsdd
from ngsgd.asr.lang.language import GivenGraph
from ngsgd.asr.lang.topology import Pronunciation, Topology
from ngsgd.asr.transcript import FORMATS
from ngsgd.errors import ArgumentError, DataError
from tests.asr import test_context, tiny_recognizer
from tests.reference import text_alignment

pytest.importorskip("kaldi_decoder")

RATE_HZ = tiny_recognizer.RATE_HZ
WORDS = ["NO", "YES", "YES", "NO", "YES"]
LEXICON: dict[str, tuple[Pronunciation, ...]] = {"ab": (("a", "b"),), "ba": (("b", "a"), ("b",)), "c": (("c",),)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(tiny_recognizer.write(tmp_path_factory.mktemp("bundle") / "model.ngsgd"))


def with_language(bundle: Bundle, *, width: int) -> Bundle:
    """The model with other phones, in context if `width` is above 1; its network is not used."""
    topology = Topology(("a", "b", "c", "d"), LEXICON, test_context.NUM_SILENCE_STATES)
    language = replace(test_context.language(3), topology=topology, tree=test_context.tree(width) if width > 1 else None)
    return replace(bundle, language=language, prior_P=np.full(language.num_pdfs, 1 / language.num_pdfs))


def path_scores(rng: np.random.Generator, pdf_T: Sequence[int], num_pdfs: int) -> npt.NDArray[np.float32]:
    """Random log-likelihoods in which the path is likely, as a network has them."""
    loglik_TP = rng.normal(-6.0, 2.0, size=(len(pdf_T), num_pdfs))
    loglik_TP[np.arange(len(pdf_T)), pdf_T] += 8.0
    return loglik_TP.astype(np.float32)


# spoken phones, and the text: as spoken, with a word too many, a word too few, an unknown word
CASES = [(["SIL", "a", "b", "c", "SIL"], ["ab", "c"]), (["a", "b", "SIL"], ["ab", "c"]),
         (["c", "SIL", "a", "b", "SIL"], ["ab"]), (["a", "b", "d", "c"], ["ab", "c"]), (["d", "a", "b"], ["xyz", "ab"])]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_units_and_times_are_those_of_a_search_of_all_paths(bundle: Bundle, width: int, case: int) -> None:
    aligner = Aligner(with_language(bundle, width=width))
    language, (spoken, words) = aligner.bundle.language, CASES[case]
    names = ("SIL", *language.topology.phones)

    def states(left: str, phone: str, right: str) -> Sequence[int]:
        if language.tree is None:
            return language.topology.pdfs_of_phone(phone)
        window = [names.index(one) + 1 if one else 0 for one in (left, phone, right)]
        return [language.tree.pdf(window, state) for state in range(len(language.topology.pdfs_of_phone(phone)))]
    around = ["", *spoken, ""]
    pdf_T = [pdf for at in range(len(spoken)) for pdf in states(*around[at:at + 3]) for _ in range(3)]
    loglik_TP = path_scores(np.random.default_rng(case), pdf_T, language.num_pdfs)
    found, cost = aligner.units(loglik_TP, words)
    silent = [pdf for pdf in range(language.num_pdfs) if language.tree is None and pdf < 2]
    if language.tree:
        silent = [pdf for state in range(2) for pdf in language.tree.pdfs(1, state)]
    speech = [pdf for pdf in range(language.num_pdfs) if pdf not in silent]
    garbage_T = loglik_TP[:, speech].max(axis=1) - module.GARBAGE_MARGIN
    expected_cost, expected = text_alignment.best(
        [LEXICON.get(word, ()) for word in words], states, np.column_stack([loglik_TP, garbage_T]).astype(np.float64),
        garbage_pdf=language.num_pdfs, skip=module.DEVIATIONS.skip, garbage=module.DEVIATIONS.garbage)
    # a sum of about 50 float32 numbers
    assert cost == pytest.approx(expected_cost, abs=1e-3)
    assert [(one.unit.phone, one.unit.word, one.first, one.end) for one in found] == [tuple(one) for one in expected]
    assert len(found) > 1 and found[-1].end == len(loglik_TP)


def test_deviations_from_the_text_are_reported(bundle: Bundle) -> None:
    aligner, samples = Aligner(bundle), tiny_recognizer.say(WORDS)
    exact = aligner.align(samples, " ".join(WORDS))
    assert [word.word for word in exact.words] == WORDS and len(exact.phones) == len(WORDS)
    assert not (exact.not_spoken or exact.not_in_text or exact.unknown)
    assert all(0.5 < one.confidence <= 1.0 for one in (*exact.words, *exact.phones))
    more = aligner.align(samples, ["NO", "NO", *WORDS[1:]])
    assert [word.word for word in more.words] == WORDS and [word.word for word in more.not_spoken] == ["NO"]
    less = aligner.align(samples, WORDS[:-1])
    assert less.words == exact.words[:-1] and len(less.not_in_text) == 1
    assert less.not_in_text[0].start_s == pytest.approx(exact.words[-1].start_s, abs=0.1)
    unknown = aligner.align(samples, [*WORDS[:3], "MAYBE", "YES"])
    assert [word.word for word in unknown.words] == [*WORDS[:3], "MAYBE", "YES"]
    assert [word.word for word in unknown.unknown] == ["MAYBE"] and unknown.words[3].confidence == 0.0
    assert len(unknown.phones) == len(WORDS) - 1
    # the other words stay where they are
    assert unknown.words[:3] == exact.words[:3]


def test_confidence_is_the_geometric_mean_of_the_posterior_of_the_phone(bundle: Bundle) -> None:
    aligner = Aligner(bundle)
    rng = np.random.default_rng(0)
    loglik_TP = path_scores(rng, np.repeat([0, 1, 2, 3, 0], 6).tolist(), bundle.language.num_pdfs)
    posterior_TP = np.exp(loglik_TP.astype(np.float64)) * bundle.prior_P
    posterior_TP /= posterior_TP.sum(axis=1, keepdims=True)
    loglik_TP = np.log(posterior_TP / bundle.prior_P).astype(np.float32)
    found = aligner.align_scores(loglik_TP, "NO")
    [phone], [word] = found.phones, found.words
    first, end = round(phone.start_s * 100), round(phone.end_s * 100)
    assert (first, end) == (6, 24)
    expected = np.exp(np.log(posterior_TP[first:end, 1:4].sum(axis=1)).mean())
    # float32 posteriors
    assert phone.confidence == pytest.approx(expected, rel=1e-4) == word.confidence
    assert phone.confidence < 1.0


def test_a_long_recording_is_split_at_pauses_and_deviations_are_found(bundle: Bundle, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pieces, text = [], []
    for number in range(12):
        pieces += [tiny_recognizer.say(WORDS, seed=number), np.round(60 * rng.standard_normal(3 * RATE_HZ)).astype(np.int16)]
        text += WORDS
    samples = np.concatenate(pieces)
    assert len(samples) > 60 * RATE_HZ
    soundfile.write(tmp_path / "long.wav", samples, RATE_HZ)
    aligner = Aligner(bundle)
    exact = aligner.align(tmp_path / "long.wav", text)
    assert [word.word for word in exact.words] == text and not exact.not_in_text
    starts = [word.start_s for word in exact.words]
    assert starts == sorted(starts) and exact.words[-1].end_s <= exact.duration_s
    for number in range(12):
        first_s = sum(map(len, pieces[:2 * number])) / RATE_HZ
        end_s = first_s + len(pieces[2 * number]) / RATE_HZ
        assert all(first_s < word.start_s < end_s for word in exact.words[5 * number:5 * number + 5])
    wrong = [*text[:20], "NO", *text[20:40], *text[41:]]
    found = aligner.align(tmp_path / "long.wav", wrong)
    assert [word.word for word in found.not_spoken] == ["NO"] and len(found.not_in_text) == 1
    assert abs(found.not_in_text[0].start_s - exact.words[40].start_s) < 0.2


def test_a_lexicon_adds_words_to_those_of_the_model(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("YO Y\n")
    aligner = Aligner(bundle, lexicon=tmp_path / "lexicon.txt")
    found = aligner.align(tiny_recognizer.say(WORDS), ["NO", "YO", *WORDS[2:]])
    assert [word.word for word in found.words] == ["NO", "YO", *WORDS[2:]] and not found.unknown
    (tmp_path / "lexicon.txt").write_text("YO X\n")
    with pytest.raises(DataError, match="X"):
        Aligner(bundle, lexicon=tmp_path / "lexicon.txt")


def test_what_cannot_be_aligned_is_one_typed_error(bundle: Bundle, tmp_path: Path) -> None:
    aligner, samples = Aligner(bundle), tiny_recognizer.say(WORDS)
    texts: tuple[str | list[str], ...] = ("", " ", [], "MAYBE", "no yes")
    for text in texts:
        with pytest.raises(DataError):
            aligner.align(samples, text)
    with pytest.raises(DataError):
        # three frames, and at least nine states
        aligner.align_scores(np.zeros((0, bundle.language.num_pdfs), np.float32), "NO")
    # silence without any word
    quiet = np.full((50, bundle.language.num_pdfs), -20.0, np.float32)
    quiet[:, 0] = 0.1
    with pytest.raises(DataError):
        aligner.align_scores(quiet, "NO YES")
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "stereo.wav", np.zeros((RATE_HZ, 2)), RATE_HZ)
    for audio in (tmp_path / "text.wav", tmp_path / "absent.wav", tmp_path / "stereo.wav"):
        with pytest.raises(DataError, match=audio.name):
            aligner.align(audio, "NO")
    with pytest.raises(ArgumentError):
        Aligner(bundle, lexicon=3)  # type: ignore[arg-type]
    given = replace(bundle.language, given=GivenGraph(b"", ("NO",), tuple(range(7))))
    with pytest.raises(DataError, match=r"data\.graph"):
        Aligner(replace(bundle, language=given))
    of_features = replace(bundle, features=replace(bundle.features, kind="given"))
    with pytest.raises(DataError, match="--data"):
        Aligner(of_features).align(samples, "NO")


def test_formats_are_read_back_by_a_library(bundle: Bundle, tmp_path: Path) -> None:
    textgrid = pytest.importorskip("praatio.textgrid")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text('"YO" Y\n')
    text = ["NO", '"YO"', "MAYBE", *WORDS[3:-1]]
    found = Aligner(bundle, lexicon=lexicon).align(tiny_recognizer.say(WORDS), text)
    assert len(found.not_in_text) == len(found.unknown) == 1
    (tmp_path / "a.TextGrid").write_text(FORMATS["textgrid"](found, "a"), encoding="utf-8")
    grid = textgrid.openTextgrid(str(tmp_path / "a.TextGrid"), includeEmptyIntervals=True)
    assert grid.tierNames == ("words", "phones", "deviations")
    for name, parts in (("words", found.words), ("phones", found.phones)):
        entries = grid.getTier(name).entries
        assert [(one.label, round(one.start, 3), round(one.end, 3)) for one in entries if one.label] == [
            (part.word, round(part.start_s, 3), round(part.end_s, 3)) for part in parts]
        assert entries[0].start == 0.0 and entries[-1].end == pytest.approx(found.duration_s, abs=1e-3)
        assert all(left.end == right.start for left, right in itertools.pairwise(entries))
    assert {one.label for one in grid.getTier("deviations").entries} == {"", "not in text", "unknown word"}
    tree = json.loads(FORMATS["json"](found, "a"))
    assert [one["word"] for one in tree["unknown"]] == ["MAYBE"] and len(tree["phones"]) == len(found.phones)
    lines = FORMATS["phone-ctm"](found, "a").splitlines()
    assert [line.split()[4] for line in lines] == [phone.word for phone in found.phones]
    assert len(FORMATS["ctm"](found, "a").splitlines()) == len(found.words)


def test_a_transcript_is_a_text_grid_with_a_tier_for_each_channel(bundle: Bundle) -> None:
    samples = tiny_recognizer.say(WORDS)
    found = ngsgd.asr.Recognizer(bundle).transcribe(np.stack([samples, samples], axis=1))
    text = FORMATS["textgrid"](found, "a")
    assert 'name = "words 1"' in text and 'name = "words 2"' in text and "phones" not in text
    assert text.count('text = "NO"') == 2 * WORDS.count("NO")




FSDD = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "fsdd"


@pytest.mark.skipif(not FSDD.exists(), reason="the recordings of FSDD are not there")
def test_boundaries_of_recorded_digits_are_those_of_the_shipped_alignment() -> None:
    """A small network of other recordings; boundaries of words and phones of unseen ones."""
    catalog = fsdd.load_catalog()
    chosen = [one for one in catalog.segments if one.index in range(3)] + [
        one for one in catalog.segments if one.index in range(10, 30)]
    samples = fsdd.read_recordings(fsdd.locate(str(FSDD)), chosen)
    bundle = tiny_recognizer.trained_on(
        [(samples[one.utt_id], catalog.pdf_T[one.utt_id]) for one in chosen if one.index >= 10], catalog.topology)
    aligner, topology = Aligner(bundle), catalog.topology
    errors, num_expected = [], 0
    for one in (one for one in chosen if one.index < 10):
        found = aligner.align(samples[one.utt_id], one.word)
        # the states of the label, without silence at the ends
        state_T = catalog.pdf_T[one.utt_id]
        phone_T = (state_T - topology.num_silence_states) // 3 + 1
        changes = np.flatnonzero(np.diff(np.concatenate([[-1], phone_T, [-1]])))
        starts = [first for first, _ in itertools.pairwise(changes.tolist()) if state_T[first] >= topology.num_silence_states]
        num_expected += len(starts)
        if len(starts) == len(found.phones):
            errors += [abs(100 * phone.start_s - first) for phone, first in zip(found.phones, starts, strict=True)]
    # some recordings have another pronunciation than the label
    assert len(errors) > 0.7 * num_expected > 100
    # frames of 10 ms; the field's criterion for good boundaries is 20 ms
    assert np.median(errors) <= 2.0
