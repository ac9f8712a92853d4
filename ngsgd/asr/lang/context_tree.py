"""The decision tree from a phone in context and an HMM state to a pdf, and Kaldi's text form of it.

Phones are numbered from 1; 0 is the edge of an utterance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ngsgd.asr.lang import openfst
from ngsgd.errors import DataError

EDGE = 0  # the number of a phone outside the utterance
# the key of the HMM state in splits and tables; other keys are positions in the window
STATE = -1
_MAX_DEPTH = 400  # far beyond any tree, and below Python's recursion limit
_MAX_PHONES, _MAX_PDFS, _MAX_WIDTH = 100_000, 1_000_000, 7


@dataclass(frozen=True)
class Leaf:
    """A pdf."""

    pdf: int


@dataclass(frozen=True)
class Split:
    """A question about one position of the window, or about the state."""

    key: int
    yes_values: frozenset[int]
    yes: Node
    no: Node


@dataclass(frozen=True)
class Table:
    """One subtree for each value of a key; None where the value does not occur."""

    key: int
    children: tuple[Node | None, ...]


Node = Leaf | Split | Table


@dataclass(frozen=True)
class ContextTree:
    """A map from (window of phones, state) to pdfs.

    Attributes:
        width: number of phones in a window; 3 for triphones, 2 for left biphones.
        center: position of the phone that the states belong to, from 0.
        root: the first question.

    Example:
        >>> tree = ContextTree(1, 0, Table(0, (None, Leaf(0), Table(-1, (Leaf(1), Leaf(2))))))
        >>> tree.pdf((2,), 1)
        2
    """

    width: int
    center: int
    root: Node

    def pdf(self, window: Sequence[int], state: int) -> int:
        """Return the pdf of a state (from 0) of the center phone of a window, with `EDGE` outside
        the utterance. Raises DataError if there is none, such as for a phone not in training.
        """
        node: Node | None = self.root
        while node is not None and not isinstance(node, Leaf):
            value = state if node.key == STATE else window[node.key]
            if isinstance(node, Split):
                node = node.yes if value in node.yes_values else node.no
            else:
                node = node.children[value] if value < len(node.children) else None
        if node is None:
            raise DataError(f"The decision tree has no pdf for state {state} of the phones "
                            f"{' '.join(map(str, window))}; take the tree of this phone set.")
        return node.pdf

    @cached_property
    def num_pdfs(self) -> int:
        """1 + the largest pdf."""
        return 1 + max(self._reached({}))

    def pdfs(self, phone: int, state: int) -> frozenset[int]:
        """Return the pdfs that a state of a phone has in any context."""
        return self._reached({self.center: phone, STATE: state})

    def _reached(self, fixed: Mapping[int, int]) -> frozenset[int]:
        found, todo = set(), [self.root]
        while todo:
            node = todo.pop()
            if isinstance(node, Leaf):
                found.add(node.pdf)
            elif isinstance(node, Split):
                value = fixed.get(node.key)
                todo += [node.yes] if value is None or value in node.yes_values else []
                todo += [node.no] if value is None or value not in node.yes_values else []
            else:
                value = fixed.get(node.key)
                children = node.children if value is None else node.children[value : value + 1]
                todo += [child for child in children if child is not None]
        return frozenset(found)

    def to_text(self) -> str:
        """Return the tree in Kaldi's text form."""
        return f"ContextDependency {self.width} {self.center} ToPdf {_written(self.root)}EndContextDependency \n"

    @staticmethod
    def from_text(text: str) -> ContextTree:
        """Read Kaldi's text form; DataError if the text is damaged, or is of another form."""
        return _Parser(re.findall(r"\S+", text)).tree()


def _written(node: Node | None) -> str:
    if node is None:
        return "NULL "
    if isinstance(node, Leaf):
        return f"CE {node.pdf} "
    if isinstance(node, Table):
        return f"TE {node.key} {len(node.children)} ( {''.join(map(_written, node.children))}) "
    values = " ".join(map(str, sorted(node.yes_values)))
    return f"SE {node.key} [ {values} ]\n{{ {_written(node.yes)}{_written(node.no)}}} \n"


