"""Every text file of speech data with every odd character at every place: right, or one error."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ngsgd.asr.corpora import alignments, data_dir, kaldi_dirs, manifests
from ngsgd.asr.corpora.corpus import ngrams_of
from ngsgd.asr.decode.scoring import Rules
from ngsgd.asr.kaldi_io import lines, tables
from ngsgd.asr.lang import arpa, grammar, lexicon, vocabulary
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.config import DataConfig
from ngsgd.errors import DataError
from tests.asr import tiny_recognizer

ROOT = Path(__file__).parent.parent.parent
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n-99 <s> -0.2\n-0.5 </s>\n-0.4 NO -0.1\n-0.3 YES\n\n\\end\\\n"
SUPERVISION = '{{"id": "u{}", "recording_id": "r1", "start": 0, "duration": 1, "text": "NO NO"}}\n'
RECORDING = '{{"id": "r{}", "sources": [{{"type": "file", "source": "a.wav"}}]}}\n'


def _directory(folder: Path) -> object:
    return [(one.utt_id, one.speaker, one.words, str(one.content).replace(str(folder), "")) for one in
            data_dir.read(folder, given_features=(folder / "feats.scp").exists())]


def _manifests(folder: Path) -> object:
    return [(one.utt_id, one.speaker, one.words) for one in manifests.read_folder(folder) or ()]


def _words_txt(folder: Path) -> object:
    # the graph itself is damaged: words.txt is read first
    try:
        kaldi_dirs.given_graph(folder)
    except DataError as error:
        if "HCLG" not in str(error):
            raise
    return [line.split() for _, line in lines.read(folder / "words.txt")]


def _lm_text(folder: Path) -> object:
    corpus = SimpleNamespace(language=tiny_recognizer.LANGUAGE, train=SimpleNamespace(texts=()))
    return ngrams_of(corpus, DataConfig(lm_order=1, lm_text=str(folder / "sentences")))[0]  # type: ignore[arg-type]


def _graph_files(folder: Path) -> None:
    (folder / "HCLG.fst").write_bytes(b"nothing")
    (folder / "tid2pdf").write_text("1 0\n2 1\n")


def _tables(folder: Path, **more: str) -> None:
    for name, text in {"text": "u1 YES\nu2 NO\n", "utt2spk": "u1 s1\nu2 s2\n", "wav.scp": "u1 a.wav\nu2 b.wav\n",
                       **more}.items():
        (folder / name.replace("_", ".")).write_text(text)
    for name in ("a.wav", "b.wav"):
        (folder / name).write_bytes(b"")


@dataclass(frozen=True)
class Table:
    """A text file: a valid text, its reader, its other files, and the line for odd characters."""

    name: str
    text: str
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None
    line: int = -1


REGISTRY = [
    Table("text", "u1 YES\nu2 NO NO\n", _directory, _tables),
    Table("utt2spk", "u1 s1\nu2 s2\n", _directory, _tables),
    Table("wav.scp", "u1 a.wav\nu2 b.wav\n", _directory, _tables),
    Table("segments", "u1 r1 0 1\nu2 r1 1 2\n", _directory, lambda folder: _tables(folder, wav_scp="r1 a.wav\n")),
    Table("reco2file_and_channel", "u1 a A\nu2 b B\n", _directory, _tables),
    Table("feats.scp", "u1 a.ark:3\nu2 a.ark:9\n", _directory, _tables),
    Table("cmvn.scp", "s1 a.ark:3\ns2 a.ark:9\n", lambda folder: [(key, one.value) for key, one in
                                                                 tables.Table(folder / "cmvn.scp").items()]),
    Table("spk2gender", "s1 f\ns2 m\n", lambda folder: data_dir.attributes(folder, ["s1", "s2"])),
    Table("filter", "YES => NO NO\nUH => \n", lambda folder: Rules.read(folder / "filter")),
    Table("lexicon.txt", "YES Y Y\nNO N N\n", lambda folder: lexicon.read(folder / "lexicon.txt", 1)),
    Table("words", "YES\nNO\n", lambda folder: vocabulary.of_model(tiny_recognizer.LANGUAGE, Vocabulary(words=folder / "words"))),
    Table("hotwords", "YES NO :2\nNO NO\n", lambda folder: vocabulary.of_model(
        tiny_recognizer.LANGUAGE, Vocabulary(hotwords=folder / "hotwords"))),
    Table("sentences", "YES YES\nNO NO\n", _lm_text),
    Table("rules", "<a> = YES\n| NO NO;\n", lambda folder: grammar.read(folder / "rules").rules),
    Table("lm", ARPA, lambda folder: arpa.read(folder / "lm", ["YES", "NO"], print), line=6),
    Table("words.txt", "<eps> 0\nNO 1\nYES 2\n", _words_txt, _graph_files),
    Table("tid2pdf", "1 0\n2 1\n", lambda folder: alignments.read_tid2pdf(folder / "tid2pdf")),
    Table("pdfs.txt", "0 SIL 0\n1 N 0\n", lambda folder: alignments.read(folder / "ali").pdf_names,
          lambda folder: (folder / "ali").write_text("u1 0 1\n")),
    Table("ali", "u1 0 1 1\nu2 0 0 1\n", lambda folder: {key: value.tolist() for key, value in
                                                      alignments.read(folder / "ali").pdf_T.items()}),
    Table("recordings.jsonl", RECORDING.format(1) + RECORDING.format(2), _manifests,
          lambda folder: (folder / "supervisions.jsonl").write_text(SUPERVISION.format(1))),
    Table("supervisions.jsonl", "".join(SUPERVISION.format(n) for n in (1, 2)), _manifests,
          lambda folder: (folder / "recordings.jsonl").write_text(RECORDING.format(1))),
]
# words with a joiner between letters
PERSIAN, MALAYALAM = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0d15\u0d4d\u200d\u0d37"
NAMES = [table.name for table in REGISTRY]

# a character of each kind, and all that Python takes for a space or the end of a line
SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace() and chr(code) not in " \t\n\r"]
ENDS = list("\v\f\x1c\x1d\x1e\x85\u2028\u2029")
CONTROLS = ["\0", "\x07", "\x1b", "\x7f", "\x9f"]
INVISIBLE = ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u200e", "\u202e", "\u180e",
             "\u034f", "\u3164", "\u2800", "\ufe0f"]
ODD = sorted({*SPACES, *ENDS, *CONTROLS, *INVISIBLE})
# in the last line: after a character inside a word, at its end, and at its beginning
PLACES = {"inside": lambda line: line[:-1] + "{}" + line[-1], "end": lambda line: line + "{}", "begin": lambda line: "{}" + line,
          "between": lambda line: line.replace(" ", "{}", 1), "alone": lambda line: "{}\n" + line}


def _written(table: Table, folder: Path, text: str) -> Path:
    folder.mkdir()
    table.prepare(folder)
    (folder / table.name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


def _with(table: Table, char: str, place: str) -> tuple[str, int]:
    """The text with the character in its last line, and the number of the line that has it."""
    every = table.text.rstrip("\n").split("\n")
    number = table.line % len(every)
    last = every[number]
    if table.name.endswith(".jsonl"):
        # inside a string that becomes a name or words
        string = "NO NO" if "NO NO" in last else "r2"
        last = last.replace(string, PLACES[place](string).replace("{}", json.dumps(char)[1:-1]).replace("\n", "\\n"))
    else:
        last = PLACES[place](last).replace("{}", char)
    return "\n".join([*every[:number], last, *every[number + 1:], ""]), number + 1


def _outcome(table: Table, folder: Path) -> object:
    try:
        return table.read(folder)
    except DataError as error:
        return str(error)


@pytest.mark.entry("Sp3", "have a no-break space, a line separator or another odd character in a table or dictionary", "error",
                   "`DataError` with file, line, code point and name; only blanks and tabs separate words")
@pytest.mark.parametrize("table", REGISTRY, ids=NAMES)
def test_an_odd_character_is_an_error_with_its_line_and_name(table: Table, tmp_path: Path) -> None:
    for number, (char, place) in enumerate(itertools.product("\u00a0\u2028\x85\u200b", PLACES)):
        _check_odd(table, tmp_path / str(number), char, place)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("table", REGISTRY, ids=NAMES)
def test_every_odd_character_is_an_error_at_every_place(table: Table, place: str, tmp_path: Path) -> None:
    for number, char in enumerate(ODD):
        _check_odd(table, tmp_path / str(number), char, place)


def _check_odd(table: Table, folder: Path, char: str, place: str) -> None:
    text, number = _with(table, char, place)
    if text == table.text:
        # a line of one word
        return
    found = _outcome(table, _written(table, folder, text))
    assert isinstance(found, str), (table.name, char, place, found)
    assert f"{table.name}:{number}" in found
    assert f"U+{ord(char):04X}" in found
    assert unicodedata.name(char, "") in found
    assert "\n" not in found
    shutil.rmtree(folder)


def _shown(found: object) -> str:
    """As text, without separators and numbers of lines."""
    return re.sub(r"(?:\\t|\\n|\s)+", " ", re.sub(r"where='[^']*'", "", str(found)))


@pytest.mark.entry("Sp4", "have a byte order mark, CRLF or gzip in a table, dictionary, manifest or language model", "works",
                   "the text is the same as without")
@pytest.mark.parametrize("table", REGISTRY, ids=NAMES)
def test_marks_line_ends_tabs_and_compression_change_nothing(table: Table, tmp_path: Path) -> None:
    plain = table.read(_written(table, tmp_path / "plain", table.text))
    for name, content in {
        "bom": codecs.BOM_UTF8 + table.text.encode(), "crlf": table.text.replace("\n", "\r\n").encode(),
        "both": codecs.BOM_UTF8 + table.text.replace("\n", "\r\n").encode(), "no end": table.text.rstrip("\n").encode(),
        "blank lines": table.text.replace("\n", " \n\n\t\n").encode(), "gzip": gzip.compress(table.text.encode()),
        "tabs": re.sub(" +", "\t", table.text).encode(), "blanks": table.text.replace(" ", "   ").encode(),
    }.items():
        if not (table.name.endswith(".jsonl") and name in ("tabs", "blanks")):
            (_written(table, tmp_path / name, "") / table.name).write_bytes(content)
            assert _shown(table.read(tmp_path / name)) == _shown(plain), name


@pytest.mark.entry("Sp4")
@pytest.mark.parametrize("table", REGISTRY, ids=NAMES)
def test_text_of_another_encoding_is_one_error_with_its_line(table: Table, tmp_path: Path) -> None:
    for name, content in {"latin 1": b"\xe9t\xe9\n" + table.text.encode(), "utf-16": table.text.encode("utf-16"),
                          "old mac": table.text.replace("\n", "\r").encode(),
                          "second mark": table.text.replace("\n", "\n\ufeff").encode(),
    }.items():
        if table.name.endswith(".jsonl") and name in ("old mac", "second mark"):
            continue
        (_written(table, tmp_path / name, "") / table.name).write_bytes(content)
        found = _outcome(table, tmp_path / name)
        assert isinstance(found, str), (name, found)
        file = f"{table.name}:"
        assert file in found


def test_joiners_between_letters_that_need_them_are_part_of_a_word(tmp_path: Path) -> None:
    (tmp_path / "lexicon").write_text(f"{PERSIAN} M I\n{MALAYALAM} K\n", encoding="utf-8")
    assert list(lexicon.read(tmp_path / "lexicon", 1).lexicon) == [PERSIAN, MALAYALAM]


@pytest.mark.parametrize("text", ["1_0", "\u0663", "\uff11", "0x1", "nan", "inf", "1e", "", "1 "])
def test_numbers_are_ascii(text: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        lines.as_float(text)
    with pytest.raises(ValueError, match="integer"):
        lines.as_int(text)


def test_there_is_one_reader_of_text() -> None:
    """Other calls that split text into lines are for output of programs and files of ngsgd."""
    allowed = {"kaldi_io/lines.py": (), "corpora/an4.py": ("read_text", "splitlines"),
               "corpora/fsdd.py": ("read_text",),
               "decode/decoding.py": ("splitlines",), "decode/words.py": ("splitlines",),
               "lang/arpa.py": ("read_text", "splitlines"), "align/tree_building.py": ("read_regular_text",),
               "corpora/cache.py": ("read_regular_text",)}
    for path in sorted((ROOT / "ngsgd/asr").rglob("*.py")):
        used = {word for word in ("read_text", "splitlines", "read_regular_text") if f"{word}(" in path.read_text()}
        assert used <= set(allowed.get(path.relative_to(ROOT / "ngsgd/asr").as_posix(), ())), path


def test_a_table_is_in_the_registry_for_every_call_of_the_reader() -> None:
    """A new table is tried above, too; the numbers are of calls in each module."""
    call = re.compile(r"\blines\.(?:read|numbered)\(|\btables\.Table\(")
    calls = {path.relative_to(ROOT / "ngsgd").as_posix(): len(call.findall(path.read_text()))
             for path in sorted((ROOT / "ngsgd").rglob("*.py"))}
    assert {name: count for name, count in calls.items() if count} == {
        "asr/corpora/alignments.py": 2, "asr/corpora/an4.py": 2, "asr/corpora/corpus.py": 1, "asr/corpora/data_dir.py": 7,
        "asr/corpora/kaldi_dirs.py": 1, "asr/corpora/manifests.py": 1, "asr/decode/scoring.py": 1,
        "asr/kaldi_io/tables.py": 2, "asr/lang/arpa.py": 1,
        "asr/lang/grammar.py": 1, "asr/lang/hotwords.py": 1, "asr/lang/lexicon.py": 1, "asr/lang/vocabulary.py": 1}


def test_the_table_of_numbers_has_arrays(tmp_path: Path) -> None:
    (tmp_path / "ali").write_bytes(b"\xef\xbb\xbfu1 0 1\r\n")
    assert np.array_equal(alignments.read(tmp_path / "ali").pdf_T["u1"], [0, 1])
