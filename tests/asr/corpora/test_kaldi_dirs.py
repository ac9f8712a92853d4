import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.align import forced_alignment
from ngsgd.asr.corpora import alignments, kaldi_dirs
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.utterance import UNALIGNED, num_frames
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError
from ngsgd.exports.kaldi import export_set
from tests.asr.fake_fsdd import write_wav
from tests.asr.made_up_speech import LEXICON, write_data
from tests.reported import silent

soundfile = pytest.importorskip("soundfile")
kaldiio = pytest.importorskip("kaldiio")
pytest.importorskip("kaldi_native_fbank")

States = dict[str, np.ndarray]
SETS = ("train", "valid", "test")
UNKNOWN = "train-s0-2 YES MAYBE"

FEATURES = FeatureConfig(kind="mfcc", num_mel_bins=23, cmvn="speaker", sample_rate_hz=16000)
GIVEN = replace(FEATURES, kind="given")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mine")


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "mine"))


def config(folder: Path, **settings: object) -> DataConfig:
    return replace(DataConfig(corpus="kaldi", source=str(folder)), **settings)  # type: ignore[arg-type]


def edit(path: Path, line: int, text: str | None) -> None:
    """Replaces a line, counted from 1; None removes it."""
    lines = path.read_text().splitlines()
    lines[line - 1:line] = [] if text is None else [text]
    path.write_text("\n".join(lines) + "\n")


def give_features(folder: Path) -> None:
    """feats.scp instead of audio: 5 features, 40 frames."""
    rng = np.random.default_rng(0)
    for name in SETS:
        utt_ids = [line.split()[0] for line in (folder / name / "text").read_text().splitlines()]
        matrices = {utt_id: rng.normal(size=(40, 5)).astype(np.float32) for utt_id in utt_ids}
        kaldiio.save_ark(str(folder / name / "feats.ark"), matrices, scp=str(folder / name / "feats.scp"))


def test_data_directories_become_a_corpus(mine: Path, tmp_path: Path) -> None:
    corpus = prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    assert corpus.train.speakers == ("train-s0", "train-s1") * 3
    assert corpus.language.topology == Topology(("N", "Y"), {word: ((phone,),) for word, phone in LEXICON.items()}, 1)
    expected = [num_frames(len(soundfile.read(mine / "test" / f"{utt_id}.wav")[0]), 16000) for utt_id in corpus.test.frames.utt_ids]
    assert np.diff(corpus.test.frames.offsets).tolist() == expected
    assert (corpus.train.frames.pdf_T == UNALIGNED).all()


def test_flac_segments_and_relative_paths_give_the_frames_of_the_wav(mine: Path, tmp_path: Path) -> None:
    plain = prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    for wav in sorted((mine / "test").glob("*.wav")):
        samples, rate_hz = soundfile.read(wav, dtype="int16")
        soundfile.write(wav.with_suffix(".flac"), np.concatenate([np.zeros(800, np.int16), samples]), rate_hz)
        length_s = len(samples) / rate_hz
        with (mine / "test" / "segments").open("a") as file:
            file.write(f"{wav.stem} rec-{wav.stem} 0.05 {0.05 + length_s:.6f}\n")
    scp = (mine / "test" / "wav.scp").read_text().splitlines()
    (mine / "test" / "wav.scp").write_text("".join(f"rec-{line.split()[0]} {line.split()[0]}.flac\n" for line in scp))
    cut = prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    assert np.array_equal(plain.test.frames.features_TD, cut.test.frames.features_TD)


def test_without_a_valid_set_some_of_train_is_held_out_and_always_the_same(mine: Path, tmp_path: Path) -> None:
    shutil.rmtree(mine / "valid")
    corpus, again = (prepare(config(mine, valid_fraction=0.3), FEATURES, tmp_path / cache, silent)
                     for cache in ("cache", "other"))
    assert len(corpus.valid.texts) == 2
    assert not set(corpus.valid.frames.utt_ids) & set(corpus.train.frames.utt_ids)
    assert corpus.valid.frames.utt_ids == again.valid.frames.utt_ids
    assert corpus.digest == again.digest


