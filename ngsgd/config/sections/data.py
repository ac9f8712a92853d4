"""Options of the corpus and of the archives of training examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_GIVEN = "corpus=kaldi|lhotse"
_MADE = "corpus=digits|fsdd & style=connected"


@dataclass(frozen=True)
class DataConfig:
    """The corpus, its source and its size."""

    corpus: Literal["digits", "fsdd", "yesno", "an4", "kaldi", "lhotse"] = option(
        "digits", "corpus for training and test; digits: synthetic; fsdd, yesno, an4: public "
        "corpora; kaldi, lhotse: own data")
    source: str = option("", "folder or archive of the corpus, or the URL of such a folder in "
                         "object storage (s3://, gs:// or az://); empty: fsdd downloads an archive "
                         "with a pinned checksum", used="corpus=fsdd|yesno|an4|kaldi|lhotse")
    added_dirs: tuple[str, ...] = option(
        (), "Kaldi data directories (text, utt2spk, wav.scp) added to the training set, with words "
        "of the corpus's lexicon; empty: none", used="corpus=digits|fsdd|kaldi|lhotse")
    added_copies: int = option(1, "number of copies of each added utterance, each augmented "
                               "independently", low=1, high=1000, used="added_dirs")
    cache_dir: str = option("", "folder for prepared data; empty: OUTPUT_DIR/data")
    store: str = option(
        "", "object storage (s3://, gs:// or az:// URL) from which nodes fetch archives if they do not see the "
            "folder for prepared data; empty: from the coordinator, through Ray")
    node_cache_gb: float = option(50.0, "maximum size of the cache of fetched archives on a node", unit="GB", above=0.0)
    split: Literal["speaker", "official", "loo"] = option(
        "speaker", "test set of fsdd; speaker: two unseen speakers; official: the official split; "
        "loo: the speaker in held_out", used="corpus=fsdd")
    held_out: str = option("", "speaker of the test set with split=loo; empty: none", used="corpus=fsdd")
    style: Literal["connected", "isolated"] = option(
        "connected", "utterances of fsdd; connected: digit strings in noise; isolated: the "
        "original recordings", used="corpus=fsdd")
    lexicon: str = option(
        "", 'pronunciation lexicon, lines of "word phone phone ..."; empty: data.source/lexicon.txt', used=_GIVEN)
    lm: str = option("", "n-gram language model in ARPA format; empty: equal probabilities of all words", used=_GIVEN)
    labels: Literal["one_step", "ladder"] = option(
        "one_step", "steps to the labels; one_step: data.alignment, the corpus or a flat start; ladder: also "
        "tied states, LDA, fMLLR, copies at three speeds, and realignment by a first network")
    num_leaves: int = option(0, "number of tied triphone states, from a decision tree over the "
                             "training labels; 0: the states of single phones; -1: square root of "
                             "the number of speech frames", low=-1, high=100_000)
    context: Literal["triphone", "left_biphone"] = option(
        "triphone", "phones that a tied state depends on; left_biphone: no right neighbor, as in "
                    "Kaldi's LF-MMI", used="num_leaves")
    lm_order: int = option(0, "order of an n-gram language model with Witten-Bell smoothing, "
                           "estimated from the training transcripts or data.lm_text; 0: data.lm, "
                           "the corpus's graph, or all words equally likely", low=0, high=9)
    lm_text: str = option("", "text that the n-gram language model is estimated from, one sentence "
                          "per line; empty: the training transcripts", used="lm_order")
    oov_word: str = option("", "word of the lexicon that replaces unknown words; empty: unknown "
                           "words are errors", used=_GIVEN)
    graph: str = option("", "folder with HCLG.fst, words.txt and final.mdl or tid2pdf, used as "
                        "decoding graph; empty: generated graph", used=_GIVEN)
    alignment: str = option(
        "", 'HMM state of every frame: file of `ngsgd align`, text file of lines "utterance pdf ...", '
        "or folder of Kaldi ali archives with final.mdl or tid2pdf; flat: flat start; empty: that of the corpus, else flat")
    num_silence_states: int = option(1, "number of HMM states of silence", low=1, high=10, used="corpus=yesno|kaldi|lhotse")
    valid_fraction: float = option(
        0.1, "fraction of the training utterances that becomes the validation set, in a corpus "
        "without one", above=0.0, high=0.5, used="corpus=an4|yesno|kaldi|lhotse")
    train_minutes: float = option(80.0, "duration of the generated training set", unit="min",
                                  above=0.0, high=6000.0, used=_MADE)
    valid_minutes: float = option(5.0, "duration of the generated validation set", unit="min",
                                  above=0.0, high=600.0, used=_MADE)
    test_minutes: float = option(10.0, "duration of the generated test set", unit="min", above=0.0, high=600.0, used=_MADE)
    synthetic_minutes: float = option(
        0.0, "duration of synthetic digits added to the training set; 0: none",
        unit="min", low=0.0, high=6000.0, used="corpus=fsdd")
    snr_db_low: float = option(0.0, "lowest signal-to-noise ratio of an utterance", unit="dB", low=-20.0, high=60.0, used=_MADE)
    snr_db_high: float = option(15.0, "highest signal-to-noise ratio of an utterance", unit="dB",
                                low=-20.0, high=60.0, used=_MADE)


@dataclass(frozen=True)
class EgsConfig:
    """Archives of training examples (C.2), shuffled on disk and again at every reading."""

    left_context: int = option(5, "context before each frame in the input of the network", unit="frames", low=0, high=100)
    right_context: int = option(5, "context after each frame in the input of the network", unit="frames", low=0, high=100)
    frames_per_eg: int = option(8, "number of labeled frames of an example; a pass over an archive "
                                "uses one of them (Kaldi: 8)", unit="frames", low=1, high=256)
    samples_per_iter: int = option(
        16000, "averaging period: training data of a job between two averaging steps, K in the "
        "paper (Kaldi: 400000)", unit="frames", low=1)
    num_diagnostic_frames: int = option(4000, "size of the training and validation subsets on "
                                        "which the objective is measured", unit="frames", low=1)
    on_corrupt: Literal["stop", "quarantine"] = option(
        "stop", "reaction to a damaged archive; stop: end of the run; quarantine: training without the archive")
