"""The result of recognizing a recording, and its text, JSON, CTM and SRT formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ngsgd.asr.decode.words import Hypothesis, Word

# a caption ends after this pause, this duration, or this number of words
_CAPTION_PAUSE_S, _CAPTION_S, _CAPTION_WORDS = 0.8, 6.0, 12


@dataclass(frozen=True)
class Partial:
    """Words of a segment that has not ended; they may still change.

    Attributes:
        words: of the best path so far.
        start_s: start of the segment, in seconds from the start of the stream.
        end_s: current end of the stream, in seconds.
    """

    words: tuple[str, ...]
    start_s: float
    end_s: float
    is_final = False

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Segment:
    """A segment of speech and its words.

    Attributes:
        channel: number of the channel, from 1.
        start_s, end_s: seconds from the start of the recording.
        hypotheses: word sequences, best first; times count from the start of the recording.
    """

    channel: int
    start_s: float
    end_s: float
    hypotheses: tuple[Hypothesis, ...]
    is_final = True

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of the best hypothesis."""
        return self.hypotheses[0].words

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(word.word for word in self.words)


@dataclass(frozen=True)
class Transcript:
    """All words of a recording.

    Attributes:
        segments: segments of speech, by channel and time; silence is skipped.
        duration_s: duration of the recording, in seconds.
        sample_rate_hz: sampling rate of the recording, before resampling.
        num_channels: number of channels; each is recognized separately.
    """

    segments: tuple[Segment, ...]
    duration_s: float
    sample_rate_hz: int
    num_channels: int

    @property
    def words(self) -> tuple[Word, ...]:
        """(word, start_s, end_s, confidence) by channel and time."""
        return tuple(word for segment in self.segments for word in segment.words)

    @property
    def text(self) -> str:
        """The words, separated by spaces; one line for each channel with words."""
        lines: dict[int, list[str]] = {}
        for segment in self.segments:
            lines.setdefault(segment.channel, []).extend(word.word for word in segment.words)
        return "\n".join(" ".join(words) for words in lines.values() if words)

    def channel(self, number: int) -> Transcript:
        """The transcript of one channel, counted from 1."""
        found = tuple(segment for segment in self.segments if segment.channel == number)
        return Transcript(found, self.duration_s, self.sample_rate_hz, 1)

    def to_json(self) -> dict[str, Any]:
        """Plain values: all hypotheses of each segment, with word times and confidences."""
        return {"text": self.text, "duration_s": round(self.duration_s, 3),
                "sample_rate_hz": self.sample_rate_hz, "num_channels": self.num_channels,
                "segments": [_segment_json(segment) for segment in self.segments]}


