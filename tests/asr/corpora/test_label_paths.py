"""Labels without a path through the graph of their transcript are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora import alignments
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.errors import DataError

# silence 0 and 1; A 2 to 4; B 5 to 7
TOPOLOGY = Topology(("A", "B"), {"a": (("A",),), "ab": (("A", "B"), ("B", "A")), "hm": (("SIL",),), "bab": (("B", "SIL", "B"),)}, 2)
A, B, SIL = (2, 3, 4), (5, 6, 7), (0, 1)
ALI = Path("ali.npz")


def labels(*parts: Sequence[int], repeats: int = 2) -> np.ndarray:
    return np.repeat(np.concatenate([np.array(part, np.int32) for part in parts]), repeats)


@pytest.mark.entry("Sp1")
@pytest.mark.parametrize(("words", "parts"), [
    (["a"], [A]), (["a"], [SIL, A, SIL]), (["a", "a"], [A, A]), (["a", "ab"], [A, SIL, B, A]), (["ab"], [A, B]),
    # any number of states of silence, which two words may share
    (["hm", "a"], [(0,), A]), (["hm", "hm"], [SIL]), (["a", "hm", "a"], [A, SIL, A]), (["bab"], [SIL, B, SIL, B]),
    (["hm"], [(0, 1, 0)]), ([], [SIL])])
def test_a_path_is_accepted(words: list[str], parts: list[Sequence[int]]) -> None:
    for repeats in (1, 3):
        alignments.check_paths([("u", words, labels(*parts, repeats=repeats))], TOPOLOGY, ALI)


@pytest.mark.entry("Sp1")
@pytest.mark.parametrize(("words", "parts"), [
    (["a"], [B]), (["a"], [A, A]), (["a", "a"], [A]), (["ab"], [A, SIL, B]), (["ab"], [A]), (["a"], [(2, 4)]), (["a"], [(2, 3)]),
    (["a"], [(4, 3, 2)]), (["bab"], [B, B]), (["hm"], [A]), (["a"], [SIL]), ([], [A]), (["a"], [A, SIL, B])])
def test_other_labels_are_refused(words: list[str], parts: list[Sequence[int]]) -> None:
    with pytest.raises(DataError, match=r"ali\.npz.*1 of 2.*one"):
        alignments.check_paths([("zero", ["a"], labels(A)), ("one", words, labels(*parts))], TOPOLOGY, ALI)


@pytest.mark.entry("Sp1")
def test_labels_in_states_of_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("kaldifst")
    pytest.importorskip("kaldi_decoder")
    made = graphs.build(Language(TOPOLOGY), silence_prob=0.5)
    made.fst.write(str(tmp_path / "HCLG.fst"))
    # tied: states of both phones are one pdf
    tied = np.array([0, 1, 2, 3, 4, 2, 5, 6])
    given = GivenGraph((tmp_path / "HCLG.fst").read_bytes(), made.words, tuple(tied.tolist()))
    right = [("u", ["a", "ab"], tied[labels(SIL, A, A, B)].astype(np.int32))]
    alignments.check_in_graph(right, given, ALI)
    # words that the graph lacks are not compared
    alignments.check_in_graph([*right, ("v", ["unknown"], right[0][2])], given, ALI)
    with pytest.raises(DataError, match=r"ali\.npz.*1 of 1.*u"):
        alignments.check_in_graph([("u", ["ab", "a", "a"], right[0][2])], given, ALI)


@pytest.mark.entry("Sp1")
def test_word_sequences_that_a_graph_forbids_are_not_compared(tmp_path: Path) -> None:
    pytest.importorskip("kaldifst")
    made = graphs.build(Language(TOPOLOGY, is_one_word=True), silence_prob=0.5)
    made.fst.write(str(tmp_path / "HCLG.fst"))
    given = GivenGraph((tmp_path / "HCLG.fst").read_bytes(), made.words, tuple(range(8)))
    alignments.check_in_graph([("u", ["a", "a"], labels(A, A))], given, ALI)
