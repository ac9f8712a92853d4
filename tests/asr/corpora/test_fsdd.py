import hashlib
import io
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.corpora import fsdd
from ngsgd.asr.corpora.fsdd import Segment, load_catalog, split
from ngsgd.asr.lang.topology import SILENCE_PDF
from ngsgd.asr.utterance import FRAME_SHIFT, num_frames
from ngsgd.config import DataConfig
from ngsgd.errors import DataError
from tests.asr.fake_fsdd import FakeFsdd, write_wav

REAL = Path(__file__).parents[3].parent / "shared" / "data" / "fsdd"

NOISELESS = DataConfig(corpus="fsdd", snr_db_low=60.0, snr_db_high=60.0)


@pytest.fixture
def fake(tmp_path: Path) -> FakeFsdd:
    return FakeFsdd(tmp_path)


def pool_of(fake: FakeFsdd, part: str, kind: str = "speaker") -> fsdd.Pool:
    catalog = load_catalog(fake.shipped)
    samples = fsdd.read_recordings(fake.recordings, catalog.segments)
    sets = split(catalog.segments, kind)
    return fsdd.Pool(segments=sets[part], babble=sets["train"], samples=samples, pdf_T=catalog.pdf_T)


def test_babble_is_of_training_recordings_and_never_of_the_speaker_of_the_string(fake: FakeFsdd) -> None:
    pool = pool_of(fake, "test")
    allowed = {segment.utt_id for segment in pool.babble if segment.speaker != "theo"}
    poisoned = {utt_id: samples if utt_id in allowed else np.full(len(samples), np.nan) for utt_id, samples in pool.samples.items()}
    background = fsdd.background_noise("babble", 4000, replace(pool, samples=poisoned), "theo", np.random.default_rng(0))
    assert np.isfinite(background).all()


def test_shipped_list_and_alignment_describe_all_3000_recordings() -> None:
    catalog = load_catalog()
    assert len(catalog.segments) == len(catalog.pdf_T) == 3000
    assert catalog.topology.num_pdfs == 58
    assert sum(map(len, catalog.pdf_T.values())) == 131237
    assert set(np.concatenate(list(catalog.pdf_T.values()))) == set(range(58))


def test_shipped_alignment_spells_the_word_of_each_recording() -> None:
    catalog = load_catalog()
    spellings: dict[str, set[tuple[int, ...]]] = {word: set() for word in catalog.topology.words}
    for word, pdfs in catalog.topology.spellings():
        spellings[word].add(pdfs)
    for segment in catalog.segments:
        pdf_T = catalog.pdf_T[segment.utt_id]
        path = tuple(int(pdf) for pdf in pdf_T[np.flatnonzero(np.diff(pdf_T, prepend=-1))] if pdf != SILENCE_PDF)
        assert path in spellings[segment.word], segment.utt_id


def test_speaker_split_tests_on_speakers_never_trained_on() -> None:
    sets = split(load_catalog().segments, "speaker")
    assert {name: len(members) for name, members in sets.items()} == {"train": 1800, "valid": 200, "test": 1000}
    assert {segment.speaker for segment in sets["test"]} == {"george", "nicolas"}
    assert not {segment.speaker for segment in sets["train"]} & {"george", "nicolas"}


@pytest.mark.parametrize("kind", ["speaker", "official"])
def test_no_recording_is_in_two_sets(kind: str) -> None:
    sets = split(load_catalog().segments, kind)
    assert sum(map(len, sets.values())) == len(set().union(*sets.values())) == 3000


def test_official_split_tests_on_index_0_to_4_and_an_empty_set_is_named(fake: FakeFsdd) -> None:
    tested = split(load_catalog().segments, "official")["test"]
    assert {segment.index for segment in tested} == set(range(5)) and len(tested) == 300
    only_training_speakers = [segment for segment in fake.segments if segment.speaker in ("jackson", "theo")]
    with pytest.raises(DataError, match=r"data\.split=speaker"):
        split(only_training_speakers, "speaker")


def test_alignment_of_other_audio_is_refused(fake: FakeFsdd) -> None:
    fake.write_alignment(1)
    with pytest.raises(DataError, match=r"\d+ frames.*george-0-00 \(0_george_0\.wav\).*\d+"):
        load_catalog(fake.shipped)


def test_strings_are_made_of_the_sets_own_recordings_of_one_speaker(fake: FakeFsdd) -> None:
    pool = pool_of(fake, "test")
    for utterance in fsdd.utterances("test", NOISELESS, pool, minutes=0.5):
        assert utterance.speaker in ("george", "nicolas")
        assert 3 <= len(utterance.words) <= 7
        assert len(utterance.pdf_T) == num_frames(len(utterance.samples))


def test_each_recording_is_used_once_before_any_is_used_again(fake: FakeFsdd) -> None:
    pool = pool_of(fake, "train")
    deck = fsdd.draw_recordings(pool, "theo", np.random.default_rng(0))
    own = [segment for segment in pool.segments if segment.speaker == "theo"]
    assert sorted(s.utt_id for s in (next(deck) for _ in own)) == [s.utt_id for s in own]