def test_changed_audio_is_prepared_again(mine: Path, tmp_path: Path) -> None:
    first = prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    path = mine / "train" / "train-s0-0.wav"
    write_wav(path, soundfile.read(path, dtype="int16")[0][:-1600], rate_hz=16000)
    assert first.digest != prepare(config(mine), FEATURES, tmp_path / "cache", silent).digest


def test_lhotse_manifests_give_the_frames_of_the_data_directories(mine: Path, tmp_path: Path) -> None:
    for name in SETS:
        recordings, supervisions = [], []
        for line in (mine / name / "text").read_text().splitlines():
            utt_id, *words = line.split()
            length = len(soundfile.read(mine / name / f"{utt_id}.wav")[0])
            recordings.append({"id": f"r-{utt_id}", "sources": [{"type": "file", "channels": [0], "source": f"{utt_id}.wav"}],
                               "sampling_rate": 16000, "num_samples": length, "duration": length / 16000})
            supervisions.append({"id": utt_id, "recording_id": f"r-{utt_id}", "start": 0.0, "duration": length / 16000,
                                 "channel": 0, "text": " ".join(words), "speaker": "-".join(utt_id.split("-")[:2])})
        for kind, items in (("recordings", recordings), ("supervisions", supervisions)):
            with gzip.open(mine / name / f"{kind}.jsonl.gz", "wt") as file:
                file.write("".join(json.dumps(item) + "\n" for item in items))
    ours, lhotses = (prepare(config(mine, corpus=kind), FEATURES, tmp_path / "cache", silent) for kind in ("kaldi", "lhotse"))
    for name in SETS:
        left, right = getattr(ours, name), getattr(lhotses, name)
        assert (left.texts, left.speakers, left.frames.utt_ids) == (right.texts, right.speakers, right.frames.utt_ids)
        assert np.array_equal(left.frames.features_TD, right.frames.features_TD)


def cut_a_wav(folder: Path) -> None:
    path = folder / "train/train-s0-4.wav"
    path.write_bytes(path.read_bytes()[:-1000])


def end_after_the_recording(folder: Path) -> None:
    lines = [f"{line.split()[0]} {line.split()[0]} 0 {99 if number == 1 else 0.5}"
             for number, line in enumerate((folder / "train/text").read_text().splitlines())]
    (folder / "train/segments").write_text("\n".join(lines) + "\n")


def use_a_name_in_two_sets(folder: Path) -> None:
    for table in ("text", "utt2spk", "wav.scp"):
        path = folder / "test" / table
        path.write_text(path.read_text().replace("test-s0-0 ", "train-s0-0 "))


@pytest.mark.parametrize(("damage", "sentence"), [
    (lambda folder: edit(folder / "train/text", 2, "train-s1-1 "), "train/text:2.*train-s1-1"),
    (lambda folder: edit(folder / "train/text", 3, UNKNOWN),
     r"train/text:3.*MAYBE.*train-s0-2.*lexicon\.txt"),
    (lambda folder: edit(folder / "train/text", 3, "train-s0-0 YES"), "train/text:3: train-s0-0.*train/text:1"),
    (lambda folder: (folder / "test/test-s0-0.wav").unlink(), r"test/wav\.scp:1.*test-s0-0\.wav"),
    (lambda folder: write_wav(folder / "valid/valid-s1-1.wav", np.zeros(8000, "<i2"), rate_hz=8000),
     r"valid/wav\.scp:2.*valid-s1-1\.wav.*8000 Hz.*features\.sample_rate_hz.*16000"),
    (cut_a_wav, r"train/wav\.scp:5.*train-s0-4\.wav.*truncated.* \d+ .*\d+ .*samples"),
    (lambda folder: write_wav(folder / "train/train-s0-4.wav", [0] * 99, rate_hz=16000, channels=2),
     r"train/wav\.scp:5: .*train-s0-4\.wav has 2 channels"),
    (lambda folder: (folder / "train/train-s0-4.wav").write_text("<html>"), r"train/wav\.scp:5.*train-s0-4\.wav"),
    (lambda folder: edit(folder / "train/utt2spk", 4, None), "train/text:4: train-s1-3.*train/utt2spk"),
    (lambda folder: edit(folder / "train/text", 4, None), "train/utt2spk:4: train-s1-3"),
    (lambda folder: (folder / "test/utt2spk").unlink(), "test/utt2spk"),
    (lambda folder: (folder / "test/text").write_text("\n"), r"test/text is empty"),
    (lambda folder: edit(folder / "train/wav.scp", 1, "train-s0-0 sph2pipe -f wav a.sph |"),
     r"train/wav\.scp:1: 'sph2pipe -f.*a\.sph"),
    (end_after_the_recording, "train/segments:2.*0.*99"),
    (lambda folder: (folder / "lexicon.txt").unlink(), r"lexicon\.txt"),
    (lambda folder: edit(folder / "lexicon.txt", 2, "YES"), r"lexicon\.txt:2.*YES"),
    (use_a_name_in_two_sets, "test/text:1: train-s0-0"),
    (lambda folder: (folder / "train/text").write_bytes(b"train-s0-0 \xe9t\xe9\n"), "train/text.*UTF-8"),
])
def test_an_error_in_the_data_is_one_message_and_no_corpus(
        mine: Path, tmp_path: Path, damage: Callable[[Path], None], sentence: str) -> None:
    damage(mine)
    with pytest.raises(DataError, match=sentence) as caught:
        prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    assert "\n" not in str(caught.value)
    # finished shards remain for the next attempt
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_one_data_directory_is_not_the_folder_of_all(mine: Path) -> None:
    with pytest.raises(DataError, match=r"mine/train, .*lexicon\.txt"):
        kaldi_dirs.fingerprint(config(mine / "train"), FEATURES)


