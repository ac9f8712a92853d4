"""Synthesis of one shard with espeak-ng, in a separate process that imports nothing of ngsgd.

stdin: JSON {"seed", "utterances": [{"text", "voice", "rate", "pitch", "range", "word_gap"}]}.
stdout: a line of JSON {"sample_rate", "utterances": [{"num_samples", "events"}]}, then all samples
as int16. An event is [kind, sample, name], kind "word" or "phoneme" (names of pauses: _...).

The state of espeak-ng persists over calls, so an utterance depends on the previous ones: one
process per shard is bitwise repeatable. The GPL-3 library is loaded only here.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

# from speak_lib.h of espeak-ng
AUDIO_OUTPUT_RETRIEVAL = 1
INITIALIZE_PHONEME_EVENTS = 0x0001
INITIALIZE_DONT_EXIT = 0x8000
EVENT_LIST_END, EVENT_WORD, EVENT_PHONEME = 0, 1, 7
PARAMETERS = {"rate": 1, "pitch": 3, "range": 4, "word_gap": 7}
POS_CHARACTER, CHARS_UTF8 = 1, 1


class _EventId(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class Event(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("unique_identifier", ctypes.c_uint),
                ("text_position", ctypes.c_int), ("length", ctypes.c_int),
                ("audio_position", ctypes.c_int), ("sample", ctypes.c_int),
                ("user_data", ctypes.c_void_p), ("id", _EventId))


SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Event))


class _Synthesizer:
    """The library, initialized once for the life of the process."""

    def __init__(self, seed: int) -> None:
        import espeakng_loader
        self.espeak = ctypes.CDLL(str(espeakng_loader.get_library_path()))
        folder = str(espeakng_loader.get_data_path()).encode()
        flags = INITIALIZE_PHONEME_EVENTS | INITIALIZE_DONT_EXIT
        self.sample_rate = self.espeak.espeak_Initialize(AUDIO_OUTPUT_RETRIEVAL, 0, folder, flags)
        if self.sample_rate <= 0:
            raise RuntimeError(f"espeak-ng could not be initialized with the data in {folder.decode()}")
        self.samples = bytearray()
        self.events: list[tuple[str, int, str]] = []
        # kept: ctypes would free it while the library still refers to it
        self._callback = SynthCallback(self._receive)
        self.espeak.espeak_SetSynthCallback(self._callback)
        self.espeak.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        # parts of the library use rand() of libc instead
        ctypes.CDLL(None).srand(ctypes.c_uint(seed))

    def speak(self, utterance: dict[str, Any]) -> tuple[bytes, list[tuple[str, int, str]]]:
        self.samples.clear()
        self.events.clear()
        self._check(self.espeak.espeak_SetVoiceByName(utterance["voice"].encode()), f"voice {utterance['voice']!r}")
        for name, number in PARAMETERS.items():
            self._check(self.espeak.espeak_SetParameter(number, utterance[name], 0), f"{name}={utterance[name]}")
        text = utterance["text"].encode()
        self._check(self.espeak.espeak_Synth(text, len(text) + 1, 0, POS_CHARACTER, 0, CHARS_UTF8, None, None), "the text")
        self._check(self.espeak.espeak_Synchronize(), "synchronising")
        return bytes(self.samples), list(self.events)

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise RuntimeError(f"espeak-ng rejected {what} (status {status})")

    def _receive(self, samples: int | None, num_samples: int, events: Any) -> int:
        if samples and num_samples > 0:
            self.samples += ctypes.string_at(samples, 2 * num_samples)
        index = 0
        while events[index].type != EVENT_LIST_END:
            event = events[index]
            if event.type == EVENT_WORD:
                self.events.append(("word", event.sample, ""))
            elif event.type == EVENT_PHONEME:
                # eight bytes without a guaranteed terminator
                raw = ctypes.string_at(ctypes.addressof(event.id), 8).split(b"\0")[0]
                self.events.append(("phoneme", event.sample, raw.decode("utf-8", errors="replace")))
            index += 1
        return 0  # continue speaking


def main() -> None:
    plan = json.load(sys.stdin)
    synthesiser = _Synthesizer(plan["seed"])
    spoken = [synthesiser.speak(utterance) for utterance in plan["utterances"]]
    described = [{"num_samples": len(samples) // 2, "events": events} for samples, events in spoken]
    header = {"sample_rate": synthesiser.sample_rate, "utterances": described}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for samples, _ in spoken:
        sys.stdout.buffer.write(samples)


if __name__ == "__main__":
    main()
