"""Every parser of text from outside reads long texts in linear time, or ends with a typed error.

A pattern or loop that starts again at each character takes hours for these texts. A test counts
executed lines, and stops long searches of the regular expressions by their CPU time.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("obstore")

import obstore

from ngsgd import files
from ngsgd.asr import bundle
from ngsgd.asr.decode.scoring import read_per_utterance
from ngsgd.asr.kaldi_io import lines, tables
from ngsgd.asr.lang import grammar, lexicon, ngram
from ngsgd.cluster.fingerprint import FingerprintFile
from ngsgd.errors import NgsgdError
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.why import facts
from ngsgd.masking import masked, printable
from ngsgd.models.nnet3 import raw_models, structure
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.folder import read_manifest
from ngsgd.object_storage.lease import HEAD, read_head
from ngsgd.object_storage.urls import check_url
from ngsgd.runs.config_file import read_config
from ngsgd.runs.failure_record import read_record
from ngsgd.training.sites.contribution import from_bytes
from ngsgd.training.storage import audit
from ngsgd.training.storage.event_log import EventLog, newest_events, read_events
from tests.tiers import HANGS_S
from tests.training.sites.world import LAYOUT

MILLION = 1_000_000
# reads a file that holds the text
OF_FILES: dict[str, Callable[[Path], object]] = {
    "config.yaml": read_config,
    "tuned.yaml": lambda path: compose.compose([f"tuned={path}"]),
    "ledger.jsonl": audit.audit,
    "events.jsonl": lambda path: (read_events(path), list(newest_events(path)), facts.lines_of(path)),
    "events.jsonl, resumed": lambda path: EventLog(path, after=3).close("KILLED"),
    "state of a run": lambda path: state_of(path.parent),
    "error.json": read_record,
    "fingerprint.json": lambda path: FingerprintFile(path).newest(),
    "tracking.json": lambda path: read_tracking(path.parent),
    "bundle": bundle.read_index,
    "last lines": lambda path: files.last_lines(path, 50),
    "lexicon": lambda path: lexicon.read(path, 3),
    "grammar": grammar.read,
    "Kaldi table": lambda path: list(lines.read(path)),
    "alignments": tables.read_int_vectors}
OF_TEXTS: dict[str, Callable[[str], object]] = {
    "masked": masked, "printable": printable, "JSON": files.parse_json, "JSON lines": files.parse_json_lines,
    "ARPA": ngram.parse, "ARPA, 1-grams": lambda text: ngram.parse(ARPA + text),
    "errors of utterances": read_per_utterance, "URL": check_url,
    "nnet3 line": lambda text: structure._chain(f"component-node {text}"),
    "nnet3 descriptor": structure._spliced, "nnet3 components": lambda text: list(raw_models._parsed(text, 0)),
    "contribution": lambda text: from_bytes(text.encode(), LAYOUT),
    "contribution, header": lambda text: from_bytes(len(text).to_bytes(8, "little") + text.encode(), LAYOUT),
    "head.json": lambda text: read_head(_store(HEAD, text)),
    "manifest": lambda text: read_manifest(_store("manifests/1", text), "manifests/1", "")}
ARPA = "\\data\\\nngram 1=3\n\n\\1-grams:\n"
# repeated to the wanted length
PARTS = ["a", " ", "a ", "\n", "a\n", "0", "1:", "-", "=", "a=", "a,", ",", ":", "[", "[ ", "{",
         '{"a":', "(", "(1", "<", "<a> [", "/*", "/* ", "//", "://", "a://b@", "\\", '"', "'",
         "\x1b[", "%WER ", "- ", "? ", "&a ", "*a ", "!", "|", "é", "\t", "a: 1\n", "\\1-grams:\n",
         "<ComponentName> a <b> ", "ReplaceIndex(ivector, t, 0), ", "?token="]


def _store(key: str, text: str) -> ObjectStore:
    store = ObjectStore("s3://tests/run", store=obstore.store.MemoryStore())
    store.put(key, text.encode())
    return store


@contextlib.contextmanager
def ended_if_it_hangs() -> Iterator[None]:
    """Raise in this thread after much CPU time; the search of a regular expression ends, too."""
    def end(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("it takes much longer than linear time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def num_lines(read: Callable[[str], object], text: str) -> int:
    found = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal found
        found += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(NgsgdError, ValueError, OSError):
            read(text)
    finally:
        sys.settrace(before)
    return found


def reader(name: str, folder: Path) -> Callable[[str], object]:
    if name in OF_TEXTS:
        return OF_TEXTS[name]

    def read(text: str) -> object:
        path = folder / name.partition(",")[0].replace("state of a run", "events.jsonl").replace(" ", "-")
        path.write_text(text)
        return OF_FILES[name](path)
    return read


@pytest.mark.entry("At4")
@pytest.mark.parametrize("name", ["config.yaml", *(name for name in {**OF_FILES, **OF_TEXTS} if name != "config.yaml")])
def test_lines_of_a_parser_grow_with_the_text(name: str, tmp_path: Path) -> None:
    read = reader(name, tmp_path)
    for part in ("a", "a ", "a: 1\n", "a,", '{"a":') if name == "config.yaml" else PARTS:
        # the first call fills caches
        counts = [num_lines(read, (part * size)[:size]) for size in (300, 1000, 2000)]
        assert counts[2] < 2.6 * counts[1] + 2000, (part, counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_TEXTS, *OF_FILES])
def test_a_megabyte_is_read_or_refused(name: str, tmp_path: Path) -> None:
    read = reader(name, tmp_path)
    # the test above has all parts; of lines a quarter, since each takes statements of Python
    texts = [part * (MILLION // len(part) // (4 if "\n" in part else 1)) for part in ("a", "a ", "\n", "0", "[", '"', "a: 1\n")]
    texts += [json.dumps({f"key {number}": number for number in range(100_000)}), "[" * 100_000 + "]" * 100_000,
              '{"a":' * 100_000 + "1" + "}" * 100_000, "".join(f"k{number}: 1\n" for number in range(20_000))]
    for text in texts:
        with ended_if_it_hangs(), contextlib.suppress(NgsgdError, ValueError, OSError):
            read(text)
