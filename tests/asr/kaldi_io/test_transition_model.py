"""Transition models of Kaldi, text and binary, against ids that were worked out by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora import alignments
from ngsgd.asr.kaldi_io.transition_model import HmmTuple, TransitionModel
from ngsgd.asr.lang.context_tree import ContextTree
from ngsgd.errors import DataError

# Phone 1 is silence with a skip from its first state to its last; phones 2 and 3 share a topology.
TEXT = """<TransitionModel> <Topology>
<TopologyEntry> <ForPhones> 2 3 </ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 <PdfClass> 2 <Transition> 2 0.75 <Transition> 3 0.25 </State>
<State> 3 </State> </TopologyEntry>
<TopologyEntry> <ForPhones> 1 </ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.5 <Transition> 1 0.25 <Transition> 2 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 <PdfClass> 2 <Transition> 2 0.75 <Transition> 3 0.25 </State>
<State> 3 </State> </TopologyEntry>
</Topology>
<Triples> 11
1 0 0 1 1 1 1 2 2
2 0 3 2 0 4 2 1 5 2 2 6
3 0 4 3 0 7 3 1 5 3 2 8
</Triples>
<LogProbs>
 [ 0 -0.69 -1.39 -1.39 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39
 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39 -0.29 -1.39 ]
</LogProbs> </TransitionModel>
<DIMENSION> 39 <NUMPDFS> 9 <DiagGMM>
"""
# three transitions of the first state of silence, two of every other one
BY_HAND = (0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 4, 4, 7, 7, 5, 5, 8, 8)
TREE = """ContextDependency 3 1 ToPdf SE 1 [ 1 ]
{ TE -1 3 ( CE 0 CE 1 CE 2 ) SE 1 [ 2 ]
{ TE -1 3 ( SE 0 [ 0 1 ] { CE 3 CE 4 } CE 5 CE 6 )
TE -1 3 ( SE 2 [ 2 3 ] { CE 4 CE 7 } CE 5 CE 8 ) } } EndContextDependency
"""
CHAIN = """<TransitionModel> <Topology> <TopologyEntry> <ForPhones> 1 2 </ForPhones>
<State> 0 <ForwardPdfClass> 0 <SelfLoopPdfClass> 1 <Transition> 0 0.5 <Transition> 1 0.5 </State>
<State> 1 </State> </TopologyEntry> </Topology>
<Tuples> 3 1 0 0 1 2 0 2 3 2 0 2 4 </Tuples>
<LogProbs> [ 0 -0.69 -0.69 -0.69 -0.69 -0.69 -0.69 ] </LogProbs> </TransitionModel>"""


def read(folder: Path, content: bytes) -> TransitionModel:
    (folder / "final.mdl").write_bytes(content)
    return TransitionModel.read(folder / "final.mdl")


def binary(model: TransitionModel, *, has_loops: bool) -> bytes:
    """The model as Kaldi writes it by default; probabilities are float32."""
    def integer(*values: int) -> bytes:
        return b"".join(b"\4" + struct.pack("<i", value) for value in values)
    phones = sorted(model.topologies)
    entries = list(dict.fromkeys(model.topologies.values()))
    index = [-1, *(entries.index(model.topologies[phone]) for phone in phones)]
    found = b"\0B<TransitionModel> <Topology> " + b"".join(
        b"\4" + struct.pack(f"<i{len(values)}i", len(values), *values) for values in (phones, index))
    found += integer(-1) if has_loops else b""
    found += integer(len(entries))
    for states in entries:
        found += integer(len(states))
        for forward, loop, transitions in states:
            found += integer(forward, *([loop] if has_loops else []), len(transitions))
            found += b"".join(integer(target) + b"\4" + struct.pack("<f", p) for target, p in transitions)
    name = b"Tuples" if has_loops else b"Triples"
    found += b"</Topology> <" + name + b"> " + integer(len(model.tuples))
    found += b"".join(integer(*one[:4 if has_loops else 3]) for one in model.tuples) + b"</" + name + b"> "
    probabilities = struct.pack(f"<{len(model.tid2pdf) + 1}f", *[-0.5] * (len(model.tid2pdf) + 1))
    found += b"<LogProbs> FV " + integer(len(model.tid2pdf) + 1) + probabilities
    return found + b"</LogProbs> </TransitionModel> <DIMENSION> "


def test_a_text_model_gives_the_pdf_of_each_transition_id(tmp_path: Path) -> None:
    model = read(tmp_path, TEXT.encode())
    assert model.tid2pdf == BY_HAND
    assert model.tuples[4] == HmmTuple(2, 0, 4, 4)
    assert model.topologies[3] == model.topologies[2] != model.topologies[1]
    assert model.topologies[1][0].transitions == ((0, 0.5), (1, 0.25), (2, 0.25))


@pytest.mark.parametrize(("text", "has_loops"), [(TEXT, False), (CHAIN, True)])
def test_a_binary_model_is_the_same_as_in_text(tmp_path: Path, text: str, has_loops: bool) -> None:
    model = read(tmp_path, text.encode())
    assert read(tmp_path, binary(model, has_loops=has_loops)) == model
    # of each tuple of a chain model the self-loop, then the way out
    assert not has_loops or model.tid2pdf == (1, 0, 3, 2, 4, 2)


def test_tree_and_model_give_the_same_pdfs_for_a_thousand_random_triphones(tmp_path: Path) -> None:
    tree, model, rng = ContextTree.from_text(TREE), read(tmp_path, TEXT.encode()), np.random.default_rng(0)
    # by hand: of phone and state, the pdf of each kind of context
    shared = {(1, 0): 0, (1, 1): 1, (1, 2): 2, (2, 1): 5, (2, 2): 6, (3, 1): 5, (3, 2): 8}
    # every state but the first of silence has two transitions
    first_id = {one[:3]: 1 + 2 * at + (at > 0) for at, one in enumerate(model.tuples)}
    for _ in range(1000):
        left, center, right, state = (int(rng.integers(*ends)) for ends in ((0, 4), (1, 4), (0, 4), (0, 3)))
        pdf = tree.pdf((left, center, right), state)
        in_context = (3 if left in (0, 1) else 4) if center == 2 else (4 if right in (2, 3) else 7)
        assert pdf == shared.get((center, state), in_context)
        assert model.tid2pdf[first_id[center, state, pdf] - 1] == pdf
    by_tree = {(phone, state, pdf) for phone in (1, 2, 3) for state in range(3) for pdf in tree.pdfs(phone, state)}
    assert by_tree == {one[:3] for one in model.tuples}


TOKENS = [at for at, token in enumerate(TEXT.split()) if token != "<DIMENSION>"]


@pytest.mark.parametrize("at", TOKENS[:-5:4])
def test_damaged_texts_are_errors(tmp_path: Path, at: int) -> None:
    tokens = TEXT.partition("<DIMENSION>")[0].split()
    for damaged in (tokens[:at], [*tokens[:at], "x", *tokens[at + 1:]], [*tokens[:at], "99999999", *tokens[at + 1:]]):
        with pytest.raises(DataError):
            read(tmp_path, " ".join(damaged).encode())


@pytest.mark.parametrize("has_loops", [False, True])
def test_damaged_binaries_are_errors_or_other_models(tmp_path: Path, has_loops: bool) -> None:
    content = binary(read(tmp_path, (CHAIN if has_loops else TEXT).encode()), has_loops=has_loops)
    end = content.index(b"<DIMENSION>")
    # a step that is not a multiple of the 5 bytes of an integer
    for at in range(0, end, 11):
        with pytest.raises(DataError):
            read(tmp_path, content[:at])
        for byte in (0, 127, 255):
            try:
                found = read(tmp_path, content[:at] + bytes([byte]) + content[at + 1:])
            except DataError:
                continue
            assert 0 < len(found.tid2pdf) < 100


@pytest.mark.parametrize("content", [b"", b"<TransitionModel> ", b"\0B", b"\0B<Nnet3> ",
                                     b"\0B<TransitionModel> <Topology> \4\xff\xff\xff\x7f"])
def test_other_files_are_errors(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError):
        read(tmp_path, content)
    with pytest.raises(DataError):
        TransitionModel.read(tmp_path / "none.mdl")


def test_an_alignment_next_to_a_model_has_transition_ids(tmp_path: Path) -> None:
    (tmp_path / "final.mdl").write_text(TEXT)
    (tmp_path / "ali.ark").write_text("one 1 4 6 8\ntwo 10 23\n")
    found = alignments.read(tmp_path)
    assert {utt_id: pdfs.tolist() for utt_id, pdfs in found.pdf_T.items()} == {"one": [0, 1, 2, 3], "two": [4, 8]}
    (tmp_path / "ali.ark").write_text("one 24\n")
    with pytest.raises(DataError):
        alignments.read(tmp_path)
    # its own table takes precedence
    (tmp_path / "tid2pdf").write_text("".join(f"{tid} 6\n" for tid in range(1, 25)))
    assert alignments.read(tmp_path).pdf_T["one"].tolist() == [6]
    (tmp_path / "tid2pdf").unlink()
    # an export of this package has pdfs
    (tmp_path / "pdfs.txt").write_text("".join(f"{pdf} a {pdf}\n" for pdf in range(30)))
    assert alignments.read(tmp_path).pdf_T["one"].tolist() == [24]
