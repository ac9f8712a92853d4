import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.corpora import an4
from ngsgd.asr.corpora.copies import hold_out
from ngsgd.asr.corpora.corpus import check_source, check_use, prepare
from ngsgd.asr.lang import graphs
from ngsgd.asr.utterance import FramedUtterance, unaligned
from ngsgd.config import DataConfig, DecodeConfig, FeatureConfig
from ngsgd.errors import DataError
from tests.reported import silent

kaldiio = pytest.importorskip("kaldiio")
kaldifst = pytest.importorskip("kaldifst")

FEATURES = FeatureConfig(kind="given", cmvn="speaker")
SPEAKERS = [f"s{number}" for number in range(8)]
DICTIONARY = "A  AH\nA(2)  EY\nGO  G OW\n"
LM = """legacy text, with ngram 1=nr in its head

\\data\\
ngram 1=6
ngram 2=1

\\1-grams:
-0.7000\t<UNK>\t0.0000
-0.7000\t</s>\t-99.0000
-99.0000\t<s>\t 0.0000
-0.7000\tA\t 0.0000
-0.7000\tGO\t 0.0000
-0.7000\tWEAN\t 0.0000

\\2-grams:
-0.0001\tA\tGO

\\end\\
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all files of the release, small; and their checksums."""
    folder = tmp_path / "an4"
    folder.mkdir()
    rng = np.random.default_rng(0)
    spoken = {"train": [(s, u) for s in SPEAKERS for u in range(3)], "test": [("t0", 0), ("t1", 0)]}
    for name, utterances in spoken.items():
        ids = [f"{speaker}-{number}" for speaker, number in utterances]
        matrices = {utt_id: rng.normal(size=(20, 13)).astype(np.float32) for utt_id in ids}
        kaldiio.save_ark(str(folder / f"feats_{name}.ark"), matrices, scp=str(folder / f"feats_{name}.scp"))
        for table, value in (("text", "A GO"), ("utt2spk", "{}"), ("utt2num_frames", "20")):
            (folder / f"{table}_{name}").write_text("".join(f"{one} {value.format(one[:2])}\n"
                                                            for one in ids))
        np.savez(folder / f"ali_{name}.npz", pdf=np.resize(np.arange(15, dtype=np.uint8), 20 * len(ids)), utt_ids=ids,
                 offsets=20 * np.arange(len(ids) + 1), num_pdfs=15, tid2pdf=np.repeat(np.arange(15), 2))
    words = {"<eps>": 0, "<UNK>": 1, "A": 2, "GO": 3}
    (folder / "ali.json").write_text(json.dumps({"phones": ["SIL", "AH", "EY", "G", "OW"], "states_per_phone": 3, "words": words}))
    for file, text in {"an4.dic": DICTIONARY, "an4.ug.lm": LM, "LICENSE": "free",
                       "README.upstream": "upstream"}.items():
        (folder / file).write_text(text)
    kaldifst.compile("0 1 1 2\n1 1 2 0\n1\n").write(str(folder / "HCLG.fst"))
    released = set(an4.released_checksums())
    assert {path.name for path in folder.iterdir()} >= released - {"README.upstream"}
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in released}
    monkeypatch.setattr(an4, "released_checksums", lambda: sums)
    return folder


def test_complete_speakers_of_train_are_held_out(source: Path, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(corpus="an4", source=str(source), valid_fraction=0.2), FEATURES, tmp_path / "cache", silent)
    assert len(corpus.valid.texts) == 6  # two speakers of eight: the first that reach a fifth
    assert not set(corpus.valid.speakers) & set(corpus.train.speakers)
    assert set(corpus.valid.speakers) | set(corpus.train.speakers) == set(SPEAKERS)
    assert corpus.num_pdfs == 15 and corpus.train.is_aligned and corpus.test.is_aligned


