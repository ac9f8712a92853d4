"""The language of a corpus: words, their pronunciations in HMM states, and the grammar."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngsgd.asr.lang import grammar as grammars
from ngsgd.asr.lang import hotwords as phrases
from ngsgd.asr.lang.context_tree import ContextTree
from ngsgd.asr.lang.topology import SILENCE_PHONE, Topology

GRAMMAR = "grammar.jsgf"


@dataclass(frozen=True)
class GivenGraph:
    """A decoding graph of the data, with labels of Kaldi."""

    hclg: bytes  # an OpenFst file; input labels are transition ids, output labels word numbers
    words: tuple[str, ...]      # word number - 1 -> word
    tid2pdf: tuple[int, ...]    # transition id - 1 -> pdf


@dataclass(frozen=True)
class Language:
    """Words and grammar; without an ARPA text all word sequences have equal weights."""

    topology: Topology
    arpa: str = ""  # an n-gram model in ARPA format
    is_one_word: bool = False  # an utterance is a single word (without `arpa`)
    given: GivenGraph | None = None
    # ties the states of triphones; phone 1 is silence, the others follow in the topology's order
    tree: ContextTree | None = None
    # of the training transcripts, for homophones; empty if unknown
    word_counts: Mapping[str, int] = field(default_factory=dict)
    grammar: grammars.Grammar | None = None  # replaces the language model
    hotwords: phrases.Hotwords | None = None

    @property
    def num_pdfs(self) -> int:
        """Number of pdfs: of the graph that came with the data, of the tree, or of the phones."""
        if self.given:
            return 1 + max(self.given.tid2pdf)
        return self.tree.num_pdfs if self.tree else self.topology.num_pdfs

    def pdf_names(self, *, of_graph: bool) -> tuple[str, ...]:
        """The phone and state of each pdf, from 0: equal names are equal states. With `of_graph`
        they are derived from the digest of the graph of the data.
        """
        text = " ".join(map(str, self.given.tid2pdf)) if of_graph and self.given else \
            self.tree.to_text() if self.tree else ""
        if text:
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            return tuple(f"tree-{digest} {pdf}" for pdf in range(self.num_pdfs))
        return tuple(f"{phone} {state}" for phone in (SILENCE_PHONE, *self.topology.phones)
                     for state in range(len(self.topology.pdfs_of_phone(phone))))

    def phone_states(self) -> tuple[int, ...] | None:
        """The state of a phone that each tied state belongs to; None without a tree."""
        if not self.tree:
            return None
        state_P = [0] * self.num_pdfs
        for number, phone in enumerate((SILENCE_PHONE, *self.topology.phones), start=1):
            for state, untied in enumerate(self.topology.pdfs_of_phone(phone)):
                for pdf in self.tree.pdfs(number, state):
                    state_P[pdf] = untied
        return tuple(state_P)

    def to_json(self) -> dict[str, Any]:
        """Everything except the content of `files`."""
        given = {"words": list(self.given.words), "tid2pdf": list(self.given.tid2pdf)} if self.given else None
        return {"topology": self.topology.to_json(), "is_one_word": self.is_one_word, "given": given,
                "word_counts": dict(self.word_counts)}

    def files(self) -> dict[str, bytes]:
        """Name -> content of files that are not part of the JSON."""
        found = {"lm.arpa": self.arpa.encode()} if self.arpa else {}
        found |= {"tree.txt": self.tree.to_text().encode()} if self.tree else {}
        found |= {GRAMMAR: self.grammar.text.encode()} if self.grammar else {}
        found |= {phrases.HOTWORDS: self.hotwords.to_text().encode()} if self.hotwords else {}
        return found | ({"HCLG.fst": self.given.hclg} if self.given else {})

    @staticmethod
    def from_json(tree: dict[str, Any], files: dict[str, bytes]) -> Language:
        given = tree["given"] and GivenGraph(files["HCLG.fst"], tuple(tree["given"]["words"]), tuple(tree["given"]["tid2pdf"]))
        context = ContextTree.from_text(files["tree.txt"].decode()) if "tree.txt" in files else None
        rules = grammars.parse(files[GRAMMAR].decode(), Path(GRAMMAR)) if GRAMMAR in files else None
        preferred = [(phrases.HOTWORDS, line) for line in files.get(phrases.HOTWORDS, b"").decode().split("\n") if line]
        hotwords = phrases.parse(preferred, phrases.HOTWORDS) if preferred else None
        return Language(Topology.from_json(tree["topology"]), files.get("lm.arpa", b"").decode(),
                        tree["is_one_word"], given, context, tree["word_counts"], rules, hotwords)
