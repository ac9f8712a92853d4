"""nnet3 raw models and vectors in Kaldi's lossless binary form, or in text form.

A binary model is "\\0B<Nnet3> ", the lines that join components, an empty line, and the components:

    <NumComponents> n { <ComponentName> name <Kind> { <Token> value } </Kind> } </Nnet3>

Values are untyped. A number is a byte with its size and 4 or 8 bytes, and the token determines
whether it is an integer or a float; T and F are one byte. Nothing is executed, and each size is
compared with the remaining bytes before memory is allocated.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ngsgd.data.kaldi_objects import KaldiFormatError, Source, read_float_object, read_object
from ngsgd.errors import DataError
from ngsgd.models.nnet3.network import Array, Network
from ngsgd.models.nnet3.structure import Component, finite, network_of
from ngsgd.models.nnet3.text import from_text, vector_from_text

_INTEGERS = ("Dim", "InputDim", "OutputDim", "BlockDim", "RankIn", "RankOut", "UpdatePeriod", "TimePeriod")
# of a component; the largest of Kaldi's has about 20
_MOST_TOKENS = 100


def model_from_bytes(content: bytes) -> Network:
    """Read a raw model, binary or text; raises DataError for a damaged or unsupported one."""
    if not content.startswith(b"\0B"):
        return from_text(_decoded(content, "nnet3 raw model"))
    source = Source(io.BytesIO(content), len(content))
    try:
        head = _head(source)
        components = list(_components(source))
    except KaldiFormatError as error:
        raise DataError(f"This binary nnet3 model cannot be read ({error}, near byte {source.position}); copy it again. Or make it "
                        "with: nnet3-copy MODEL.raw final.raw, or from a model with transitions: "
                        "nnet3-am-copy --raw=true MODEL.mdl final.raw") from error
    return network_of(head, components)


def vector_from_bytes(content: bytes) -> Array:
    """Read a vector of finite float32 or float64, binary or text, such as priors."""
    if not content.startswith(b"\0B"):
        return vector_from_text(_decoded(content, "vector"))
    try:
        source = Source(io.BytesIO(content), len(content))
        found = read_object(source)
        if found.ndim != 1 or found.dtype == np.int32 or source.left:
            raise KaldiFormatError("it is not one vector of floats")
        return finite(found)
    except ValueError as error:     # KaldiFormatError is one
        raise DataError(f"This is no vector in Kaldi's binary form ({error}); copy it again.") from error


def _decoded(content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeError as error:
        raise DataError(f"This is not an {what}, binary or text ({error}); check the file.") from error


def _head(source: Source) -> str:
    """Return the lines up to the first empty one, without "<Nnet3>"."""
    source.take(2)
    if (first := source.word(64)) != b"<Nnet3>":
        what = "has transitions" if first == b"<TransitionModel>" else f"begins with {first[:20]!r}"
        raise KaldiFormatError(f"it {what} where <Nnet3> belongs")
    source.expect(b"\n")
    lines = []
    while (line := source.line()).strip():
        lines.append(line.decode(errors="replace"))
    # As in text, where the first line contains <Nnet3> only.
    return "\n" + "".join(lines)


def _components(source: Source) -> Iterator[Component]:
    source.expect(b"<NumComponents> ")
    for _ in range(source.int32()):
        source.expect(b"<ComponentName> ")
        where, name = source.position, source.word().decode(errors="replace")
        kind = source.word(64).decode(errors="replace")
        if not re.fullmatch(r"<\w+>", kind):
            raise KaldiFormatError(f"the component {name[:40]} has the kind {kind[:20]!r}")
        try:
            values = _values(source, kind[1:-1])
        except KaldiFormatError as error:
            raise KaldiFormatError(f"{error}, in the component {name[:40]}, a {kind[1:-1]}") from error
        yield Component(name, kind[1:-1], values, f"byte {where}")
    source.expect(b"</Nnet3> ")


def _values(source: Source, kind: str) -> dict[str, str | npt.NDArray[np.floating]]:
    """Return values by token, up to the closing one."""
    found: dict[str, str | npt.NDArray[np.floating]] = {}
    while (word := source.word(64)) != f"</{kind}>".encode():
        token = word.decode(errors="replace")
        if not re.fullmatch(r"<\w+>", token) or len(found) == _MOST_TOKENS:
            raise KaldiFormatError(f"{word[:20]!r} is found instead of a token")
        found[token[1:-1]] = _value(source, token[1:-1])
    return found


def _value(source: Source, token: str) -> str | npt.NDArray[np.floating]:
    head = source.peek(2)
    # A token without a value, such as <TestMode> of dropout.
    if head[:1] == b"<":
        return "T"
    if head[:1] in (b"T", b"F") and head[1:] == b"<":
        return source.take(1).decode()
    if head[:1] == b"\4":
        [value] = struct.unpack("<i" if token in _INTEGERS else "<f", source.take(5)[1:])
        # The shortest text of a float, such as 0.001.
        return str(value if token in _INTEGERS else np.float32(value))
    if head[:1] == b"\10":
        return str(struct.unpack("<d", source.take(9)[1:])[0])
    return read_float_object(source, source.word(16))