def test_labels_stand_where_their_recordings_stand(fake: FakeFsdd) -> None:
    """A string has the labels of the recordings' own frames, half a frame off at most."""
    pool = pool_of(fake, "train")
    segments = pool.segments[:4]
    string = fsdd.splice_string("u", segments, pool, NOISELESS, np.random.default_rng(3))
    # the same draws as in splice_string
    starts, _ = fsdd.lay_out_segments(segments, np.random.default_rng(3))
    speech_T = np.full(len(string.pdf_T), SILENCE_PDF)
    for start, segment in zip(starts, segments, strict=True):
        for t, pdf in enumerate(pool.pdf_T[segment.utt_id]):
            centre = start + FRAME_SHIFT * t + FRAME_SHIFT // 2
            speech_T[centre // FRAME_SHIFT] = pdf
    # a recording's frames and the string's are offset by a fixed fraction, so labels move by one
    # frame at the most
    assert np.mean(speech_T == string.pdf_T) > 0.9
    assert all(np.any(string.pdf_T[max(t - 1, 0):t + 2] == pdf) for t, pdf in enumerate(speech_T))
    # and the audio is there: all but the added noise is inside the recordings
    loud = np.abs(string.samples.astype(float)) > 100
    inside = np.zeros(len(loud), bool)
    for start, segment in zip(starts, segments, strict=True):
        inside[start:start + segment.num_samples] = True
    assert loud[inside].mean() > 0.9
    assert not loud[~inside].any()


def test_strings_are_the_same_in_every_run_and_differ_between_sets(fake: FakeFsdd) -> None:
    pool = pool_of(fake, "train")
    runs = [list(fsdd.utterances(name, NOISELESS, pool, minutes=0.3)) for name in ("train", "train", "valid")]
    audio = [hashlib.sha256(b"".join(u.samples.tobytes() for u in run)).hexdigest() for run in runs]
    assert audio[0] == audio[1] != audio[2]


@pytest.mark.parametrize("form", ["folder", "recordings", "archive", "folder with archive"])
def test_every_form_of_source_gives_the_same_recordings(fake: FakeFsdd, tmp_path: Path, form: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    place = {"folder": fake.source, "recordings": fake.recordings,
             "archive": fake.pack(tmp_path / "any-name.tgz"),
             "folder with archive": fake.pack(other / "recordings.tar.gz").parent}[form]
    samples = fsdd.read_recordings(fsdd.locate(str(place)), fake.segments)
    for segment in fake.segments:
        assert hashlib.sha256(samples[segment.utt_id].tobytes()).hexdigest()[:16] == segment.sha256_pcm


def change_a_sample(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "sentence"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-200]),
     r"1_theo_3\.wav.*truncated: \d+.*\d+ bytes"),
    (lambda path: path.write_bytes(path.read_bytes()[:30]), r"1_theo_3\.wav"),
    (change_a_sample, r"1_theo_3\.wav.*SHA-256"),
    (lambda path: path.write_text("<html>Not found</html>"), r"1_theo_3\.wav"),
    (lambda path: write_wav(path, np.zeros(4000, "<i2"), rate_hz=16000), r"1_theo_3\.wav.*16000"),
    (lambda path: write_wav(path, np.zeros(4000, "<i2"), channels=2), r"1_theo_3\.wav.*2 channels"),
    (lambda path: write_wav(path, np.zeros(4000, "u1"), width=1), r"1_theo_3\.wav.*SHA-256"),
    (Path.unlink, r"lacks 1.*96 recordings.*1_theo_3\.wav"),
])
def test_damaged_recording_is_named(fake: FakeFsdd, damage: Callable[[Path], Any], sentence: str) -> None:
    damage(fake.recordings / "1_theo_3.wav")
    with pytest.raises(DataError, match=sentence):
        fsdd.read_recordings(fake.recordings, fake.segments)


@pytest.mark.parametrize(("place", "reason"), [
    ("/no/such/place", r"data\.source.*/no/such/place"), (None, "recordings")])
def test_a_wrong_path_or_a_folder_without_recordings_is_named(
        tmp_path: Path, place: str | None, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        fsdd.locate(place or str(tmp_path))


class Answer(io.BytesIO):
    """What urlopen returns."""

    def __init__(self, content: bytes, promised: int) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(promised)}


def test_download_is_kept_and_not_repeated(fake: FakeFsdd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = fake.pack(tmp_path / "public.tar.gz").read_bytes()
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> Answer:
        asked.append(url)
        return Answer(content, len(content))
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for _ in range(2):
        archive = fsdd.download(tmp_path / "downloads", lambda _: None)
    assert asked == [fsdd.URL]
    assert len(fsdd.read_recordings(archive, fake.segments)) == len(fake.segments)


def offline(url: str, timeout: float) -> Answer:
    raise urllib.error.URLError("no route to host")


@pytest.mark.parametrize(("urlopen", "reason"), [
    (lambda *_, **__: Answer(b"half", promised=1000), "after 4.*1000 bytes"), (offline, "route")])
def test_a_failed_download_leaves_nothing_and_names_the_next_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urlopen: Any, reason: str) -> None:
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(DataError, match=rf"{reason}.*data\.source"):
        fsdd.download(tmp_path / "downloads", lambda _: None)
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="needs the public recordings in ../shared/data/fsdd")
def test_public_recordings_all_have_the_content_in_the_shipped_list() -> None:
    segments: tuple[Segment, ...] = load_catalog().segments
    samples = fsdd.read_recordings(fsdd.locate(str(REAL)), segments)
    assert all(len(samples[segment.utt_id]) == segment.num_samples for segment in segments)
