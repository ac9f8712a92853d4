"""Nested values with tensors as one block of bytes, with a checksum.

A block is a header, a pickle of the values without the content of their tensors, and the content.
The header is cleared first and written last: a process that dies in between leaves none valid.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.training.validation.checksums import digest

Block = npt.NDArray[np.uint8]

_MAGIC = b"ngsgdS1\0"
# magic, identity, minibatches, bytes of the pickle, bytes of the content, checksum
_FIELDS = struct.Struct("<8s16sQQQQ")
_CHECK_BYTES = 8
# tensors begin at multiples of it
_ALIGNMENT = 64
HEADER_BYTES = 128


class Header(NamedTuple):
    """Description of a block."""

    # 16 bytes; only the job with this identity may continue from the block
    identity: bytes
    # completed minibatches of the job
    num_minibatches: int
    # of pickle and content, padded
    pickle_bytes: int
    content_bytes: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the block with its header."""
        return HEADER_BYTES + self.pickle_bytes + self.content_bytes

    def encode(self) -> bytes:
        """Return the bytes of the header, which end with a checksum of themselves."""
        fields = _FIELDS.pack(_MAGIC, *self)
        return fields + hashlib.blake2b(fields, digest_size=_CHECK_BYTES).digest()

    @classmethod
    def decode(cls, content: bytes) -> Header | None:
        """Read a header; None if it is not valid."""
        fields, check = content[:_FIELDS.size], content[_FIELDS.size:_FIELDS.size + _CHECK_BYTES]
        if len(check) < _CHECK_BYTES or hashlib.blake2b(fields, digest_size=_CHECK_BYTES).digest() != check:
            return None
        magic, *values = _FIELDS.unpack(fields)
        return cls(*values) if magic == _MAGIC else None


class _Place(NamedTuple):
    """Location and layout of a tensor in the content."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """Values that are ready to be written; tensors are not copied yet."""

    skeleton: bytes
    tensors: tuple[tuple[_Place, Tensor], ...]
    content_bytes: int

    @classmethod
    def of(cls, values: Any) -> Packed:
        """Separate the tensors from nested dictionaries, lists and tuples of picklable values."""
        tensors: list[tuple[_Place, Tensor]] = []
        size = 0

        def placed(tensor: Tensor) -> _Place:
            nonlocal size
            dense = _dense(tensor.detach())
            place = _Place(size, dense.dtype, tuple(dense.shape), dense.stride())
            tensors.append((place, dense))
            size += _padded(dense.numel() * dense.element_size())
            return place
        skeleton = pickle.dumps(_mapped(values, Tensor, placed), protocol=pickle.HIGHEST_PROTOCOL)
        return cls(skeleton.ljust(_padded(len(skeleton)), b"\0"), tuple(tensors), size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the block with its header."""
        return HEADER_BYTES + len(self.skeleton) + self.content_bytes

    def write(self, block: Block, identity: bytes, num_minibatches: int) -> None:
        """Write the block; `block` has at least `num_bytes` bytes."""
        block[:HEADER_BYTES] = 0
        begin = HEADER_BYTES + len(self.skeleton)
        block[HEADER_BYTES:begin] = np.frombuffer(self.skeleton, np.uint8)
        content = torch.from_numpy(block[begin:begin + self.content_bytes])
        for place, tensor in self.tensors:
            _at(content, place).copy_(tensor)
        # the padding between tensors has old content, which the checksum includes
        checksum = digest(block[HEADER_BYTES:self.num_bytes].view(np.float32))
        header = Header(identity, num_minibatches, len(self.skeleton), self.content_bytes, checksum).encode()
        block[:len(header)] = np.frombuffer(header, np.uint8)


def unpack(block: Block) -> Any:
    """Return the values of a block, with tensors in their own memory; None if it is damaged."""
    header = Header.decode(block[:HEADER_BYTES].tobytes())
    if header is None or header.num_bytes > len(block):
        return None
    # a copy first: the memory may change after the check
    copy = block[HEADER_BYTES:header.num_bytes].copy()
    if digest(copy.view(np.float32)) != header.checksum:
        return None
    content = torch.from_numpy(copy[header.pickle_bytes:])
    values = pickle.loads(copy[:header.pickle_bytes].tobytes())
    # clones begin at the alignment of torch, on which the order of sums in a kernel may depend
    return _mapped(values, _Place, lambda place: _at(content, place).clone())


def _at(content: Tensor, place: _Place) -> Tensor:
    num_bytes = place.dtype.itemsize * _extent(place.shape, place.strides)
    flat = torch.empty(0, dtype=place.dtype)
    if 0 not in place.shape:
        flat = content[place.offset:place.offset + num_bytes].view(place.dtype)
    return flat.as_strided(place.shape, place.strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last element of a tensor, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor that fills one range of memory, as transposed ones do, or a copy."""
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    is_dense = tensor.numel() == 0 or _extent(tuple(tensor.shape), tensor.stride()) == tensor.numel()
    # an expanded dimension has stride 0
    return tensor if is_dense and 0 not in tensor.stride() else tensor.contiguous()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _mapped(values: Any, kind: type[Any], function: Callable[[Any], Any]) -> Any:
    """Replace each object of a type in nested dictionaries, lists and tuples."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, dict):
        return {key: _mapped(value, kind, function) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_mapped(value, kind, function) for value in values)
    return values
