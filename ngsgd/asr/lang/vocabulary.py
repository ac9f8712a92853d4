"""Other words for a trained model, in its phones: lexicons, word lists, language models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import arpa, grammar, hotwords, lexicon
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PHONE, Pronunciation, Topology
from ngsgd.errors import ConfigError, DataError, warn
from ngsgd.interface import option

MAX_SCALE, MAX_PENALTY = 100.0, 1000.0  # decoding weights far beyond all useful values
_NUM_SHOWN = 10


@dataclass(frozen=True)
class Vocabulary:
    """Files that replace the words of a model: a word on each line, an n-gram model, phrases."""

    lexicon: Path | None = None
    words: Path | None = None
    arpa: Path | None = None
    grammar: Path | None = None
    hotwords: Path | None = None


@dataclass(frozen=True)
class UnknownWords:
    """Words of the references that the decoder cannot recognize."""

    num_words: int
    num_unknown: int
    most_frequent: tuple[tuple[str, int], ...]  # the most frequent first


def of_model(language: Language, vocabulary: Vocabulary, report: Callable[[str], None] = warn) -> Language:
    """Return the language of a model for decoding with these replacements.

    `report` receives lines about unused probabilities and missing words (default: a warning).
    Raises ConfigError if a grammar and a language model, DataError if the model lacks a phone, a
    word lacks a pronunciation, states are tied, or the language model has none of the words.
    """
    if vocabulary == Vocabulary():
        return language
    if vocabulary.grammar and vocabulary.arpa:
        raise ConfigError("a grammar replaces the language model; use either a grammar or language models.")
    topology = language.topology
    if not language.tree and language.num_pdfs != topology.num_pdfs:
        raise DataError(f"the model has {language.num_pdfs} tied HMM states, but a graph of other words "
                        f"requires the {topology.num_pdfs} untied states of phones; train without "
                        "data.graph to change words at decoding time.")
    if vocabulary.lexicon:
        topology = replace(topology, lexicon=pronunciations(topology, vocabulary.lexicon, report))
    # a list of words keeps the grammar of the model; a new language model replaces it
    own = None if vocabulary.arpa else language.grammar
    rules = grammar.read(vocabulary.grammar) if vocabulary.grammar else own
    wanted = rules.words() if rules else ()
    if vocabulary.words:
        listed = list(lines.read(vocabulary.words))
        for where, line in listed:
            if len(line.split()) != 1:
                raise DataError(f"{where}: {line[:40]!r} is not one word; write one word per line.")
        if not listed:
            raise DataError(f"{vocabulary.words} contains no words; write one per line.")
        wanted = tuple(dict.fromkeys(line for _, line in listed))
    if wanted:
        source = vocabulary.words or vocabulary.grammar or "the grammar of the model"
        _require_pronunciations(wanted, topology.lexicon, f"{source}")
        topology = replace(topology, lexicon={word: topology.lexicon[word] for word in wanted})
    if rules and vocabulary.words:
        _require_pronunciations(rules.words(), topology.lexicon, f"{rules.path}")
    preferred = hotwords.read(vocabulary.hotwords) if vocabulary.hotwords else language.hotwords
    phrases = preferred.words() if preferred else ()
    _require_pronunciations(phrases, topology.lexicon, f"{vocabulary.hotwords or hotwords.HOTWORDS}")
    if rules and (outside := sorted({*phrases} - {*rules.words()})):
        raise DataError(f"the grammar {rules.path} has no {lexicon.listed(outside)} of the hotwords; add them to it.")
    # Words of the language model that are not in the lexicon are omitted. It gets the hotwords that
    # it lacks.
    others = [word for word in topology.words if word not in phrases] or topology.words
    text = arpa.read(vocabulary.arpa, others, report) if vocabulary.arpa else language.arpa
    if text and not (vocabulary.arpa or rules):
        lexicon.require_shared(others, arpa.words(text), "the language model of the model", report)
    text = arpa.with_words(text, phrases) if text and phrases and not rules else text
    one_word = language.is_one_word and not text
    return Language(topology, text, one_word, tree=language.tree, word_counts=language.word_counts, grammar=rules,
                    hotwords=preferred)


def pronunciations(topology: Topology, path: Path, report: Callable[[str], None] = warn) -> dict[str, tuple[Pronunciation, ...]]:
    """Read a lexicon in the phones of `topology`; DataError if it has others, or is damaged."""
    read = lexicon.read(path, topology.num_silence_states, report)
    known = (*topology.phones, SILENCE_PHONE)
    if missing := [phone for phone in read.phones if phone not in known]:
        raise DataError(f"the lexicon {path} uses phones that the model does not have: "
                        f"{lexicon.listed(missing)}; use only {' '.join(topology.phones)}.")
    return read.lexicon


def weight_problems(scale: Any, penalty: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, message) for a scale or a penalty out of range; None is valid."""
    for name, value, low, limit in (("scale", scale, 0.0, MAX_SCALE), ("penalty", penalty, -MAX_PENALTY, MAX_PENALTY)):
        # also false for NaN
        is_valid = isinstance(value, (int, float)) and low <= value <= limit and (value or name == "penalty")
        if value is not None and not is_valid:
            bounds = "above 0 and at most" if name == "scale" else f"from {low:g} to"
            yield name, f"is {value}; give a number {bounds} {limit:g}."


def unknown_words(texts: Iterable[Sequence[str]], language: Language) -> UnknownWords:
    """Return the words of the references that the lexicon (or the graph of the data) lacks."""
    known = set(language.given.words if language.given else language.topology.words)
    counts = Counter(word for words in texts for word in words)
    unknown = Counter({word: count for word, count in counts.items() if word not in known})
    order = sorted(unknown.items(), key=lambda one: (-one[1], one[0]))
    return UnknownWords(counts.total(), unknown.total(), tuple(order[:_NUM_SHOWN]))


def _require_pronunciations(words: Sequence[str], known: Collection[str], source: str) -> None:
    if missing := sorted(set(words) - set(known)):
        raise DataError(f"{source} has words without a pronunciation: {lexicon.listed(missing)}"
                        f"{lexicon.alike(missing[0], known)}; add them to a lexicon ({option('lexicon', 'FILE')}).")
