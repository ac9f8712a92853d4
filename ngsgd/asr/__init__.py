"""Speech: corpora, features, HMM topology, decoding, scoring and recognition.

This package contains no training code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngsgd.asr.aligner import Aligner
    from ngsgd.asr.bundle import Bundle
    from ngsgd.asr.recognizer import Recognizer
    from ngsgd.asr.transcript import Alignment, Partial, Segment, Transcript

_HOME_OF = {"Aligner": "aligner", "Alignment": "transcript", "Bundle": "bundle", "Partial": "transcript",
            "Recognizer": "recognizer", "Segment": "transcript", "Transcript": "transcript"}

__all__ = ["Aligner", "Alignment", "Bundle", "Partial", "Recognizer", "Segment", "Transcript"]


def __getattr__(name: str) -> Any:
    # lazy, so that the packages of the extra `asr` are needed only by functions that use them
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ngsgd.asr' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ngsgd.asr.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
