"""Grammars in a subset of JSGF (JSpeech Grammar Format, W3C note 2000).

    #JSGF V1.0;
    <digit> = zero | one | two;
    public <call> = call <digit>+ [please];

Supported are words, rules, ( ) for groups, [ ] for options, | for alternatives, * and + for
repetition, and comments as in C. Weights, tags and imports are rejected. A rule must not contain
itself. The grammar is the first public rule, or the first rule if none is public.

Each of n alternatives has the probability 1/n; options and repetitions have no cost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import openfst
from ngsgd.errors import DataError

_MAX_BYTES = 1 << 24
_MAX_STATES = 1_000_000
# limit of the deterministic form of N states: _MAX_GROWTH * N + _SMALL; the time is quadratic
_MAX_GROWTH, _SMALL = 10, 10_000
_TOO_LARGE = "is too large, or repeats alternatives of the same words with other probabilities; make it smaller."
_MAX_DEPTH = 200  # maximum nesting of groups and rules
_COMMENT = re.compile(r"//[^\n]*|/\*")
_TOKEN = re.compile(r"\s*(<[^<>\s]+>|[|()\[\]*+;=]|[^\s|()\[\]*+;=<>]+|\S)")


@dataclass(frozen=True)
class _Node:
    kind: Literal["word", "rule", "all", "any", "option", "star", "plus"]
    name: str = ""
    parts: tuple[_Node, ...] = ()


@dataclass(frozen=True)
class Grammar:
    """The rules of a file, and its text."""

    path: Path
    rules: Mapping[str, _Node]
    start: str
    text: str = field(repr=False)

    def words(self) -> tuple[str, ...]:
        """All words of all rules, sorted."""
        found, todo = set[str](), list(self.rules.values())
        while todo:
            node = todo.pop()
            found |= {node.name} if node.kind == "word" else set()
            todo += node.parts
        return tuple(sorted(found))

    def acceptor(self, labels: Mapping[str, int]) -> Any:
        """Build the word sequences, with these labels, as kaldifst.StdVectorFst. Raises DataError
        if a rule is missing or contains itself, or there are too many states.
        """
        expansion = _Expansion(self, labels)
        end = expansion.add(_Node("rule", self.start), 0, ())
        kaldifst = openfst.toolkit()
        fst = kaldifst.compile("\n".join([*expansion.lines, f"{end} 0", ""]))
        try:
            # alternatives of equal words under * and + can have no deterministic form
            kaldifst.determinize_star(fst, max_states=_MAX_GROWTH * expansion.num_states + _SMALL)
        except RuntimeError as error:
            raise DataError(f"the grammar {self.path} {_TOO_LARGE}") from error
        return fst


def read(path: Path) -> Grammar:
    """Read a grammar; raise DataError if it cannot be read, or its syntax is not supported."""
    return parse("\n".join(line for _, line in lines.read(path, max_bytes=_MAX_BYTES)), path)


def parse(text: str, path: Path) -> Grammar:
    """Parse the text of the file `path`; raise DataError if its syntax is not supported."""
    return _Parser(path, text).grammar()


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text, self._at = path, text, 0
        self._tokens: list[str] = _TOKEN.findall(_without_comments(text).rstrip())

    def grammar(self) -> Grammar:
        rules: dict[str, _Node] = {}
        public = []
        while self._peek():
            head = self._next()
            if head.lower() in ("#jsgf", "grammar"):
                while self._next() != ";":
                    pass
                continue
            is_public = head == "public"
            name = self._next() if is_public else head
            if not name.startswith("<") or name in rules:
                raise self._error(f"{name!r} is not the name of a new rule; write <name> = words;")
            self._expect("=")
            rules[name] = self._alternatives(0)
            self._expect(";")
            public += [name] if is_public else []
        if not rules:
            raise self._error("it has no rule; write <name> = words;")
        return Grammar(self._path, rules, [*public, *rules][0], self._text)

    def _alternatives(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self._error("its groups are nested too deeply")
        parts = [self._sequence(depth)]
        while self._peek() == "|":
            self._next()
            parts.append(self._sequence(depth))
        return _Node("any", parts=tuple(parts)) if len(parts) > 1 else parts[0]

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")", "]", ";", "="):
            parts.append(self._item(depth))
        if not parts:
            raise self._error("an alternative is empty; write [ ] around optional words")
        return _Node("all", parts=tuple(parts))

    def _item(self, depth: int) -> _Node:
        token = self._next()
        if token in ("(", "["):
            inside = self._alternatives(depth + 1)
            self._expect({"(": ")", "[": "]"}[token])
            node = inside if token == "(" else _Node("option", parts=(inside,))
        elif token.startswith("<") and token.endswith(">"):
            node = _Node("rule", token)
        elif token[0] in '*+<>/{}"\\':
            raise self._error(f"{token!r} is not supported; write words, rules, ( ) [ ] | * and +")
        else:
            node = _Node("word", token)
        while self._peek() in ("*", "+"):
            node = _Node("star" if self._next() == "*" else "plus", parts=(node,))
        return node

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        if not self._peek():
            raise self._error("it ends inside a rule; end every rule with ;")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._error(f"expected {token}, found {self._peek() or 'the end'!r}")
        self._next()

    def _error(self, reason: str) -> DataError:
        near = " ".join(self._tokens[max(0, self._at - 4) : self._at + 1])
        return DataError(f"the grammar {self._path}: {reason} (near {near!r}).")


@dataclass
class _Expansion:
    """States and arcs of a grammar, as lines in the text form of OpenFst; state 0 is the start."""

    grammar: Grammar
    labels: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    num_states: int = 1

    def add(self, node: _Node, source: int, inside: tuple[str, ...]) -> int:
        """Add a node and return the state after it; `inside` are the rules being expanded."""
        if len(inside) > _MAX_DEPTH or self.num_states > _MAX_STATES:
            raise DataError(f"the grammar {self.grammar.path} {_TOO_LARGE}")
        if node.kind == "word":
            return self._arc(source, self.labels[node.name])
        if node.kind == "rule":
            name, about = node.name, f"the grammar {self.grammar.path}"
            if name in inside:
                raise DataError(f"{about}: the rule {name} contains itself; write repetitions with * or +.")
            if name not in self.grammar.rules:
                raise DataError(f"{about} has no rule {name}; add it.")
            return self.add(self.grammar.rules[name], source, (*inside, name))
        if node.kind == "all":
            for part in node.parts:
                source = self.add(part, source, inside)
            return source
        if node.kind == "any":
            end = self._state()
            for part in node.parts:
                first = self._arc(source, 0, math.log(len(node.parts)))
                self._join(self.add(part, first, inside), end)
            return end
        begin = self._arc(source, 0)
        end = self.add(node.parts[0], begin, inside)
        after = self._arc(end, 0)
        if node.kind in ("option", "star"):
            self._join(begin, after)
        if node.kind in ("star", "plus"):
            self._join(end, begin)
        return after

    def _state(self) -> int:
        self.num_states += 1
        return self.num_states - 1

    def _arc(self, source: int, label: int, cost: float = 0.0) -> int:
        self._join(source, target := self._state(), label, cost)
        return target

    def _join(self, source: int, target: int, label: int = 0, cost: float = 0.0) -> None:
        self.lines.append(f"{source} {target} {label} {label} {cost}")


def _without_comments(text: str) -> str:
    """Replace comments by spaces; a comment without an end is none, and is searched for it once."""
    parts, start, at, last = list[str](), 0, 0, text.rfind("*/")
    while found := _COMMENT.search(text, at):
        at = found.end()
        if found[0] == "/*":
            if at > last:
                continue
            at = text.index("*/", at) + 2
        parts.append(text[start:found.start()])
        start = at
    return " ".join([*parts, text[start:]])
