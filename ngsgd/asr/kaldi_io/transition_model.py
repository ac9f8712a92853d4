"""Transition models of Kaldi: the first part of a `final.mdl`, binary or text.

A model numbers its tuples of (phone, HMM state, pdf) from 1, and the transitions out of their
states in this order; alignments and graphs have the ids of transitions. As text (`--binary=false`):

    <TransitionModel>
    <Topology> <TopologyEntry> <ForPhones> 1 2 </ForPhones>
    <State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State> <State> 1 </State>
    </TopologyEntry> </Topology>
    <Triples> 2  1 0 0  2 0 1  </Triples>
    <LogProbs> [ 0 -0.29 -1.39 -0.29 -1.39 ] </LogProbs>
    </TransitionModel>

Chain topologies have <ForwardPdfClass> and <SelfLoopPdfClass>, and <Tuples> with the pdf of the
self-loop. Sizes are compared with limits before memory is allocated.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ngsgd.data.kaldi_objects import KaldiFormatError, Source, open_source, read_float_object
from ngsgd.errors import DataError

# far beyond any model
_MAX_PHONES, _MAX_PDFS, _MAX_TUPLES, _MAX_IDS = 100_000, 1_000_000, 2_000_000, 10_000_000
_MAX_STATES, _MAX_TRANSITIONS = 200, 200
_MAX_TEXT_BYTES = 1 << 28  # of the text up to the acoustic model
_END = b"</TransitionModel>"
_NO_PDF = -1  # the pdf class of a state that emits nothing


class HmmState(NamedTuple):
    """A state of a topology."""

    pdf_class: int  # -1: emits nothing
    self_loop_class: int
    transitions: tuple[tuple[int, float], ...]  # (target state, probability)


class HmmTuple(NamedTuple):
    """A state of a phone with a pdf; what Kaldi calls a transition state."""

    phone: int
    state: int
    pdf: int
    self_loop_pdf: int  # differs in chain topologies


@dataclass(frozen=True)
class TransitionModel:
    """HMM states by phone, and the tuples that transition ids number, sorted as in the file."""

    topologies: Mapping[int, tuple[HmmState, ...]]
    tuples: tuple[HmmTuple, ...]

    @cached_property
    def tid2pdf(self) -> tuple[int, ...]:
        """Transition id - 1 -> pdf."""
        return tuple(one.self_loop_pdf if target == one.state else one.pdf for one in self.tuples
                     for target, _ in self.topologies[one.phone][one.state].transitions)

    @staticmethod
    def read(path: Path) -> TransitionModel:
        """Read it from a `final.mdl`; DataError if it is missing, damaged or of another kind."""
        try:
            with open_source(path) as source:
                return _read(_fields(source))
        except (OSError, KaldiFormatError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{path} cannot be read as a model with transitions ({reason}); use "
                            "final.mdl of Kaldi, or the output of copy-transition-model.") from error


def _fields(source: Source) -> _TextFields | _BinaryFields:
    if source.peek(2) == b"\0B":
        source.take(2)
        return _BinaryFields(source)
    head, size, end = bytearray(), min(source.left, _MAX_TEXT_BYTES), -1
    while end < 0:
        more = source.take(min(1 << 20, size - len(head)))
        if not more:
            raise KaldiFormatError(f"it has no {_END.decode()}")
        # the word may begin at the end of the part before
        first = max(0, len(head) - len(_END))
        head += more
        end = head.find(_END, first)
    return _TextFields(bytes(head[:end + len(_END)]))


def _read(fields: _TextFields | _BinaryFields) -> TransitionModel:
    _expect(fields, "<TransitionModel>")
    _expect(fields, "<Topology>")
    topologies = fields.topologies()
    kind = fields.word()
    if kind not in ("<Triples>", "<Tuples>"):
        raise KaldiFormatError(f"{kind[:30]!r} is found instead of <Triples> or <Tuples>")
    tuples: list[HmmTuple] = []
    num_ids = 0
    for _ in range(fields.integer(1, _MAX_TUPLES)):
        phone, state, pdf = (fields.integer(0, high) for high in (_MAX_PHONES, _MAX_STATES, _MAX_PDFS))
        one = HmmTuple(phone, state, pdf, fields.integer(0, _MAX_PDFS) if kind == "<Tuples>" else pdf)
        states = topologies.get(phone, ())
        if state >= len(states) or states[state].pdf_class == _NO_PDF:
            raise KaldiFormatError(f"the topology of phone {phone} has no emitting state {state}")
        num_ids += len(states[state].transitions)
        if (tuples and one <= tuples[-1]) or num_ids > _MAX_IDS:
            raise KaldiFormatError("its tuples are not sorted, or have too many transitions")
        tuples.append(one)
    _expect(fields, kind.replace("<", "</"))
    _expect(fields, "<LogProbs>")
    # the first probability is that of no id
    if fields.num_floats() != num_ids + 1:
        raise KaldiFormatError(f"it does not have one probability for each of {num_ids} transitions")
    _expect(fields, "</LogProbs>")
    _expect(fields, _END.decode())
    return TransitionModel(topologies, tuple(tuples))


def _expect(fields: _TextFields | _BinaryFields, token: str) -> None:
    if (found := fields.word()) != token:
        raise KaldiFormatError(f"{found[:30]!r} is found instead of {token}")


def _checked(states: list[HmmState]) -> tuple[HmmState, ...]:
    if len(states) < 2 or states[-1].transitions or states[-1].pdf_class != _NO_PDF:
        raise KaldiFormatError("a topology does not end with a state without transitions")
    for state in states:
        targets = [target for target, _ in state.transitions]
        if len(set(targets)) < len(targets) or not all(target < len(states) for target in targets):
            raise KaldiFormatError("a topology has transitions to a state that it lacks, or two to one")
        # Kaldi rejects 0, and warns of sums above 1.01
        if not all(0.0 < probability <= 1.01 for _, probability in state.transitions):
            raise KaldiFormatError("a topology has a probability that is not between 0 and 1")
        if (state.pdf_class == _NO_PDF) != (state.self_loop_class == _NO_PDF):
            raise KaldiFormatError("a state has one pdf class, but not the other")
    return tuple(states)


class _TextFields:
    """Fields of the text form, separated by spaces."""

    def __init__(self, content: bytes) -> None:
        self._tokens = (match[0].decode(errors="replace") for match in re.finditer(rb"\S+", content))

    def word(self) -> str:
        return next(self._tokens, "")

    def integer(self, low: int, high: int) -> int:
        return _integer(self.word(), low, high)

    def num_floats(self) -> int:
        _expect(self, "[")
        count = 0
        while (token := self.word()) != "]":
            if _number(token) > 0.0:
                raise KaldiFormatError(f"it has the log probability {token[:30]}")
            count += 1
        return count

    def topologies(self) -> dict[int, tuple[HmmState, ...]]:
        found: dict[int, tuple[HmmState, ...]] = {}
        while (token := self.word()) == "<TopologyEntry>":
            _expect(self, "<ForPhones>")
            phones = []
            while (phone := self.word()) != "</ForPhones>":
                phones.append(_integer(phone, 1, _MAX_PHONES))
            states = self._states()
            if not phones or any(phone in found for phone in phones) or len(set(phones)) < len(phones):
                raise KaldiFormatError("a phone is in two topologies, or a topology has no phone")
            found |= dict.fromkeys(phones, states)
        if token != "</Topology>":
            raise KaldiFormatError(f"{token[:30]!r} is found instead of <TopologyEntry>")
        return found

    def _states(self) -> tuple[HmmState, ...]:
        states: list[HmmState] = []
        while (token := self.word()) == "<State>":
            if self.integer(0, _MAX_STATES) != len(states):
                raise KaldiFormatError("the states of a topology are not numbered from 0")
            forward = loop = _NO_PDF
            transitions: list[tuple[int, float]] = []
            token = self.word()
            if token in ("<PdfClass>", "<ForwardPdfClass>"):
                forward = loop = self.integer(0, _MAX_STATES)
                if token == "<ForwardPdfClass>":
                    _expect(self, "<SelfLoopPdfClass>")
                    loop = self.integer(0, _MAX_STATES)
                token = self.word()
            while token == "<Transition>":
                transitions.append((self.integer(0, _MAX_STATES), _number(self.word())))
                token = self.word()
            if token != "</State>":
                raise KaldiFormatError(f"{token[:30]!r} is found instead of </State>")
            states.append(HmmState(forward, loop, tuple(transitions)))
        if token != "</TopologyEntry>":
            raise KaldiFormatError(f"{token[:30]!r} is found instead of <State>")
        return _checked(states)


class _BinaryFields:
    """Fields of the binary form: numbers with their size before them, words with a space after."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def word(self) -> str:
        return self._source.word(64).decode(errors="replace")

    def integer(self, low: int, high: int) -> int:
        return _in_range(self._source.int32(), low, high)

    def num_floats(self) -> int:
        values = read_float_object(self._source, self._source.word(16))
        # comparisons with NaN are false
        if values.ndim != 1 or not ((values <= 0.0) & (values > -math.inf)).all():
            raise KaldiFormatError("its log probabilities are not a vector of numbers up to 0")
        return len(values)

    def topologies(self) -> dict[int, tuple[HmmState, ...]]:
        phones, entry_of = self._integers(), self._integers()
        num_entries = self.integer(-1, _MAX_PHONES)
        # marks self-loops with their own pdf classes
        has_loops = num_entries == -1
        num_entries = self.integer(1, _MAX_PHONES) if has_loops else num_entries
        entries = [_checked([self._state(has_loops) for _ in range(self.integer(2, _MAX_STATES))]) for _ in range(num_entries)]
        _expect(self, "</Topology>")
        if not all(0 < phone < len(entry_of) and 0 <= entry_of[phone] < num_entries for phone in phones):
            raise KaldiFormatError("a phone has no topology")
        return {phone: entries[entry_of[phone]] for phone in phones}

    def _state(self, has_loops: bool) -> HmmState:
        forward = self.integer(_NO_PDF, _MAX_STATES)
        loop = self.integer(_NO_PDF, _MAX_STATES) if has_loops else forward
        transitions = []
        for _ in range(self.integer(0, _MAX_TRANSITIONS)):
            target, size = self.integer(0, _MAX_STATES), self._source.take(1)
            if size not in (b"\4", b"\10"):
                raise KaldiFormatError("expected a float of 4 or 8 bytes")
            [value] = struct.unpack("<f" if size == b"\4" else "<d", self._source.take(size[0]))
            transitions.append((target, float(value)))
        return HmmState(forward, loop, tuple(transitions))

    def _integers(self) -> list[int]:
        found: list[int] = self._source.array("<i4", self.integer(0, _MAX_PHONES + 1)).tolist()
        return found


def _integer(token: str, low: int, high: int) -> int:
    if not re.fullmatch("-?[0-9]{1,8}", token):
        raise KaldiFormatError(f"{token[:30]!r} is found instead of an integer")
    return _in_range(int(token), low, high)


def _in_range(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise KaldiFormatError(f"it has {number} where a number from {low} to {high} is expected")
    return number


def _number(token: str) -> float:
    try:
        value = float(token)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KaldiFormatError(f"{token[:30]!r} is found instead of a number")
    return value
