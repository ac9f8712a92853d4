"""Files of named arrays with a digest (safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from ngsgd.files import FORMAT, FORMATS, digest_of_arrays, new_file, read_regular_bytes, require_format

_MAX_BYTES = 1 << 34


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays, with the number of the format and their digest in the header."""
    # one entry: safetensors writes several in random order, and equal arrays give equal files
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()},
                   {FORMAT: f"{FORMATS['arrays']} {digest_of_arrays(arrays)}"})
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read what `write` wrote; OSError, or ValueError if it is damaged or has another digest."""
    try:
        arrays: dict[str, npt.NDArray[Any]] = load(read_regular_bytes(path, _MAX_BYTES))
        with safe_open(path, framework="np") as file:
            number, _, expected = (file.metadata() or {}).get(FORMAT, "").partition(" ")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    require_format("arrays", {FORMAT: int(number) if number.isdecimal() else None})
    if expected != digest_of_arrays(arrays):
        raise ValueError("it does not match its digest")
    return arrays
