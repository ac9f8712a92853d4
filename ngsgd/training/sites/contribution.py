"""The parameter delta of a site, as the bytes of an object that other sites read.

The format is safetensors with a JSON header; nothing is unpickled. Names, shapes, types and numbers
are checked before they are used: a round that is closed with a contribution is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from ngsgd.files import parse_json
from ngsgd.ops.compression import Codec, Encoded, num_bytes
from ngsgd.training.parameter_deltas import compress, decompress
from ngsgd.training.parameter_vector import FlatLayout, Vector

Array = npt.NDArray[Any]
_CODES, _PEAKS, _VALUES, _EXACT = "codes", "peaks", "values", "statistics"


@dataclass(frozen=True)
class About:
    """Where a contribution is from."""

    site: str
    # name of the run of the site
    run: str
    # number of the average over sites, from 1
    round: int
    # of the site
    outer_iter: int


def to_bytes(move: Vector, about: About, codec: Codec | None, layout: FlatLayout) -> bytes:
    """Encode a finite delta; without a codec it is exact."""
    arrays: dict[str, Array] = {_VALUES: move}
    if codec is not None:
        encoded, exact = compress(move.copy(), None, codec, layout, np.empty_like(move))
        arrays = {_CODES: encoded.codes, _PEAKS: encoded.peaks,
                  _EXACT: np.concatenate([np.empty(0, np.float32), *(values for _, values in exact)])}
    content: bytes = save(arrays, {"about": json.dumps(asdict(about)), "codec": codec or ""})
    return content


def from_bytes(content: bytes, layout: FlatLayout) -> tuple[Vector, About]:
    """Decode a contribution; ValueError if it is damaged, of another model, or not finite."""
    try:
        arrays = load(content)
        length = int.from_bytes(content[:8], "little")
        fields = parse_json(content[8:8 + length].decode("utf-8"))["__metadata__"]
        about = About(**parse_json(fields["about"]))
        move = _decoded(arrays, fields["codec"], layout)
    # a damaged file can raise anything in a parser, and must not end the runs of the other sites
    except Exception as error:
        raise ValueError(f"it is no contribution of a site ({error!s:.200})") from error
    if any(type(getattr(about, name)) is not kind for name, kind in
           (("site", str), ("run", str), ("round", int), ("outer_iter", int))):
        raise ValueError(f"its header is {about!s:.200}")
    # the mean of the sites has a finite norm, too
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(np.vdot(move, move)):
            raise ValueError("it has numbers that are not finite, or too large")
    return move, about


def _decoded(arrays: Mapping[str, Array], codec: str, layout: FlatLayout) -> Vector:
    parts = [part for pair in layout.mean_and_variance() for part in pair]
    if codec == "":
        _require(arrays, {_VALUES: ("float32", layout.size)})
        return arrays[_VALUES]
    known: dict[str, Codec] = {"int8": "int8", "sparse": "sparse"}
    if codec not in known:
        raise ValueError(f"its format is {codec!r}")
    num_codes, num_peaks = num_bytes(layout.size, known[codec])
    ends = [0, *accumulate(part.stop - part.start for part in parts)]
    _require(arrays, {_CODES: ("uint8", num_codes), _PEAKS: ("float32", num_peaks // 4), _EXACT: ("float32", ends[-1])})
    exact = tuple((part.start, arrays[_EXACT][first:stop]) for part, (first, stop) in zip(parts, pairwise(ends), strict=True))
    return decompress(Encoded(known[codec], layout.size, arrays[_CODES], arrays[_PEAKS]), exact)


def _require(arrays: Mapping[str, Array], wanted: Mapping[str, tuple[str, int]]) -> None:
    found = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    needed = {name: (kind, (size,)) for name, (kind, size) in wanted.items()}
    if found != needed:
        raise ValueError(f"it holds {found!s:.200}, and this model needs {needed}")
