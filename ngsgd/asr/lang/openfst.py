"""The transducer library; a parser of binary OpenFst files: vector and const, with standard arcs.

A damaged file raises DataError; a C++ reader may end the process. Letters: S states, A arcs.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import imports
from ngsgd.data.kaldi_objects import KaldiFormatError, Source
from ngsgd.errors import DataError

_MAGIC, _SYMBOLS_MAGIC = 2125659606, 2125658996
_HAS_SYMBOLS = (1, 2)  # flags: a table of input symbols, of output symbols
# flag: the arrays of a const file begin at multiples of _ALIGNMENT
_IS_ALIGNED = 4
_ALIGNMENT = 16
_ALIGNED_VERSION = 1
_LONGEST_STRING = 1 << 16
_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("target", "<i4")])
_STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("num_arcs", "<u4"), ("num_epsilons", "<u4", 2)])


@functools.cache
def toolkit() -> Any:
    """Return the module kaldifst."""
    return imports.load("kaldifst", extra="asr", purpose="Decoding")


@dataclass(frozen=True)
class Fst:
    """States and arcs; the arcs of state s are `arc_A[first_S[s]:first_S[s] + num_arcs_S[s]]`."""

    start: int
    final_S: npt.NDArray[np.float32]  # cost of ending; infinite for states that are not final
    first_S: npt.NDArray[np.int64]
    num_arcs_S: npt.NDArray[np.int64]
    arc_A: npt.NDArray[Any]  # ilabel, olabel, weight, target

    @property
    def num_states(self) -> int:
        return len(self.final_S)


def parse(content: bytes, name: str) -> Fst:
    """Parse a file; raise DataError if it is damaged, or not an OpenFst file of these types."""
    try:
        return _parsed(Source(io.BytesIO(content), len(content)))
    except KaldiFormatError as error:
        raise DataError(f"{name} is damaged or not an OpenFst file ({error}); copy it again, or convert it "
                        "with: fstconvert --fst_type=const.") from error


def _parsed(source: Source) -> Fst:
    if _integer(source, "<i4") != _MAGIC:
        raise KaldiFormatError("its magic number is wrong")
    kind, arc_type = _string(source), _string(source)
    version, flags = _integer(source, "<i4"), _integer(source, "<i4")
    source.take(8)   # properties
    start, num_states, num_arcs = (_integer(source, "<i8") for _ in range(3))
    if arc_type != "standard" or kind not in ("vector", "const"):
        raise KaldiFormatError(f"its type is {kind[:20]} with {arc_type[:20]} arcs; supported are "
                               "vector and const with standard arcs")
    for flag in _HAS_SYMBOLS:
        if flags & flag:
            if _integer(source, "<i4") != _SYMBOLS_MAGIC:
                raise KaldiFormatError("a table of symbols is missing")
            _string(source)
            source.take(8)
            for _ in range(_integer(source, "<i8")):
                _string(source)
                source.take(8)
    if kind == "vector":
        # a file from a pipe has -1 states and ends after them
        finals: list[np.float32] = []
        leaving: list[npt.NDArray[Any]] = []
        while len(finals) != num_states and not (num_states == -1 and not source.left):
            finals.append(np.frombuffer(source.take(4), "<f4")[0])
            leaving.append(source.array(_ARC, _integer(source, "<i8")))
        num_arcs_S = np.array(list(map(len, leaving)), np.int64)
        return _checked(Fst(start, np.array(finals, np.float32), np.cumsum(num_arcs_S) - num_arcs_S,
                            num_arcs_S, np.concatenate([np.empty(0, _ARC), *leaving])))
    is_aligned = bool(flags & _IS_ALIGNED) or version == _ALIGNED_VERSION
    arrays = []
    for dtype, length in ((_STATE, num_states), (_ARC, num_arcs)):
        if is_aligned:
            source.take(-source.position % _ALIGNMENT)
        arrays.append(source.array(dtype, length))
    states, arcs = arrays
    return _checked(Fst(start, states["final"].copy(), states["first"].astype(np.int64),
                        states["num_arcs"].astype(np.int64), arcs))


def _integer(source: Source, dtype: str) -> int:
    return int(np.frombuffer(source.take(np.dtype(dtype).itemsize), dtype)[0])


def _string(source: Source) -> str:
    length = _integer(source, "<i4")
    if not 0 <= length <= _LONGEST_STRING:
        raise KaldiFormatError(f"a name in it has the length {length}")
    return source.take(length).decode(errors="replace")


def _checked(fst: Fst) -> Fst:
    if not 0 <= fst.start < fst.num_states:
        raise KaldiFormatError(f"its start is the state {fst.start} of {fst.num_states}")
    if (fst.first_S + fst.num_arcs_S).max() > len(fst.arc_A):
        raise KaldiFormatError("a state has arcs beyond the last one")
    target_A = fst.arc_A["target"]
    if len(target_A) and not (target_A.min() >= 0 and target_A.max() < fst.num_states):
        raise KaldiFormatError(f"an arc leads to a state that is not one of its {fst.num_states}")
    if min(fst.arc_A["ilabel"].min(initial=0), fst.arc_A["olabel"].min(initial=0)) < 0:
        raise KaldiFormatError("an arc has a negative label")
    weights = np.concatenate([fst.final_S, fst.arc_A["weight"]])
    # also false for NaN
    if not (weights > -np.inf).all():
        raise KaldiFormatError("a weight is not a cost")
    return fst
