"""Rungs of the ladder to good labels: their times and word error rates, stored next to their files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation, scoring, tuning
from ngsgd.asr.lang import graphs
from ngsgd.config import DecodeConfig
from ngsgd.word_errors import WordErrors

# every which scale and penalty is tried for the errors of a rung
_STEP = 2
# on valid and test
Errors = tuple[WordErrors | None, WordErrors | None]


@dataclass(frozen=True)
class Rung:
    """A finished rung.

    Attributes:
        name: model or labels that the rung makes.
        seconds: time that it took when it was computed.
        valid: errors on the validation set; None if they were not measured.
        test: errors on the test set; None if they were not measured.
    """

    name: str
    seconds: float
    valid: WordErrors | None = None
    test: WordErrors | None = None

    def __str__(self) -> str:
        errors = f"; valid {self.valid}, test {self.test}" if self.valid else ""
        return f"{self.name}, {self.seconds:.0f} s{errors}"

    @staticmethod
    def of_json(about: Mapping[str, Any]) -> Rung:
        """Read what `asdict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        errors = (about[name] and WordErrors.of_json(about[name]) for name in ("valid", "test"))
        return Rung(str(about["name"]), float(about["seconds"]), *errors)


def rungs_of(path: Path) -> list[Rung]:
    """Read rungs.json of a run; empty for runs without a ladder, and where it is damaged."""
    try:
        return [Rung.of_json(about) for about in files.read_json(path)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class Stopwatch:
    """Measures the time of a rung."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()

    def stored(self, path: Path, errors: Errors = (None, None)) -> Rung:
        """Store the rung that made the file `path`, with its errors on valid and test."""
        rung = Rung(self._name, round(time.monotonic() - self._begun, 1), *errors)
        files.write_text(_note_of(path), json.dumps(asdict(rung), indent=1))
        return rung


def stored(path: Path) -> list[Rung]:
    """The rung that made a file; none if its note cannot be read."""
    try:
        return [Rung.of_json(files.read_json(_note_of(path)))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _note_of(path: Path) -> Path:
    return path.with_suffix(".rung.json")


def word_errors(corpus: Corpus, config: DecodeConfig,
                logliks: Mapping[str, npt.NDArray[np.float32]]) -> Errors:
    """Decode valid and test with some of the scales and penalties, chosen on valid.

    Args:
        corpus: the speech; its language names the states.
        config: the section `decode`.
        logliks: T x P scores of each utterance of valid and test, by its name.

    Returns:
        The errors on valid and on test.
    """
    language, valid, test = corpus.language, corpus.valid, corpus.test
    coarse = replace(config, acoustic_scales=config.acoustic_scales[::_STEP],
                     word_penalties=config.word_penalties[::_STEP])
    graph = evaluation.build_graph(language, coarse)
    of_valid, of_test = ([logliks[utt_id] for utt_id in one.frames.utt_ids]
                         for one in (valid, test))
    weights, errors = tuning.choose(evaluation.sweep(
        graph, coarse, valid.texts, valid.frames.utt_ids, of_valid, language.num_pdfs))
    said = evaluation.decode_set(graphs.with_word_penalty(graph, weights.word_penalty), coarse,
                                 weights.acoustic_scale, of_test, language.num_pdfs)
    return errors, scoring.score(test.texts, said, test.frames.utt_ids)[0]
