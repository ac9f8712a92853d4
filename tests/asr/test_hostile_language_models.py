"""Hostile language models, grammars and graphs: a graph or one error, and no signal."""

from __future__ import annotations

import gzip
import multiprocessing
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import arpa, grammar, graphs, ngram, vocabulary
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import DataError
from tests.tiers import HANGS_S

kaldifst = pytest.importorskip("kaldifst")
pytest.importorskip("kaldilm")
pytest.importorskip("kaldi_decoder")

# words that look like symbols of the tools
TOPOLOGY = Topology(("a", "b"), {"ab": (("a", "b"),), "b": (("b",),), "<s>": (("SIL",),), "#0": (("a",),), "<eps>": (("b", "a"),)})
LANGUAGE = Language(TOPOLOGY)
GOOD = ("\\data\\\nngram 1=4\nngram 2=3\n\n\\1-grams:\n-99 <s> -0.2\n-0.5 </s>\n-0.4 ab -0.1\n-0.3 b -0.1\n\n"
        "\\2-grams:\n-0.2 <s> b\n-0.3 b ab\n-0.1 ab </s>\n\n\\end\\\n")


def model(*grams: str) -> str:
    """A model of these unigrams, with their number."""
    return "\n".join(["\\data\\", f"ngram 1={len(grams)}", "", "\\1-grams:", *grams, "", "\\end\\", ""])


MARKS = ("-99 <s>", "-0.5 </s>")
# all are errors
HOSTILE = {
    "no end of sentence": model("-99 <s>", "-0.4 ab"),
    "no begin of sentence": model("-0.5 </s>", "-0.4 ab"),
    "no words": model(*MARKS),
    "other words": model(*MARKS, "-0.4 AB", "-0.4 B"),
    "symbols as words": model(*MARKS, "-0.4 #0x", "-0.4 <eps>x"),
    "no end": GOOD.replace("\\end\\\n", ""),
    "cut in a section": GOOD[:GOOD.index("-0.3 b ab")],
    "cut in a line": GOOD[:GOOD.index(" ab </s>")],
    "higher count": GOOD.replace("ngram 1=4", "ngram 1=5"),
    "lower count": GOOD.replace("ngram 1=4", "ngram 1=3"),
    "huge count": GOOD.replace("ngram 1=4", "ngram 1=999999999999999999"),
    "no counts": GOOD.replace("ngram 1=4\nngram 2=3\n", ""),
    "negative count": GOOD.replace("ngram 1=4", "ngram 1=-4"),
    "order 0": GOOD.replace("ngram 1=4", "ngram 0=1\nngram 1=4"),
    "order 99": GOOD.replace("ngram 2=3", "ngram 2=3\nngram 99=0"),
    "orders in another order": GOOD.replace("\\1-grams", "\\9-grams").replace("\\2-grams", "\\1-grams"),
    "section twice": GOOD.replace("\\2-grams:", "\\1-grams:"),
    "data twice": GOOD.replace("\\2-grams:", "\\data\\\n\\2-grams:"),
    "nan": GOOD.replace("-0.4", "nan"), "minus infinity": GOOD.replace("-0.4", "-inf"), "overflow": GOOD.replace("-0.4", "-1e39"),
    "infinite back-off": GOOD.replace("-0.4 ab -0.1", "-0.4 ab 1e300"), "probability above one": GOOD.replace("-0.4", "4.0"),
    "words with blanks": GOOD.replace("-0.4 ab", "-0.4 a b"), "no word": GOOD.replace("-0.4 ab -0.1", "-0.4"),
    "unigram twice": GOOD.replace("-0.3 b -0.1", "-0.3 ab -0.1"), "bigram twice": GOOD.replace("-0.3 b ab", "-0.2 <s> b"),
    "empty": "", "blank": "\n\n", "one mark": "\\data\\\n", "graph": "0 1 1 1\n1\n", "HTML": "<html>404</html>\n",
    "comma": GOOD.replace("-0.4", "-0,4"), "underscore": GOOD.replace("-0.4", "-1_0"),
    "control": GOOD.replace("ab -0.1", "a\0b -0.1"),
}
# all give the graph or the model of GOOD
HARMLESS = {
    "CRLF": GOOD.replace("\n", "\r\n"), "mark": "\ufeff" + GOOD, "tabs": GOOD.replace(" ", "\t").replace("ngram\t", "ngram "),
    "text before": "x\n\\1-grams:\n" + GOOD, "text after": GOOD + "\\1-grams:\nx\n",
    "capitals": GOOD.replace("<s>", "<S>").replace("</s>", "</S>"),
    "weight of a longest n-gram": GOOD.replace("-0.3 b ab", "-0.3 b ab -0.7"), "blank lines": GOOD.replace("\n", "\n\n"),
    "indented": GOOD.replace("\n", " \n  "),
}


def _silent(_line: str) -> None:
    pass


def _graph(language: Language) -> str:
    return str(graphs.build(language, silence_prob=0.2).fst.to_str(show_weight_one=True))


def _bundle(path: Path) -> str:
    """A model file may have any text as its language model."""
    text = path.read_bytes().decode("utf-8-sig")
    return _graph(Language(TOPOLOGY, text)) + str(ngram.parse(text))


OPTIONS: dict[str, Callable[[Path], str]] = {
    "--lm": lambda path: _graph(vocabulary.of_model(LANGUAGE, Vocabulary(arpa=path), _silent)),
    "data.lm": lambda path: _graph(Language(TOPOLOGY, arpa.read(path, TOPOLOGY.words, _silent))),
    "--rescore-lm": lambda path: str(ngram.parse(arpa.read(path, TOPOLOGY.words, _silent))),
    "lm.arpa of a model": _bundle}


