"""AN4 (the Census corpus of CMU) from its public cepstra, and optionally a GMM's labels and graph.

The data are not part of the package; an4.sha256 lists the files. There is no development set, so
complete speakers of the training set are held out for validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd import files
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora.copies import hold_out
from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import SILENCE_PHONE, Pronunciation, Topology
from ngsgd.asr.utterance import FramedUtterance, unaligned
from ngsgd.config import DataConfig, FeatureConfig
from ngsgd.errors import DataError

SHIPPED = "corpora/an4.sha256"
# egs/an4 removes these words from the unigrams
NOT_IN_KALDIS_LM = {"HALL", "LANE", "MEMORY", "TWELVTH", "WEAN"}
UNKNOWN = "<UNK>"
WHERE = ("make its folder from CMU's distribution of features with recipes/an4/local/prepare.py (see "
         "recipes/an4/README.md) and set data.source=PATH to it")
SPEECH = ("feats_train.ark", "feats_test.ark", "text_train", "text_test", "utt2spk_train", "utt2spk_test", "an4.dic",
          "an4.ug.lm")
# of a GMM, and not public: the settings that need them, and those that do not
OF_GMM = {
    "labels": (("ali_train.npz", "ali_test.npz"), "data.alignment=flat makes labels from the transcripts"),
    "graph": (("HCLG.fst", "ali.json", "ali_train.npz"), "decode.graph=made makes a graph from dictionary and unigrams")}


def require_of_gmm(source: str, wanted: Sequence[str]) -> None:
    """Raise DataError if the folder lacks files of a GMM; `wanted` are keys of `OF_GMM`."""
    missing = {kind: [name for name in OF_GMM[kind][0] if not (locate(source) / name).is_file()] for kind in wanted}
    if names := [name for kind in wanted for name in missing[kind]]:
        others = "; ".join(OF_GMM[kind][1] for kind in wanted if missing[kind])
        raise DataError(f"{source} lacks {', '.join(dict.fromkeys(names))}, the {' and '.join(wanted)} of a "
                        f"GMM, which these settings use; {others}.")


def fingerprint(data: DataConfig) -> dict[str, Any]:
    """The optional files that exist; the content of all files is known."""
    return {"of_gmm": _of_gmm(locate(data.source))}


def _of_gmm(folder: Path) -> list[str]:
    return [kind for kind, (names, _) in OF_GMM.items() if all((folder / name).is_file() for name in names)]


def locate(source: str) -> Path:
    """Return the folder of the corpus; raise DataError if its speech is missing."""
    if not source:
        raise DataError(f"data.source is empty, and recipe=an4 has no download; {WHERE}.")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"data.source is {source}, which is not a folder; {WHERE}.")
    if missing := [name for name in SPEECH if not (folder / name).is_file()]:
        raise DataError(f"{folder} lacks {', '.join(missing)}; {WHERE}.")
    return folder


def make(data: DataConfig, feature_config: FeatureConfig) -> tuple[dict[str, speech_set.SpeechSet], Language]:
    """Return train, valid and test, and the language; labels and graph of a GMM if they exist."""
    folder = locate(data.source)
    of_gmm = _of_gmm(folder)
    released = released_checksums()
    for name in dict.fromkeys([*SPEECH, *(name for kind in of_gmm for name in OF_GMM[kind][0])]):
        if (found := files.sha256(folder / name)) != released[name]:
            raise DataError(f"{folder / name} has the SHA-256 {found[:16]}..., but the supported "
                            f"release has {released[name][:16]}...; {WHERE}.")
    every, test = (_read_set(folder, name, is_labeled="labels" in of_gmm) for name in ("train", "test"))
    train, valid = hold_out(every, share=data.valid_fraction)
    sets: dict[str, Sequence[FramedUtterance]] = {"train": train, "valid": valid, "test": test}
    return {name: speech_set.assemble(utterances, feature_config)
            for name, utterances in sets.items()}, _language(folder, has_graph="graph" in of_gmm)


def released_checksums() -> Mapping[str, str]:
    lines = resources.files("ngsgd.asr").joinpath(SHIPPED).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def _read_set(folder: Path, name: str, *, is_labeled: bool) -> list[FramedUtterance]:
    features = tables.read_ark(folder / f"feats_{name}.ark")
    texts = tables.Table(folder / f"text_{name}")
    speakers = tables.Table(folder / f"utt2spk_{name}")
    pdfs = alignments.read(folder / f"ali_{name}.npz").pdf_T if is_labeled \
        else {utt_id: unaligned(len(features[utt_id])) for utt_id in texts}
    return [FramedUtterance(utt_id, speakers[utt_id].value, tuple(text.value.split()), features[utt_id], pdfs[utt_id])
            for utt_id, text in texts.items()]


def _language(folder: Path, *, has_graph: bool) -> Language:
    # the unknown word of Kaldi is pronounced as silence
    lexicon: dict[str, tuple[Pronunciation, ...]] = {UNKNOWN: ((SILENCE_PHONE,),)}
    for line in (folder / "an4.dic").read_text(encoding="utf-8").splitlines():
        if fields := line.split():
            # "WORD(2) PH PH" for second pronunciations
            word, phones = re.sub(r"\(\d+\)$", "", fields[0]), tuple(fields[1:])
            if phones not in lexicon.get(word, ()):
                lexicon[word] = (*lexicon.get(word, ()), phones)
    # in this order the GMM numbered its states, three for each phone
    names = {phone for spoken in lexicon.values() for phones in spoken for phone in phones}
    topology = Topology(tuple(sorted(names - {SILENCE_PHONE})), lexicon, num_silence_states=3)
    unigrams = re.findall(r"^(-\d+\.\d+)\s+(\S+)\s+-?\d+\.\d+$",
                          (folder / "an4.ug.lm").read_text(encoding="utf-8"), re.MULTILINE)
    kept = [f"{cost}\t{word}" for cost, word in unigrams if word not in NOT_IN_KALDIS_LM]
    arpa = "\n".join(["\\data\\", f"ngram 1={len(kept)}", "", "\\1-grams:", *kept, "", "\\end\\", ""])
    if not has_graph:
        return Language(topology, arpa=arpa)
    about = json.loads((folder / "ali.json").read_text(encoding="utf-8"))
    words = dict(sorted((number, word) for word, number in about["words"].items() if number))
    with np.load(folder / "ali_train.npz") as arrays:
        tid2pdf = tuple(arrays["tid2pdf"].tolist())
    given = GivenGraph((folder / "HCLG.fst").read_bytes(),
                       tuple(words.get(n, f"#{n}") for n in range(1, max(words) + 1)), tid2pdf)
    return Language(topology, arpa=arpa, given=given)