class _Parser:
    """Recursive descent over the tokens of a tree."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._width = tokens, 0, 0

    def tree(self) -> ContextTree:
        self._expect("ContextDependency")
        self._width = self._number(1, _MAX_WIDTH)
        center = self._number(0, self._width - 1)
        self._expect("ToPdf")
        root = self._node(0)
        self._expect("EndContextDependency")
        if root is None or self._at != len(self._tokens):
            raise self._damaged("one tree")
        return ContextTree(self._width, center, root)

    def _node(self, depth: int) -> Node | None:
        if depth > _MAX_DEPTH:
            raise self._damaged(f"at most {_MAX_DEPTH} questions one below another")
        kind = self._next()
        if kind == "NULL":
            return None
        if kind == "CE":
            return Leaf(self._number(0, _MAX_PDFS))
        if kind == "TE":
            key, size = self._number(STATE, self._width - 1), self._number(0, _MAX_PHONES)
            self._expect("(")
            children = tuple(self._node(depth + 1) for _ in range(size))
            self._expect(")")
            return Table(key, children)
        if kind != "SE":
            raise self._damaged("CE, TE, SE or NULL")
        key = self._number(STATE, self._width - 1)
        self._expect("[")
        values = set()
        while self._peek() != "]":
            values.add(self._number(0, _MAX_PHONES))
        self._expect("]")
        self._expect("{")
        yes, no = self._node(depth + 1), self._node(depth + 1)
        self._expect("}")
        if yes is None or no is None:
            raise self._damaged("two subtrees of a question")
        return Split(key, frozenset(values), yes, no)

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise self._damaged(token)

    def _number(self, low: int, high: int) -> int:
        token = self._next()
        if not re.fullmatch(r"-?\d{1,7}", token) or not low <= int(token) <= high:
            raise self._damaged(f"a number from {low} to {high}")
        return int(token)

    def _damaged(self, expected: str) -> DataError:
        found = self._tokens[self._at - 1][:20] if 0 < self._at <= len(self._tokens) else "the end"
        return DataError(f"The decision tree is not in Kaldi's text form: token {self._at} is "
                         f"{found!r}, expected {expected}; write it with copy-tree --binary=false.")


EPSILON = 0


@dataclass
class ContextGraphs:
    """C and H of a tree over triphones or left biphones."""

    tree: ContextTree
    num_states: Sequence[int]  # of each phone, from phone 1
    disambig: Sequence[int]  # symbols on the phone side that pass through C and H
    end: int  # symbol that closes a phone sequence
    # symbol of speech without phones, after an end and before a start; 0: none
    garbage: int = 0
    # pdfs of a phone in context, each with its input label of C
    _labels: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if (self.tree.width, self.tree.center) not in ((3, 1), (2, 1)):
            raise DataError(f"The decision tree has windows of {self.tree.width} phones with the "
                            f"center {self.tree.center}; graphs are made for triphones (3, 1) and left biphones (2, 1).")

    @cached_property
    def context(self) -> Any:
        """C: labels of phones in context to phones, sorted by output."""
        kaldifst = openfst.toolkit()
        phones = range(1, len(self.num_states) + 1)
        fst = kaldifst.StdVectorFst()
        # (left, center) -> state; the center was read and waits for its right neighbor
        states = {pair: fst.add_state() for pair in [(EDGE, EDGE), *itertools.product((EDGE, *phones), phones)]}
        last = fst.add_state()
        fst.start = states[EDGE, EDGE]
        fst.set_final(last, 0.0)
        for (left, center), state in states.items():
            for right in phones:
                label = self._label(left, center, right) if center else EPSILON
                fst.add_arc(state, kaldifst.StdArc(label, right, 0.0, states[center, right]))
            label = self._label(left, center, EDGE) if center else EPSILON
            fst.add_arc(state, kaldifst.StdArc(label, self.end, 0.0, last))
        # labels of disambiguation symbols follow those of the contexts, whose number is known now
        for state in states.values():
            for number, symbol in enumerate(self.disambig):
                label = len(self._labels) + 1 + number
                fst.add_arc(state, kaldifst.StdArc(label, symbol, 0.0, state))
        if self.garbage:
            label = len(self._labels) + 1 + len(self.disambig)
            fst.add_arc(last, kaldifst.StdArc(label, self.garbage, 0.0, fst.start))
        kaldifst.arcsort(fst, "olabel")
        return fst

    @cached_property
    def states(self) -> Any:
        """H: pdfs + 1 to labels of C."""
        _ = self.context
        return pdfs_to_labels(self._labels.items(), (
            (self.tree.num_pdfs + 1 + number, len(self._labels) + 1 + number)
            for number in range(len(self.disambig) + bool(self.garbage))))

    def _label(self, left: int, center: int, right: int) -> int:
        # trees of left biphones do not ask for the last one
        pdfs = tuple(self.tree.pdf((left, center, right), state) for state in range(self.num_states[center - 1]))
        return self._labels.setdefault(pdfs, len(self._labels) + 1)


def pdfs_to_labels(labels: Iterable[tuple[Sequence[int], int]], symbols: Iterable[tuple[int, int]]) -> Any:
    """H: pdfs + 1 to labels, closed under repetition, without self-loops; sorted by output. Labels
    in `symbols` are of disambiguation symbols, which pass.
    """
    kaldifst = openfst.toolkit()
    fst = kaldifst.StdVectorFst()
    fst.start = fst.add_state()
    fst.set_final(fst.start, 0.0)
    for pdfs, label in labels:
        state, output = fst.start, label
        for pdf in pdfs[:-1]:
            following = fst.add_state()
            fst.add_arc(state, kaldifst.StdArc(pdf + 1, output, 0.0, following))
            state, output = following, EPSILON
        fst.add_arc(state, kaldifst.StdArc(pdfs[-1] + 1, output, 0.0, fst.start))
    for symbol, output in symbols:
        fst.add_arc(fst.start, kaldifst.StdArc(symbol, output, 0.0, fst.start))
    kaldifst.arcsort(fst, "olabel")
    return fst


def closed(fst: Any, end: int) -> Any:
    """Let every phone sequence of a transducer end with the symbol `end`; sorted by input."""
    kaldifst = openfst.toolkit()
    finals = [(state, fst.final(state).value) for state in range(fst.num_states) if fst.final(state).value != float("inf")]
    last = fst.add_state()
    for state, cost in finals:
        fst.add_arc(state, kaldifst.StdArc(end, EPSILON, cost, last))
        fst.set_final(state, float("inf"))
    fst.set_final(last, 0.0)
    kaldifst.arcsort(fst, "ilabel")
    return fst