def _outcome(read: Callable[[Path], str], path: Path, output: Path) -> None:
    try:
        output.write_text("read " + read(path))
    except DataError as error:
        output.write_text(f"error {error}")


def in_process(read: Callable[[Path], str], path: Path) -> str:
    """The outcome in another process, which a signal may end."""
    output = path.with_suffix(".out")
    process = multiprocessing.get_context("fork").Process(target=_outcome, args=(read, path, output))
    process.start()
    process.join(HANGS_S)
    code = process.exitcode
    process.kill()
    assert code == 0
    return output.read_text()


# a word of a bundle may have any character
CASES = [(option, name) for name in HOSTILE for option in OPTIONS
         if (option, name) != ("lm.arpa of a model", "control")]


@pytest.mark.entry("Sp10", "give a language model without `</s>` or `\\end\\`, with wrong counts, or damaged", "error",
                   "one `DataError` with the file from `data.lm`, `--lm` and `--rescore-lm`, before a C++ library gets the text")
@pytest.mark.parametrize(("option", "name"), CASES)
def test_a_damaged_language_model_is_one_error_and_no_signal(option: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_bytes(HOSTILE[name].encode())
    found = in_process(OPTIONS[option], path)
    assert found.startswith("error ") and "\n" not in found, found


@pytest.mark.entry("Sp11")
@pytest.mark.parametrize("option", OPTIONS)
def test_harmless_forms_give_the_same_model(option: str, tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(GOOD)
    plain = in_process(OPTIONS[option], path)
    assert plain.startswith("read ")
    for name, text in HARMLESS.items():
        path.write_bytes(text.encode())
        assert in_process(OPTIONS[option], path) == plain, name


@pytest.mark.entry("Sp11", "give `--rescore-lm` a truncated model, or any option a gzip-compressed or a binary one", "error",
                   "truncated: the error of `--lm`; gzip is read; a binary KenLM is refused with the next step")
@pytest.mark.parametrize("option", list(OPTIONS)[:3])
def test_gzip_is_read_and_binary_models_are_one_error(option: str, tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa.gz"
    path.write_text(GOOD)
    plain = in_process(OPTIONS[option], path)
    path.write_bytes(gzip.compress(GOOD.encode()))
    assert in_process(OPTIONS[option], path) == plain
    for content in (gzip.compress(GOOD.encode())[:-9], b"mmap lm http://kheafield.com/code format version 5\n\0" + bytes(99),
                    struct.pack("<i", 2125659606) + bytes(99), GOOD[:GOOD.index("\\2")].encode(), bytes(99)):
        path.write_bytes(content)
        assert in_process(OPTIONS[option], path).startswith("error "), content
    assert in_process(OPTIONS[option], tmp_path / "none").startswith("error ")


@pytest.mark.entry("Sp12", "give a language model that lacks words of the lexicon", "error",
                   "no common word: `DataError`; some missing: one line with their number and the words")
def test_words_of_lexicon_and_model_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(GOOD)
    said: list[str] = []
    changed = vocabulary.of_model(LANGUAGE, Vocabulary(arpa=path), said.append)
    assert len(said) == 1 and "3 of 5" in said[0] and "<s> #0 <eps>" in said[0]
    with pytest.raises(DataError, match=r"lm\.arpa"):
        vocabulary.of_model(Language(Topology(("a",), {"AB": (("a",),)})), Vocabulary(arpa=path), said.append)
    # the model's own, with other words
    (tmp_path / "lexicon").write_text("other a\n")
    with pytest.raises(DataError, match="other"):
        vocabulary.of_model(changed, Vocabulary(lexicon=tmp_path / "lexicon"), said.append)
    (tmp_path / "lexicon").write_text("other a\nab a b\n")
    vocabulary.of_model(changed, Vocabulary(lexicon=tmp_path / "lexicon"), said.append)
    assert "1 of 2" in said[-1] and "other" in said[-1]


@pytest.mark.entry("Sp10")
@pytest.mark.parametrize("text", ["<a> = (ab | b)+ | (ab | b | ab b)+;", "<a> = [ab] (ab | b)* b | (ab | b | <b>)+; <b> = b;"])
def test_a_grammar_without_a_deterministic_form_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "rules").write_text(text)
    found = in_process(lambda path: str(grammar.read(path).acceptor({"ab": 1, "b": 2})), tmp_path / "rules")
    assert found.startswith("error ")


@pytest.mark.entry("Sp10")
@pytest.mark.parametrize("text", ["0 1 1 1\n1 1 1 0\n", "0 1 1 0\n1\n", "0 0 1 1\n1\n", "0 1 1 1\n2\n1 3 1 1\n"])
def test_a_graph_of_the_data_without_a_path_is_one_error(text: str, tmp_path: Path) -> None:
    kaldifst.compile(text).write(str(tmp_path / "HCLG.fst"))
    with pytest.raises(DataError, match=r"HCLG\.fst"):
        graphs.check(GivenGraph((tmp_path / "HCLG.fst").read_bytes(), ("ab",), (0,)))


@pytest.mark.entry("Sp10")
def test_a_transcript_without_a_path_in_the_graph_has_no_path() -> None:
    graph = graphs.build(Language(TOPOLOGY, is_one_word=True), silence_prob=0.2)
    loglik_TP = np.zeros((20, TOPOLOGY.num_pdfs), np.float32)
    for words, is_complete in ((["ab"], True), (["ab", "ab"], False)):
        path = decoding.best_path(graphs.within(graph, words), loglik_TP, decoding.Search(1.0, 100.0, 1000))
        assert path.is_complete == is_complete
        assert path.words == tuple(words if is_complete else ())