def test_unknown_words_are_allowed_with_an_oov_word(mine: Path) -> None:
    edit(mine / "train/text", 3, UNKNOWN)
    sets, _ = kaldi_dirs.make(config(mine, oov_word="NO"), FEATURES, AugmentConfig())
    assert sets["train"].texts[2] == ("YES", "MAYBE")
    with pytest.raises(DataError, match=r"data\.oov_word.*HM"):
        kaldi_dirs.make(config(mine, oov_word="HM"), FEATURES, AugmentConfig())


def test_features_that_come_with_the_data_are_taken_and_a_nan_among_them_is_named(mine: Path, tmp_path: Path) -> None:
    give_features(mine)
    corpus = prepare(config(mine), GIVEN, tmp_path / "cache", silent)
    assert corpus.train.frames.features_TD.shape == (240, 5)
    matrices = kaldiio.load_ark(str(mine / "train/feats.ark"))
    damaged = {utt_id: np.array(matrix) for utt_id, matrix in matrices}
    damaged["train-s0-2"][7, 1] = np.nan
    kaldiio.save_ark(str(mine / "train/feats.ark"), damaged, scp=str(mine / "train/feats.scp"))
    with pytest.raises(DataError, match=r"train/feats\.scp:3: train-s0-2.*frame 7"):
        prepare(config(mine), GIVEN, tmp_path / "cache", silent)


@pytest.mark.parametrize("cmvn", ["speaker", "utterance"])
def test_features_and_cmvn_come_back_from_a_data_directory_written_here(mine: Path, tmp_path: Path, cmvn: Any) -> None:
    corpus = prepare(config(mine), replace(FEATURES, cmvn=cmvn), tmp_path / "cache", silent)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(mine / "lexicon.txt", other)
    for name in SETS:
        export_set(getattr(corpus, name), other / name, ivector_period=10)
    back = prepare(config(other), replace(GIVEN, cmvn="given"), tmp_path / "cache", silent)
    for name in SETS:
        before, after = getattr(corpus, name), getattr(back, name)
        assert sorted(before.frames.utt_ids) == list(after.frames.utt_ids)
        where = {utt_id: u for u, utt_id in enumerate(before.frames.utt_ids)}
        for utt_id, features_TD in zip(after.frames.utt_ids, after.split_features(), strict=True):
            expected_TD = before.split_features()[where[utt_id]]
            # float32 of values a hundred times as large
            np.testing.assert_allclose(features_TD, expected_TD, atol=1e-4)


