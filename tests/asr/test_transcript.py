"""Text, JSON, CTM and captions of a transcript."""

from __future__ import annotations

import json

from ngsgd.asr.decode.words import Hypothesis, Word
from ngsgd.asr.transcript import Segment, Transcript, as_ctm, as_json, as_srt, as_text

FIRST = Hypothesis((Word("one", 0.5, 0.8, 0.9), Word("two", 3599.96, 3600.5, 0.25)), -3.0,
                   is_complete=True)
SECOND = Hypothesis((Word("won", 0.5, 0.8, 0.1),), -2.0, is_complete=True)
SILENT = Hypothesis((), float("inf"), is_complete=False)
MONO = Transcript((Segment(1, 0.0, 3601.0, (FIRST,)), Segment(1, 3601.0, 3602.0, (SILENT,))),
                  3602.0, 8000, 1)
STEREO = Transcript((Segment(1, 0.0, 1.0, (FIRST,)), Segment(2, 0.0, 1.0, (SECOND,))), 1.0, 8000, 2)


def test_text_is_a_line_for_each_segment_with_words() -> None:
    assert as_text(MONO) == "one two\n"
    assert as_text(MONO, "a.wav") == "a.wav: one two\n"
    assert as_text(STEREO, "a.wav").splitlines() == ["a.wav [1]: one two", "a.wav [2]: won"]
    both = Transcript((Segment(1, 0.0, 1.0, (FIRST, SECOND)),), 1.0, 8000, 1)
    assert as_text(both).splitlines() == ["1 one two", "2 won"]
    assert MONO.text == "one two" and STEREO.text.splitlines() == ["one two", "won"]
    assert STEREO.channel(2).text == "won"


def test_json_is_one_line_that_any_parser_reads() -> None:
    line = as_json(MONO, "a.wav")
    assert line.count("\n") == 1 and "Infinity" not in line
    tree = json.loads(line)
    assert tree["audio"] == "a.wav" and tree["text"] == "one two"
    words = tree["segments"][0]["hypotheses"][0]["words"]
    assert words[0] == {"word": "one", "start_s": 0.5, "end_s": 0.8, "confidence": 0.9}


def test_ctm_has_name_channel_start_duration_word_and_confidence() -> None:
    assert as_ctm(STEREO, "my file").splitlines() == [
        "my_file 1 0.50 0.30 one 0.900", "my_file 1 3599.96 0.54 two 0.250",
        "my_file 2 0.50 0.30 won 0.100"]


def test_captions_end_at_pauses_and_count_hours() -> None:
    times = ("00:00:00,500 --> 00:00:00,800", "00:59:59,960 --> 01:00:00,500")
    assert as_srt(MONO) == f"1\n{times[0]}\none\n\n2\n{times[1]}\ntwo\n\n"
    assert "[2] won" in as_srt(STEREO)
