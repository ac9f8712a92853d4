"""What can be said in a corpus: its words, how they are spelt in HMM states, and which may follow which."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ngsgd.asr.lang.topology import SILENCE_PHONE, Topology


@dataclass(frozen=True)
class GivenGraph:
    """A decoding graph that came with the data, in Kaldi's labels."""

    # an OpenFst file; input labels are transition ids, output labels word numbers
    hclg: bytes
    words: tuple[str, ...]      # word number - 1 -> word
    tid2pdf: tuple[int, ...]    # transition id - 1 -> pdf


@dataclass(frozen=True)
class Language:
    """Words and grammar.  Without an ARPA text any word may follow any other, each as likely."""

    topology: Topology
    # an n-gram model in ARPA's format
    arpa: str = ""
    # an utterance is a single word (without `arpa`)
    is_one_word: bool = False
    given: GivenGraph | None = None

    @property
    def num_pdfs(self) -> int:
        """HMM states: those of the graph that came with the data (which may tie them), else those of the phones."""
        return 1 + max(self.given.tid2pdf) if self.given else self.topology.num_pdfs

    def pdf_names(self, *, of_graph: bool) -> tuple[str, ...]:
        """The phone and state of each pdf, from 0; `of_graph`: those of the graph that came with the data, by its digest.

        Equal names are equal states, so that alignments can be compared with what they are used for.
        """
        if of_graph and self.given:
            tree = hashlib.sha256(" ".join(map(str, self.given.tid2pdf)).encode()).hexdigest()[:12]
            return tuple(f"tree-{tree} {pdf}" for pdf in range(self.num_pdfs))
        phones = (SILENCE_PHONE, *self.topology.phones)
        return tuple(f"{phone} {state}" for phone in phones for state in range(len(self.topology.pdfs_of_phone(phone))))

    def to_json(self) -> dict[str, Any]:
        """All but what `files` holds."""
        given = {"words": list(self.given.words), "tid2pdf": list(self.given.tid2pdf)} if self.given else None
        return {"topology": self.topology.to_json(), "is_one_word": self.is_one_word, "given": given}

    def files(self) -> dict[str, bytes]:
        """Name -> content of what does not belong into JSON."""
        found = {"lm.arpa": self.arpa.encode()} if self.arpa else {}
        return found | ({"HCLG.fst": self.given.hclg} if self.given else {})

    @staticmethod
    def from_json(tree: dict[str, Any], files: dict[str, bytes]) -> Language:
        given = tree["given"] and GivenGraph(files["HCLG.fst"], tuple(tree["given"]["words"]), tuple(tree["given"]["tid2pdf"]))
        return Language(Topology.from_json(tree["topology"]), files.get("lm.arpa", b"").decode(), tree["is_one_word"], given)