@dataclass(frozen=True)
class Alignment(Transcript):
    """A recording aligned with its text; `words` are the words of the text that were found.

    Attributes:
        phones: phones of the words; the confidence is the goodness of pronunciation, the geometric
            mean of the posterior probability of the phone over its frames.
        not_spoken: words of the text that were not found, at the end of the word before.
        not_in_text: stretches of speech that are not in the text, without a word.
        unknown: words without a pronunciation, aligned with any speech, of confidence 0.
    """

    phones: tuple[Word, ...]
    not_spoken: tuple[Word, ...]
    not_in_text: tuple[Word, ...]
    unknown: tuple[Word, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values: those of a transcript, the phones, and the deviations from the text."""
        parts = {name: [{"word" if name != "phones" else "phone": one.word, **_times(one),
                         "confidence": round(one.confidence, 4)} for one in getattr(self, name)]
                 for name in ("phones", "not_spoken", "not_in_text", "unknown")}
        return {**super().to_json(), **parts}


def as_text(transcript: Transcript, name: str = "") -> str:
    """Format one line per segment with words, prefixed by `name` and, of several, the channel."""
    lines = []
    for segment in transcript.segments:
        label = f"{name} [{segment.channel}]".strip() if transcript.num_channels > 1 else name
        # the best text, followed by the others with their rank
        texts = [" ".join(word.word for word in one.words) for one in segment.hypotheses]
        ranked = texts if len(texts) == 1 else [f"{rank} {text}" for rank, text in enumerate(texts, start=1)]
        lines += [f"{label and f'{label}: '}{text}\n" for text in ranked if any(texts)]
    return "".join(lines)


def as_json(transcript: Transcript, name: str = "") -> str:
    """Format one line of JSON."""
    return json.dumps({"audio": name, **transcript.to_json()}, ensure_ascii=False) + "\n"


def as_ctm(transcript: Transcript, name: str = "") -> str:
    """Format lines "name channel start duration word confidence" of NIST; spaces become _."""
    return _ctm(name, ((segment.channel, word) for segment in transcript.segments for word in segment.words))


def as_srt(transcript: Transcript, name: str = "") -> str:
    """Format SubRip captions; channels are marked if there are several."""
    captions = []
    for segment in transcript.segments:
        mark = f"[{segment.channel}] " if transcript.num_channels > 1 else ""
        for words in _captions(segment.words):
            text = mark + " ".join(word.word for word in words)
            captions.append((words[0].start_s, words[-1].end_s, text))
    return "".join(f"{number}\n{_clock(start_s)} --> {_clock(end_s)}\n{text}\n\n"
                   for number, (start_s, end_s, text) in enumerate(sorted(captions), start=1))


def as_phone_ctm(transcript: Transcript, name: str = "") -> str:
    """Format the phones of an alignment as `as_ctm` does words."""
    phones = transcript.phones if isinstance(transcript, Alignment) else ()
    return _ctm(name, ((1, phone) for phone in phones))


def as_textgrid(transcript: Transcript, name: str = "") -> str:
    """Format the tiers of Praat: words of each channel; of an alignment also phones and deviations.

    Intervals cover the recording; those without a word are empty. `name` is not used.
    """
    several = transcript.num_channels > 1
    tiers = {f"words{f' {number}' if several else ''}": transcript.channel(number).words
             for number in range(1, transcript.num_channels + 1)}
    if isinstance(transcript, Alignment):
        flags = [*(one._replace(word="not in text") for one in transcript.not_in_text),
                 *(one._replace(word="unknown word") for one in transcript.unknown)]
        tiers |= {"phones": transcript.phones, "deviations": tuple(sorted(flags, key=lambda one: one.start_s))}
    end_s = round(transcript.duration_s, 3)
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {end_s}",
             "tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (tier, words) in enumerate(tiers.items(), start=1):
        intervals = list(_intervals(words, end_s))
        lines += [f"item [{number}]:", 'class = "IntervalTier"', f'name = "{tier}"', "xmin = 0",
                  f"xmax = {end_s}", f"intervals: size = {len(intervals)}"]
        for at, (start_s, stop_s, text) in enumerate(intervals, start=1):
            quoted = text.replace('"', '""')
            lines += [f"intervals [{at}]:", f"xmin = {start_s}", f"xmax = {stop_s}", f'text = "{quoted}"']
    return "\n".join([*lines, ""])


FORMATS = {"text": as_text, "json": as_json, "ctm": as_ctm, "srt": as_srt, "textgrid": as_textgrid,
           "phone-ctm": as_phone_ctm}


def _times(part: Word | Segment) -> dict[str, float]:
    return {"start_s": round(part.start_s, 3), "end_s": round(part.end_s, 3)}


def _segment_json(segment: Segment) -> dict[str, Any]:
    hypotheses = [{
        "text": " ".join(word.word for word in one.words), "cost": one.cost if one.words else None,
        "words": [{"word": word.word, **_times(word), "confidence": round(word.confidence, 4)}
                  for word in one.words]} for one in segment.hypotheses]
    return {"channel": segment.channel, **_times(segment), "hypotheses": hypotheses}


def _ctm(name: str, words: Iterable[tuple[int, Word]]) -> str:
    name = "_".join(name.split()) or "-"
    return "".join(ctm_line(name, channel, word) for channel, word in words)


def ctm_line(name: str, channel: int, word: Word) -> str:
    """Format a line of a CTM: times in seconds, and the confidence."""
    return f"{name} {channel} {word.start_s:.2f} {word.end_s - word.start_s:.2f} {word.word} {word.confidence:.3f}\n"


def _intervals(words: Iterable[Word], end_s: float) -> Iterator[tuple[float, float, str]]:
    """Yield intervals of positive length from 0 to `end_s`, rounded to milliseconds."""
    at_s = 0.0
    for word in words:
        # words of neighboring segments may overlap by less than a frame
        start_s, word_end_s = max(at_s, round(word.start_s, 3)), min(end_s, round(word.end_s, 3))
        if word_end_s <= start_s:
            continue
        if start_s > at_s:
            yield at_s, start_s, ""
        yield start_s, word_end_s, word.word
        at_s = word_end_s
    if at_s < end_s:
        yield at_s, end_s, ""


def _captions(words: Iterable[Word]) -> Iterator[list[Word]]:
    caption: list[Word] = []
    for word in words:
        if caption and (word.start_s - caption[-1].end_s > _CAPTION_PAUSE_S
                        or word.end_s - caption[0].start_s > _CAPTION_S
                        or len(caption) == _CAPTION_WORDS):
            yield caption
            caption = []
        caption.append(word)
    if caption:
        yield caption


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02},{rest % 1000:03}"
