"""HMM states of the frames of every utterance, from .npz or text files or archives of Kaldi."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ngsgd.asr import unpacking
from ngsgd.asr.features import augment
from ngsgd.asr.kaldi_io import lines, tables
from ngsgd.asr.kaldi_io.transition_model import TransitionModel
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import PdfIds
from ngsgd.data import mapped
from ngsgd.data.columns import Index, Strings
from ngsgd.errors import DataError
from ngsgd.files import new_file

# maximum fraction of unaligned utterances in a set; beyond it the file probably belongs to other
# data
MOST_MISSING = 0.5
# file next to an alignment: lines "pdf phone state"
PDF_TABLE = "pdfs.txt"
# the largest trees of Kaldi have about 20,000 leaves
_MAX_PDFS = 1_000_000
# the model that aligned, in a folder of Kaldi
_MODEL = "final.mdl"


@dataclass(frozen=True)
class Alignment:
    """The states of the frames of every utterance."""

    pdf_T: Mapping[str, PdfIds]     # by utt_id
    # source, for messages
    path: Path
    # names of the states, if the alignment has a table of pdfs
    pdf_names: tuple[str, ...] = ()

    def numbered_as(self, pdf_names: tuple[str, ...]) -> Alignment:
        """Renumber the states as in `pdf_names`; an alignment without names is returned unchanged.

        Raises:
            DataError: it has other states, or a number that its table lacks.
        """
        if self.pdf_names in ((), pdf_names):
            return self
        if other := set(self.pdf_names) ^ set(pdf_names):
            raise DataError(f"{self.path} numbers {len(self.pdf_names)} HMM states by its "
                            f"{PDF_TABLE}, but the lexicon or data.graph gives {len(pdf_names)}; "
                            f"only one of them has {min(other)!r}. Set the lexicon, "
                            "data.num_silence_states and data.graph that the alignment was made "
                            "with.")
        number_of = {name: number for number, name in enumerate(pdf_names)}
        table_P = np.array([number_of[name] for name in self.pdf_names], np.int32)
        for utt_id, pdfs in self.pdf_T.items():
            if len(pdfs) and not 0 <= pdfs.min() <= pdfs.max() < len(table_P):
                raise DataError(f"{self.path} has a state in {utt_id} that its {PDF_TABLE} lacks; "
                                "use both from one export.")
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
    """Read an alignment.

    Formats: an .npz of `ngsgd align`, text lines "utt pdf pdf ...", or a folder with ali.*.gz or
    ali.*.ark of Kaldi. The numbers in a Kaldi folder are transition ids, which its file tid2pdf
    (lines "transition-id pdf") or final.mdl translates. Without these files they are pdfs, as from
    ali-to-pdf. A file pdfs.txt in the folder, as written by `ngsgd export --data`, names the pdfs.

    Raises:
        DataError: it is missing, damaged or inconsistent.
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
    """Label the set `name`; return it and the unaligned utterances, which are omitted.

    An augmented copy of an utterance without labels gets those of the original, at its speed.
    """
    utt_ids, known = speech.frames.utt_ids, alignment.pdf_T
    missing = [utt_id for utt_id in utt_ids
               if utt_id not in known and augment.original(utt_id)[0] not in known]
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
                check(pdf_T, utt_id, length, num_pdfs, alignment.path)
                yield utt_id, pdf_T

    return speech.labelled(Labels(found())), missing


def check(pdf_T: PdfIds, utt_id: str, num_frames: int, num_pdfs: int, path: Path) -> None:
    """Raise DataError unless each frame of the utterance has one of `num_pdfs` states."""
    if len(pdf_T) != num_frames:
        raise DataError(f"{path} has {len(pdf_T)} states for {utt_id}, which has {num_frames} "
                        "frames. Features of ngsgd have one frame per 10 ms, as in Kaldi with "
                        "--snip-edges=false; the default of Kaldi has about two frames less. Use "
                        "the features that were aligned (feats.scp with features.kind=given), or "
                        "align this audio again.")
    if pdf_T.min() < 0 or pdf_T.max() >= num_pdfs:
        wrong = int(pdf_T.min() if pdf_T.min() < 0 else pdf_T.max())
        raise DataError(f"{path} has the state {wrong} in {utt_id}, but the lexicon and its phones "
                        f"have {num_pdfs} states, from 0; set the lexicon that the alignment was "
                        "made with, or data.graph.")


def _read_npz(path: Path) -> Mapping[str, PdfIds]:
    try:
        arrays = unpacking.load_npz(path, mapped=("pdf",))
        pdf_N, offsets, utt_ids = arrays["pdf"], arrays["offsets"], arrays["utt_ids"]
        if not (pdf_N.ndim == offsets.ndim == utt_ids.ndim == 1 and pdf_N.dtype.kind in "iu"
                and offsets.dtype.kind in "iu" and utt_ids.dtype.kind == "U"
                and len(offsets) == len(utt_ids) + 1
                and all(int(block_N.min()) >= -2**31 and int(block_N.max()) < 2**31
                        for block_N in mapped.blocks(pdf_N))
                and offsets[0] == 0 and offsets[-1] == len(pdf_N)
                and (np.diff(offsets.astype(np.int64)) >= 0).all()):
            raise ValueError("its arrays are inconsistent")
        return Labels((str(utt_id), mapped.copied(pdf_N[first:end]).astype(np.int32, copy=False))
                      for utt_id, first, end in zip(utt_ids, offsets[:-1], offsets[1:], strict=True))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not an alignment of ngsgd align ({error}); create it "
                        "again.") from error


def _read_folder(folder: Path) -> Mapping[str, PdfIds]:
    archives = sorted([*folder.glob("ali.*.gz"), *folder.glob("ali.*.ark"), *folder.glob("ali.ark")])
    if not archives:
        raise DataError(f"{folder} contains neither ali.*.gz nor ali.*.ark; use the folder written "
                        "by align_si.sh of Kaldi.")
    # the archives of one job after the other
    found = (one for archive in archives for one in tables.read_int_vectors(archive).items())
    path = transitions_file(folder)
    if not path.exists() or (path.name == _MODEL and (folder / PDF_TABLE).exists()):
        return Labels(found)
    table = np.array([-1, *read_tid2pdf(path)], dtype=np.int32)

    def translated() -> Iterator[tuple[str, PdfIds]]:
        for utt_id, tids in found:
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
            raise DataError(f"{where}: {line[:40]!r} is not a transition id and a pdf id; write both as "
                            "numbers.") from error
        if not 0 <= pdf < _MAX_PDFS:
            raise DataError(f"{where}: the pdf {pdf} is not a number from 0 to {_MAX_PDFS - 1}; "
                            "write the pdf ids of Kaldi.")
        if pairs.setdefault(tid, pdf) != pdf:
            raise DataError(f"{where}: the transition {tid} has two pdfs; use the files of one model.")
    if sorted(pairs) != list(range(1, len(pairs) + 1)):
        raise DataError(f"{path} does not number the transitions from 1 without gaps; write one "
                        "line per transition id.")
    return tuple(pairs[tid] for tid in range(1, len(pairs) + 1))
