"""The decision tree from a phone in context and an HMM state to a pdf, and its text form.

A tree has Kaldi's structure and text form (`ContextDependency`, as `tree` in a Kaldi model folder
after `copy-tree --binary=false`), so that trees can be exchanged.  Phones are numbered from 1; 0
stands for the edge of an utterance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ngsgd.errors import DataError

# the number of a phone outside the utterance
EDGE = 0
# the key of the HMM state in splits and tables; other keys are positions in the window
STATE = -1
# far beyond any tree, and below Python's recursion limit
_MAX_DEPTH = 400
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
        """Return the pdf of a state of the center phone.

        Args:
            window: `width` phone numbers; `EDGE` outside the utterance.
            state: HMM state, from 0.

        Raises:
            DataError: the tree has no pdf for it, such as for a phone that was not in training.
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
        return 1 + max(leaf.pdf for leaf in _leaves(self.root))

    def pdfs(self, phone: int, state: int) -> frozenset[int]:
        """Return the pdfs that a state of a phone has in any context."""
        fixed = {self.center: phone, STATE: state}
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
        return (f"ContextDependency {self.width} {self.center} ToPdf {_written(self.root)}"
                "EndContextDependency \n")

    @staticmethod
    def from_text(text: str) -> ContextTree:
        """Read Kaldi's text form.

        Raises:
            DataError: the text is damaged, or is of another form.
        """
        return _Parser(re.findall(r"\S+", text)).tree()


def _leaves(node: Node | None) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Split):
        yield from _leaves(node.yes)
        yield from _leaves(node.no)
    elif isinstance(node, Table):
        for child in node.children:
            yield from _leaves(child)


def _written(node: Node | None) -> str:
    if node is None:
        return "NULL "
    if isinstance(node, Leaf):
        return f"CE {node.pdf} "
    if isinstance(node, Table):
        children = "".join(map(_written, node.children))
        return f"TE {node.key} {len(node.children)} ( {children}) "
    values = " ".join(map(str, sorted(node.yes_values)))
    return f"SE {node.key} [ {values} ]\n{{ {_written(node.yes)}{_written(node.no)}}} \n"


class _Parser:
    """Recursive descent over the tokens of a tree."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._width = 0

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