def test_given_cmvn_that_lacks_a_speaker_or_has_another_dimension_is_named(mine: Path, tmp_path: Path) -> None:
    give_features(mine)
    for name in SETS:
        stats = {f"{name}-s{number}": np.ones((2, 6)) for number in range(2)}
        kaldiio.save_ark(str(mine / name / "cmvn.ark"), stats, scp=str(mine / name / "cmvn.scp"))
    given = replace(GIVEN, cmvn="given")
    edit(mine / "valid/cmvn.scp", 2, None)
    with pytest.raises(DataError, match=r"valid/text:2: valid-s1-1.*valid/cmvn\.scp"):
        prepare(config(mine), given, tmp_path / "cache", silent)
    kaldiio.save_ark(str(mine / "valid/cmvn.ark"), {"valid-s0": np.ones((2, 6)), "valid-s1": np.ones((2, 7))},
                     scp=str(mine / "valid/cmvn.scp"))
    with pytest.raises(DataError, match=r"valid/cmvn\.scp:2.*2.*7; statistics.*2.*6"):
        prepare(config(mine), given, tmp_path / "cache", silent)


def with_graph(folder: Path, arcs: str) -> DataConfig:
    (folder / "graph").mkdir()
    pytest.importorskip("kaldifst").compile(arcs).write(str(folder / "graph/HCLG.fst"))
    (folder / "graph/words.txt").write_text("<eps> 0\nNO 1\n")
    return config(folder, graph=str(folder / "graph"))


@pytest.mark.entry("K1")
@pytest.mark.parametrize("damage", [lambda content: content[:-5], lambda content: b"nothing", lambda content: b""])
def test_a_damaged_graph_is_refused_before_the_audio_is_read(mine: Path, damage: Callable[[bytes], bytes]) -> None:
    settings = with_graph(mine, "0 1 1 1\n1 1 1 0\n1\n")
    path = mine / "graph/HCLG.fst"
    (mine / "graph/tid2pdf").write_text("1 0\n")
    assert kaldi_dirs.make(settings, FEATURES, AugmentConfig())[1].num_pdfs == 1
    path.write_bytes(damage(path.read_bytes()))
    shutil.rmtree(mine / "train")
    with pytest.raises(DataError, match=r"HCLG\.fst"):
        kaldi_dirs.make(settings, FEATURES, AugmentConfig())


def test_a_graph_with_the_model_of_kaldi_needs_no_table(mine: Path) -> None:
    settings = with_graph(mine, "0 1 1 1\n1 1 2 0\n1\n")
    model = """<TransitionModel> <Topology> <TopologyEntry> <ForPhones> 1 2 </ForPhones> <State> 0 <PdfClass> 0
        <Transition> 0 0.5 <Transition> 1 0.5 </State> <State> 1 </State> </TopologyEntry> </Topology>
        <Triples> 2 1 0 5 2 0 3 </Triples> <LogProbs> [ 0 -1 -1 -1 -1 ] </LogProbs> </TransitionModel>"""
    (mine / "graph/final.mdl").write_text(model)
    given = kaldi_dirs.make(settings, FEATURES, AugmentConfig())[1].given
    assert given is not None and given.tid2pdf == (5, 5, 3, 3)
    before = kaldi_dirs.fingerprint(settings, FEATURES)
    (mine / "graph/final.mdl").write_text(model.replace("2 0 3", "2 0 4"))
    assert kaldi_dirs.fingerprint(settings, FEATURES) != before


def paths(folder: Path, features: FeatureConfig) -> States:
    """Labels in equal parts, which are paths of the transcripts."""
    sets, language = kaldi_dirs.make(config(folder), features, AugmentConfig())
    found: States = {}
    for speech in sets.values():
        for u, utt_id in enumerate(speech.frames.utt_ids):
            num_frames = int(np.diff(speech.frames.offsets)[u])
            labels = forced_alignment.equal_parts(language.topology, speech.texts[u], num_frames)
            assert labels is not None
            found[utt_id] = labels
    return found


def write_text_alignment(folder: Path, states: States, suffix: str = "txt") -> Path:
    alignments.write(folder / f"ali.{suffix}", states)
    return folder / f"ali.{suffix}"


