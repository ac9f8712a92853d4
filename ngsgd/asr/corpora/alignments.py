"""HMM states of the frames of every utterance, from .npz or text files or archives of Kaldi."""

from __future__ import annotations

import itertools
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from ngsgd.asr import unpacking
from ngsgd.asr.decode import decoding
from ngsgd.asr.features import augment
from ngsgd.asr.kaldi_io import lines, tables
from ngsgd.asr.kaldi_io.transition_model import TransitionModel
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import GivenGraph
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import PdfIds
from ngsgd.data import mapped
from ngsgd.data.columns import Index, Strings
from ngsgd.errors import DataError
from ngsgd.files import new_file

# maximum fraction of unaligned utterances in a set; beyond it the file probably belongs to other
# data
MOST_MISSING = 0.5
PDF_TABLE = "pdfs.txt"  # file next to an alignment: lines "pdf phone state"
_MAX_PDFS = 1_000_000  # the largest trees of Kaldi have about 20,000 leaves
_MODEL = "final.mdl"  # the model that aligned, in a folder of Kaldi


@dataclass(frozen=True)
class Alignment:
    """The states of the frames of every utterance."""

    pdf_T: Mapping[str, PdfIds]     # by utt_id
    path: Path  # source, for messages
    pdf_names: tuple[str, ...] = ()  # names of the states, if the alignment has a table of pdfs

    def numbered_as(self, pdf_names: tuple[str, ...]) -> Alignment:
        """Renumber the states as in `pdf_names`; an alignment without names is returned unchanged.
        Raises DataError if it has other states, or a number that its table lacks.
        """
        if self.pdf_names in ((), pdf_names):
            return self
        if other := set(self.pdf_names) ^ set(pdf_names):
            raise DataError(f"{self.path} numbers {len(self.pdf_names)} HMM states by its "
                            f"{PDF_TABLE}, but the lexicon or data.graph gives {len(pdf_names)}; "
                            f"only one of them has {min(other)!r}. Set the lexicon, "
                            "data.num_silence_states and data.graph that the alignment was made with.")
        number_of = {name: number for number, name in enumerate(pdf_names)}
        table_P = np.array([number_of[name] for name in self.pdf_names], np.int32)
        for utt_id, pdfs in self.pdf_T.items():
            if len(pdfs) and not 0 <= pdfs.min() <= pdfs.max() < len(table_P):
                raise DataError(f"{self.path} has a state in {utt_id} that its {PDF_TABLE} lacks; use both from one export.")
        return Alignment(Labels((utt_id, table_P[pdfs]) for utt_id, pdfs in self.pdf_T.items()), self.path, pdf_names)


class Labels(Mapping[str, PdfIds]):
    """Labels of utterances in an unnamed temporary file; 40 bytes of memory for each."""

    def __init__(self, labels: Iterable[tuple[str, PdfIds]]) -> None:
        # closed, and therefore removed, with this object
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        ends, hashes = array("q", [0]), array("q")

        def names() -> Iterator[str]:
            for utt_id, pdf_T in labels:
                self._file.write(np.ascontiguousarray(pdf_T, np.int32).data)
                ends.append(ends[-1] + len(pdf_T))
                hashes.append(hash(utt_id))
                yield utt_id
        self._utt_ids, self._ends = Strings(names()), ends
        self._file.flush()
        self._index = Index(hashes, self._utt_ids.__getitem__)

    def __getitem__(self, utt_id: str) -> PdfIds:
        at = self._index.find(utt_id)
        if at is None:
            raise KeyError(utt_id)
        begin, end = 4 * self._ends[at], 4 * self._ends[at + 1]
        return np.frombuffer(os.pread(self._file.fileno(), end - begin, begin), np.int32)

    def __contains__(self, utt_id: object) -> bool:
        return isinstance(utt_id, str) and self._index.find(utt_id) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._utt_ids)

    def __len__(self) -> int:
        return len(self._utt_ids)