def test_features_are_normalized_over_each_speaker(source: Path, tmp_path: Path) -> None:
    test = prepare(DataConfig(corpus="an4", source=str(source)), FEATURES, tmp_path / "cache", silent).test
    for features_TD in test.split_features():  # each of them is all of its speaker
        np.testing.assert_allclose(features_TD.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(features_TD.std(axis=0), 1, atol=1e-4)


def test_both_graphs_exist_after_loading_from_the_cache(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("kaldilm")
    from ngsgd.asr.decode.evaluation import build_graph

    for _ in range(2):
        language = prepare(DataConfig(corpus="an4", source=str(source)), FEATURES, tmp_path / "cache", silent).language
    given, made = (build_graph(language, DecodeConfig(graph=kind)) for kind in ("given", "made"))
    assert given.words == ("<UNK>", "A", "GO")
    assert [arc.ilabel for arc in kaldifst.ArcIterator(given.fst, 0)] == [1]
    assert made.fst.num_states > 10
    assert language.topology.lexicon == {"<UNK>": (("SIL",),), "A": (("AH",), ("EY",)), "GO": (("G", "OW"),)}
    assert "WEAN" not in language.arpa and "GO" in language.arpa
    assert graphs.with_word_penalty(made, 1.0).fst.num_states == made.fst.num_states


@pytest.mark.parametrize(("given", "sentence"), [
    ("", r"data\.source.*recipe=an4.*CMU"),
    ("/no/such/place", r"data\.source.*/no/such/place.*CMU")])
def test_a_missing_source_is_reported_with_its_location(given: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        check_source(DataConfig(corpus="an4", source=given))


@pytest.mark.parametrize(("missing", "settings", "graph"), [
    ("feats_test.ark", {"alignment": "flat"}, "made"), ("HCLG.fst", {}, "auto"), ("HCLG.fst", {"alignment": "flat"}, "given"),
    ("ali_train.npz", {}, "made"), ("ali_train.npz", {"alignment": "flat"}, "auto"), ("ali_test.npz", {"labels": "ladder"}, "auto"),
    ("ali.json", {"alignment": "flat"}, "auto")])
@pytest.mark.entry("Nc4")
def test_a_missing_file_that_the_settings_use_is_named(
        source: Path, missing: str, settings: dict[str, Any], graph: Any) -> None:
    (source / missing).unlink()
    with pytest.raises(DataError, match=re.escape(missing)):
        check_use(DataConfig(corpus="an4", source=str(source), **settings), DecodeConfig(graph=graph))


@pytest.mark.entry("Nc4", "AN4 from its public cepstra, without the labels and the graph of a GMM", "works",
                   "`recipes/an4/local/prepare.py` packs them, and only the files that the settings use are required.")
def test_the_public_files_alone_train_from_transcripts(source: Path, tmp_path: Path) -> None:
    with_gmm = DataConfig(corpus="an4", source=str(source))
    before = prepare(with_gmm, FEATURES, tmp_path / "cache", silent)
    for path in [path for path in source.iterdir() if path.name not in an4.SPEECH]:
        path.unlink()
    others: list[dict[str, Any]] = [{}, {"labels": "ladder"}, {"lm_order": 1}]
    for settings in others:
        check_use(DataConfig(corpus="an4", source=str(source), alignment="flat", **settings),
                  DecodeConfig(graph="auto" if settings else "made"))
    corpus = prepare(with_gmm, FEATURES, tmp_path / "cache", silent)
    # the same speech and words; nothing of the GMM comes from the cache
    assert corpus.language.topology == before.language.topology and corpus.language.arpa == before.language.arpa
    assert before.train.is_aligned and not corpus.train.is_aligned
    assert before.language.given and corpus.language.given is None


def test_file_of_another_release_is_named_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    with (source / "text_train").open("a") as file:
        file.write("s0-9 A\n")
    with pytest.raises(DataError, match=r"text_train.*SHA-256 [0-9a-f]{16}\.\.\."):
        prepare(DataConfig(corpus="an4", source=str(source)), FEATURES, tmp_path / "cache", silent)
    assert not (tmp_path / "cache").exists()


def framed(speaker: str, number: int) -> FramedUtterance:
    return FramedUtterance(f"{speaker}-{number}", speaker, ("A",), np.zeros((1, 1), np.float32), unaligned(1))


def test_with_few_speakers_utterances_are_held_out_and_one_utterance_is_too_few() -> None:
    train, valid = hold_out([framed("only", number) for number in range(10)], share=0.25)
    assert (len(train), len(valid)) == (7, 3)
    assert hold_out([framed("only", number) for number in reversed(range(10))], share=0.25)[1] == valid[::-1]
    with pytest.raises(DataError, match="1 utterance"):
        hold_out([framed("only", 0)], share=0.5)
