"""Denominators of LF-MMI from the labels of training speech."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ngsgd.asr import denominators
from ngsgd.config import ObjectiveConfig
from ngsgd.errors import ConfigError
from ngsgd.sequence.ngram import state_ngram
from tests.asr.test_context import language, path_of

SPOKEN = [["SIL", "a", "b", "c", "d", "a", "SIL"], ["c", "d", "a", "SIL", "b", "a", "a", "b"], ["b"]]
PHONES = ObjectiveConfig(kind="lfmmi", denominator="phones", ngram_order=3, frame_subsampling=3)


@pytest.mark.parametrize("is_tied", [True, False])
def test_phones_have_the_paths_of_all_offsets_of_the_labels(is_tied: bool) -> None:
    lang = language(2) if is_tied else replace(language(2), tree=None)
    assert lang.tree or not is_tied
    labels = [np.array(path_of(spoken, language(2)), np.int32) for spoken in SPOKEN]
    if not is_tied:
        state_P = np.array(language(2).phone_states(), np.int32)
        labels = [state_P[pdf_T] for pdf_T in labels]
    graph = denominators.of_labels(labels, lang, PHONES)
    for pdf_T in labels:
        assert all(graph.log_weight_of(pdf_T[first::3]) > -math.inf for first in range(3))
    # the pair c b is in no label
    assert graph.log_weight_of([*labels[1][:6:3], *labels[2][::3]]) == -math.inf
    out = np.exp(graph.log_final_S)
    np.add.at(out, graph.source_A, np.exp(graph.log_weight_A))
    np.testing.assert_allclose(out, 1.0, rtol=1e-12)


def test_states_are_those_of_all_offsets() -> None:
    labels = [np.array(path_of(spoken, language(2)), np.int32) for spoken in SPOKEN]
    config = replace(PHONES, denominator="states", ngram_order=2)
    found = denominators.of_labels(labels, language(2), config)
    wanted = state_ngram([pdf_T[first::3] for first in range(3) for pdf_T in labels], 2)
    assert all(np.array_equal(found.arrays()[name], array) for name, array in wanted.arrays().items())


def test_triphones_are_refused_for_phones() -> None:
    labels = [np.array(path_of(SPOKEN[0], language(3)), np.int32)]
    with pytest.raises(ConfigError, match="left_biphone"):
        denominators.of_labels(labels, language(3), PHONES)