def read(path: Path) -> Alignment:
    """Read an alignment; DataError if it is missing, damaged or inconsistent.

    Formats: an .npz of `ngsgd align`, text lines "utt pdf pdf ...", or a folder with ali.*.gz or
    ali.*.ark of Kaldi, whose transition ids its file tid2pdf (lines "transition-id pdf") or
    final.mdl translates. Without these files they are pdfs; pdfs.txt of `ngsgd export --data` names
    them.
    """
    path = path.expanduser()
    if not path.exists():
        raise DataError(f"data.alignment is {path}, which does not exist; set it to a file written "
                        "by ngsgd align, or leave it empty.")
    folder = path if path.is_dir() else path.parent
    names = _read_pdf_table(folder / PDF_TABLE) if (folder / PDF_TABLE).is_file() else ()
    if path.is_dir():
        return Alignment(_read_folder(path), path, names)
    return Alignment(_read_npz(path) if path.suffix == ".npz" else tables.read_int_vectors(path), path, names)


def _read_pdf_table(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for where, line in lines.read(path):
        number, *name = line.split()
        if number != str(len(names)) or not name:
            raise DataError(f"{where}: {line[:40]!r} is not the pdf {len(names)}, its phone and "
                            "its state; export the data again.")
        names.append(" ".join(name))
    if not names or len(set(names)) < len(names):
        raise DataError(f"{path} does not give each pdf a distinct name; export the data again.")
    return tuple(names)


def write(path: Path, pdf_T: Mapping[str, PdfIds]) -> None:
    """Write an alignment atomically: as .npz, or for other names as lines "utt pdf pdf ..."."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                np.savez_compressed(file, pdf=np.concatenate(list(pdf_T.values())), utt_ids=list(pdf_T),
                                    offsets=np.cumsum([0, *map(len, pdf_T.values())]))
        else:
            temporary.write_text("".join(f"{utt_id} {' '.join(map(str, pdfs.tolist()))}\n" for utt_id, pdfs in pdf_T.items()))


def attach(alignment: Alignment, name: str, speech: SpeechSet, num_pdfs: int) -> tuple[SpeechSet, list[str]]:
    """Label the set `name`; return it and the unaligned utterances, which are omitted. An augmented
    copy without labels gets those of the original, at its speed.
    """
    utt_ids, known = speech.frames.utt_ids, alignment.pdf_T
    missing = [utt_id for utt_id in utt_ids if utt_id not in known and augment.original(utt_id)[0] not in known]
    if len(missing) > MOST_MISSING * len(utt_ids):
        raise DataError(f"{alignment.path} has no states for {len(missing)} of the {len(utt_ids)} "
                        f"utterances of {name}, the first is {missing[0]}; use the alignment of "
                        "this data, or data.alignment=flat.")

    def found() -> Iterator[tuple[str, PdfIds]]:
        lengths = np.diff(speech.frames.offsets).tolist()
        for utt_id, length in zip(utt_ids, lengths, strict=True):
            source, factor = (utt_id, 1.0) if utt_id in known else augment.original(utt_id)
            if source in known:
                pdf_T = known[source]
                pdf_T = pdf_T if factor == 1.0 else augment.retime(pdf_T, length, factor)
                yield utt_id, checked(pdf_T, utt_id, length, num_pdfs, alignment.path)
    return speech.labelled(Labels(found())), missing


def checked(pdf_T: PdfIds, utt_id: str, num_frames: int, num_pdfs: int, path: Path) -> PdfIds:
    """Return the labels; DataError unless each frame has one of `num_pdfs` states."""
    if len(pdf_T) != num_frames:
        raise DataError(f"{path} has {len(pdf_T)} states for {utt_id}, which has {num_frames} "
                        "frames. Features of ngsgd have one frame per 10 ms, as in Kaldi with "
                        "--snip-edges=false; the default of Kaldi has about two frames less. Use "
                        "the features that were aligned (feats.scp with features.kind=given), or align this audio again.")
    if pdf_T.min() < 0 or pdf_T.max() >= num_pdfs:
        wrong = int(pdf_T.min() if pdf_T.min() < 0 else pdf_T.max())
        raise DataError(f"{path} has the state {wrong} in {utt_id}, but the lexicon and its phones "
                        f"have {num_pdfs} states, from 0; set the lexicon that the alignment was made with, or data.graph.")
    return pdf_T


def _read_npz(path: Path) -> Mapping[str, PdfIds]:
    try:
        arrays = unpacking.load_npz(path, mapped=("pdf",))
        pdf_N, offsets, utt_ids = arrays["pdf"], arrays["offsets"], arrays["utt_ids"]
        if not (pdf_N.ndim == offsets.ndim == utt_ids.ndim == 1 and pdf_N.dtype.kind in "iu"
                and offsets.dtype.kind in "iu" and utt_ids.dtype.kind == "U" and len(offsets) == len(utt_ids) + 1
                and all(int(block_N.min()) >= -2**31 and int(block_N.max()) < 2**31 for block_N in mapped.blocks(pdf_N))
                and offsets[0] == 0 and offsets[-1] == len(pdf_N) and (np.diff(offsets.astype(np.int64)) >= 0).all()):
            raise ValueError("its arrays are inconsistent")
        return Labels((str(utt_id), mapped.copied(pdf_N[first:end]).astype(np.int32, copy=False))
                      for utt_id, first, end in zip(utt_ids, offsets[:-1], offsets[1:], strict=True))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not an alignment of ngsgd align ({error}); create it again.") from error


def _read_folder(folder: Path) -> Mapping[str, PdfIds]:
    archives = sorted([*folder.glob("ali.*.gz"), *folder.glob("ali.*.ark"), *folder.glob("ali.ark")])
    if not archives:
        raise DataError(f"{folder} contains neither ali.*.gz nor ali.*.ark; use the folder written by align_si.sh of Kaldi.")
    # the archives of one job after the other
    pairs = (one for archive in archives for one in tables.read_int_vectors(archive).items())
    path = transitions_file(folder)
    if not path.exists() or (path.name == _MODEL and (folder / PDF_TABLE).exists()):
        return Labels(pairs)
    table = np.array([-1, *read_tid2pdf(path)], dtype=np.int32)

    def translated() -> Iterator[tuple[str, PdfIds]]:
        for utt_id, tids in pairs:
            if len(tids) and (tids.min() < 1 or tids.max() >= len(table)):
                raise DataError(f"{folder} has the transition {tids.max()} in {utt_id}, but its "
                                f"{path.name} ranges from 1 to {len(table) - 1}; use both from one model.")
            yield utt_id, table[tids]
    return Labels(translated())


def transitions_file(folder: Path) -> Path:
    """Return the file of a Kaldi folder that translates transition ids: tid2pdf, else final.mdl."""
    is_model = not (folder / "tid2pdf").exists() and (folder / _MODEL).exists()
    return folder / (_MODEL if is_model else "tid2pdf")


def read_tid2pdf(path: Path) -> tuple[int, ...]:
    """Read transition id - 1 -> pdf from lines "transition-id pdf", or from a model (.mdl)."""
    if path.suffix == ".mdl":
        return TransitionModel.read(path).tid2pdf
    pairs: dict[int, int] = {}
    for where, line in lines.read(path):
        try:
            tid, pdf = map(lines.as_int, line.split())
        except ValueError as error:
            raise DataError(f"{where}: {line[:40]!r} is not a transition id and a pdf id; write both as numbers.") from error
        if not 0 <= pdf < _MAX_PDFS:
            raise DataError(f"{where}: the pdf {pdf} is not a number from 0 to {_MAX_PDFS - 1}; write the pdf ids of Kaldi.")
        if pairs.setdefault(tid, pdf) != pdf:
            raise DataError(f"{where}: the transition {tid} has two pdfs; use the files of one model.")
    if sorted(pairs) != list(range(1, len(pairs) + 1)):
        raise DataError(f"{path} does not number the transitions from 1 without gaps; write one line per transition id.")
    return tuple(pairs[tid] for tid in range(1, len(pairs) + 1))


# A name in a cache, or a file that a user gives, can be wrong; labels of another lexicon, of other
# phones or of other transcripts are found here, before training

_SILENCE = -1  # instead of each state of silence: how many it has to pass is not compared
# approximate number of utterances that are compared with a decoding graph, a search for each
NUM_IN_GRAPH = 50
# score of a state that is not the label, and a beam that reaches it
_FORBIDDEN, _SEARCH = -1e6, decoding.Search(acoustic_scale=1.0, beam=1e5, max_active=1_000_000)
# maximum fraction of utterances without a path in a decoding graph: its lexicon may lack a
# pronunciation that the alignment was made with
_MOST_WITHOUT = 0.5
_ADVICE = ("it was made with another lexicon, other phones or other transcripts. Align this data "
           "again (leave data.alignment empty), or give the lexicon that it was made with")

Labelled = tuple[str, Sequence[str], PdfIds]  # name, words and labels of an utterance


def labelled(alignment: Alignment, sets: Iterable[SpeechSet], oov_word: str, known: Mapping[str, object]) -> Iterable[Labelled]:
    """Yield the utterances of the sets that the alignment labels, with words of the lexicon; copies
    have the labels of their originals, so each original is one utterance.
    """
    for speech in sets:
        seen = ""
        for utt_id, words in zip(speech.frames.utt_ids, speech.texts, strict=True):
            source = utt_id if utt_id in alignment.pdf_T else augment.original(utt_id)[0]
            # copies follow each other
            if source != seen and source in alignment.pdf_T:
                yield source, [word if word in known else oov_word for word in words], alignment.pdf_T[source]
            seen = source


def check_paths(utterances: Iterable[Labelled], topology: Topology, path: Path) -> None:
    """Raise DataError for labels that no pronunciation of the transcript gives."""
    spelled: dict[str, list[list[int]]] = {}
    num, without = 0, []
    for utt_id, words, pdf_T in utterances:
        num += 1
        runs = _runs(pdf_T, topology.num_silence_states)
        # where the words so far, with optional silence around each, can end
        at = _around_silence({0}, runs)
        for word in words:
            if word not in spelled:
                spelled[word] = [_runs(np.array(topology.pdfs_of(phones), np.int32), topology.num_silence_states)
                                 for phones in topology.lexicon.get(word, ())]
            at = _around_silence({begin + len(one) for begin in at for one in spelled[word]
                                  if runs[begin:begin + len(one)] == one}, runs)
        if len(runs) not in at:
            without.append(utt_id)
    if without:
        raise DataError(f"{path} has labels that are no path through the graph of the transcript, "
                        f"for {len(without)} of {num} utterances, the first is {without[0]}; {_ADVICE}.")


def check_in_graph(utterances: Iterable[Labelled], given: GivenGraph, path: Path, *, step: int = 1) -> None:
    """As `check_paths`, for every `step`th utterance in the states of a decoding graph of the data.
    Those whose words the graph lacks, or does not allow in this order, are skipped.
    """
    graph = graphs.read(given)
    num, without = 0, []
    for utt_id, words, pdf_T in itertools.islice(utterances, 0, None, step):
        within = graphs.within(graph, words) if set(words) <= set(graph.words) else None
        if within is not None and within.fst.num_states:
            num += 1
            only_TP = np.full((len(pdf_T), 1 + max(given.tid2pdf)), _FORBIDDEN, np.float32)
            only_TP[np.arange(len(pdf_T)), pdf_T] = 0.0
            found = decoding.best_path(within, only_TP, _SEARCH)
            if not (found.is_complete and np.array_equal(found.pdf_T, pdf_T)):
                without.append(utt_id)
    if len(without) > _MOST_WITHOUT * num:
        raise DataError(f"{path} has labels that are no path through data.graph with the words of "
                        f"the transcript, for {len(without)} of {num} compared utterances, the "
                        f"first is {without[0]}; give the alignment and the graph of one model.")


def _runs(pdf_T: npt.NDArray[np.integer], num_silence_states: int) -> list[int]:
    """States in their order, without repetitions; those of silence are one."""
    state_T = np.where(pdf_T < num_silence_states, _SILENCE, pdf_T)
    runs: list[int] = state_T[np.flatnonzero(np.diff(state_T, prepend=_SILENCE - 1))].tolist()
    return runs


def _around_silence(at: set[int], runs: list[int]) -> set[int]:
    """Add the positions before and after a silence, which may be shared by two words."""
    after = {place + 1 for place in at if place < len(runs) and runs[place] == _SILENCE}
    before = {place - 1 for place in at if place and runs[place - 1] == _SILENCE}
    return at | after | before
