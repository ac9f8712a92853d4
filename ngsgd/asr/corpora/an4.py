"""AN4 (the Census corpus of CMU) from its public cepstra.

The inputs are Kaldi archives, transcripts, dictionary, language model and alignment. The data are
not part of the package; corpora/an4/SHA256SUMS lists the required files. There is no development
set, so complete speakers of the training set are held out for validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from ngsgd import files
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora.held_out import hold_out
from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Pronunciation, Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import FramedUtterance
from ngsgd.config import DataConfig, FeatureConfig
from ngsgd.errors import DataError

SHIPPED = "corpora/an4.sha256"
# egs/an4 removes these words from the unigrams
NOT_IN_KALDIS_LM = {"HALL", "LANE", "MEMORY", "TWELVTH", "WEAN"}
UNKNOWN = "<UNK>"
WHERE = ("get the feature distribution of AN4 from CMU (the folder an4/ of "
         "github.com/cphazen/Machine-Learning-Project-ASR, packed as described in "
         "recipes/an4/README.md) and set data.source=PATH to its folder")


def locate(source: str) -> Path:
    """Return the folder of the corpus; raise DataError if it is missing or another release."""
    if not source:
        raise DataError(f"data.source is empty, and recipe=an4 has no download; {WHERE}.")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"data.source is {source}, which is not a folder; {WHERE}.")
    missing = [name for name in released_checksums() if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}; {WHERE}.")
    return folder


def make(data: DataConfig, feature_config: FeatureConfig) -> tuple[dict[str, SpeechSet], Language]:
    """Return train, valid and test, and the language with the decoding graph of Kaldi."""
    folder = locate(data.source)
    for name, expected in released_checksums().items():
        if (found := files.sha256(folder / name)) != expected:
            raise DataError(f"{folder / name} has the SHA-256 {found[:16]}..., but the supported "
                            f"release has {expected[:16]}...; {WHERE}.")
    every, test = (_read_set(folder, name) for name in ("train", "test"))
    train, valid = hold_out(every, share=data.valid_fraction)
    sets: dict[str, Sequence[FramedUtterance]] = {"train": train, "valid": valid, "test": test}
    return {name: speech_set.assemble(utterances, feature_config)
            for name, utterances in sets.items()}, _language(folder)


def released_checksums() -> Mapping[str, str]:
    lines = resources.files("ngsgd.asr").joinpath(SHIPPED).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def _read_set(folder: Path, name: str) -> list[FramedUtterance]:
    features = tables.read_ark(folder / f"feats_{name}.ark")
    texts = tables.read_table(folder / f"text_{name}")
    speakers = tables.read_table(folder / f"utt2spk_{name}")
    pdfs = alignments.read(folder / f"ali_{name}.npz").pdf_T
    return [FramedUtterance(utt_id, speakers[utt_id].value, tuple(text.value.split()),
                            features[utt_id], pdfs[utt_id])
            for utt_id, text in texts.items()]


def _language(folder: Path) -> Language:
    about = json.loads((folder / "ali.json").read_text(encoding="utf-8"))
    lexicon = _lexicon((folder / "an4.dic").read_text(encoding="utf-8"))
    topology = Topology(tuple(about["phones"][1:]), lexicon,
                        num_silence_states=about["states_per_phone"])
    numbered = sorted((number, word) for word, number in about["words"].items() if number)
    words = dict(numbered)
    with np.load(folder / "ali_train.npz") as arrays:
        tid2pdf = tuple(arrays["tid2pdf"].tolist())
    given = GivenGraph((folder / "HCLG.fst").read_bytes(),
                       tuple(words.get(n, f"#{n}") for n in range(1, max(words) + 1)), tid2pdf)
    return Language(topology,
                    arpa=_kaldis_unigrams((folder / "an4.ug.lm").read_text(encoding="utf-8")),
                    given=given)


def _lexicon(text: str) -> dict[str, tuple[Pronunciation, ...]]:
    """Read the dictionary of CMU, "WORD(2) PH PH" for second pronunciations.

    The unknown word of Kaldi is pronounced as silence.
    """
    lexicon: dict[str, tuple[Pronunciation, ...]] = {UNKNOWN: (("SIL",),)}
    for line in text.splitlines():
        if fields := line.split():
            word = re.sub(r"\(\d+\)$", "", fields[0])
            phones = tuple(fields[1:])
            if phones not in lexicon.get(word, ()):
                lexicon[word] = (*lexicon.get(word, ()), phones)
    return lexicon


def _kaldis_unigrams(text: str) -> str:
    """Return the unigrams of an4.ug.lm without the words that egs/an4 removes, as ARPA text."""
    unigrams = re.findall(r"^(-\d+\.\d+)\s+(\S+)\s+-?\d+\.\d+$", text, re.MULTILINE)
    lines = [f"{cost}\t{word}" for cost, word in unigrams if word not in NOT_IN_KALDIS_LM]
    return "\n".join(["\\data\\", f"ngram 1={len(lines)}", "", "\\1-grams:", *lines, "", "\\end\\",
                      ""])