def write_kaldi_alignment(folder: Path, states: States) -> Path:
    """Two packed archives of transition ids, two transitions for each pdf."""
    (folder / "ali").mkdir()
    for number, part in enumerate((list(states)[:5], list(states)[5:]), start=1):
        plain = folder / f"ali.{number}"
        kaldiio.save_ark(str(plain), {utt_id: (2 * states[utt_id] + 1).astype(np.int32) for utt_id in part})
        (folder / "ali" / f"ali.{number}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "ali/tid2pdf").write_text("".join(f"{tid} {(tid - 1) // 2}\n" for tid in range(1, 15)))
    return folder / "ali"


@pytest.mark.parametrize("write", [
    write_text_alignment, partial(write_text_alignment, suffix="npz"), write_kaldi_alignment])
def test_alignments_of_every_form_label_the_frames(mine: Path, tmp_path: Path, write: Callable[[Path, States], Path]) -> None:
    give_features(mine)
    states = paths(mine, GIVEN)
    path = write(tmp_path, states)
    corpus = prepare(config(mine, alignment=str(path)), GIVEN, tmp_path / "cache", silent)
    assert np.array_equal(corpus.train.frames.pdf_T, np.concatenate([states[utt_id] for utt_id in corpus.train.frames.utt_ids]))
    assert corpus.train.is_aligned


@pytest.mark.entry("K8", "you give alignments of Kaldi's default features (`--snip-edges=true`) with audio", "error",
                   "`DataError`: the message names `--snip-edges=false`, as features here are made, and `features.kind=given`.")
@pytest.mark.parametrize(("change", "sentence"), [
    (lambda one: {utt_id: pdfs[:-1] for utt_id, pdfs in one.items()},
     r"ali\.txt has 39 .*train-\S+.* 40 .*--snip-edges=false.*features\.kind=given"),
    (lambda one: {utt_id: pdfs + 1 for utt_id, pdfs in one.items()}, r"ali\.txt has .* 7 .*train-\S+.* 7 "),
    (lambda one: {f"x{utt_id}": pdfs for utt_id, pdfs in one.items()}, "6.*6 utterances"),
])
def test_alignment_of_other_data_is_refused(mine: Path, tmp_path: Path, change: Callable[[States], States], sentence: str) -> None:
    give_features(mine)
    states = {utt_id: np.resize(np.arange(7), 40) for utt_id in paths(mine, GIVEN)}
    path = write_text_alignment(tmp_path, change(states))
    with pytest.raises(DataError, match=sentence):
        prepare(config(mine, alignment=str(path)), GIVEN, tmp_path / "cache", silent)


def test_utterances_without_states_are_skipped_and_named(mine: Path, tmp_path: Path) -> None:
    give_features(mine)
    states = {utt_id: pdf_T for utt_id, pdf_T in paths(mine, GIVEN).items() if utt_id != "train-s0-2"}
    reports: list[str] = []
    corpus = prepare(config(mine, alignment=str(write_text_alignment(tmp_path, states))), GIVEN, tmp_path / "cache", reports.append)
    assert "train-s0-2" not in corpus.train.frames.utt_ids
    assert len(corpus.train.texts) == 5
    assert any("train: 1" in line and "train-s0-2" in line for line in reports)


def test_changed_copies_take_the_labels_of_their_originals(mine: Path, tmp_path: Path) -> None:
    clean = prepare(config(mine), FEATURES, tmp_path / "cache", silent)
    states = paths(mine, FEATURES)
    settings = config(mine, alignment=str(write_text_alignment(tmp_path, states)))
    corpus = prepare(settings, FEATURES, tmp_path / "cache", silent, augment_config=AugmentConfig(speed="all"))
    assert len(corpus.train.texts) == 3 * len(clean.train.texts)
    assert corpus.valid.frames.utt_ids == clean.valid.frames.utt_ids
    labels = dict(zip(corpus.train.frames.utt_ids, corpus.train.split_pdfs(), strict=True))
    for utt_id in clean.train.frames.utt_ids:
        assert np.array_equal(labels[utt_id], states[utt_id])
        fast = labels[f"sp1.1-{utt_id}"]
        assert len(fast) == pytest.approx(len(states[utt_id]) / 1.1, abs=1)
        assert all(label == states[utt_id][min(int((t + 0.5) * 1.1), len(states[utt_id]) - 1)] for t, label in enumerate(fast))
