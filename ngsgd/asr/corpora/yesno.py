"""yesno of Kaldi: 60 recordings of one speaker, eight Hebrew words "yes" or "no" each.

The words are in the file name. The first 30 names are the training set, the others the test set, as
usual. It is a smoke test that every system passes without errors.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from ngsgd.asr import speech_set
from ngsgd.asr.corpora.copies import hold_out
from ngsgd.asr.corpora.fsdd import source
from ngsgd.asr.features import augment
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import Utterance, num_frames, unaligned
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError

# index: digit in the file name
WORDS = ("NO", "YES")
LEXICON = {"NO": (("N",),), "YES": (("Y",),)}
SPEAKER = "yesno"
_NAME = re.compile(r"[01](_[01]){7}\.wav")
ARCHIVES = ("waves_yesno.tar.gz", "waves_yesno.tar.xz")
WHERE = ("get waves_yesno.tar.gz from openslr.org/1 and set data.source=PATH to it, or to the folder "
         "of its wav files")


def locate(source: str) -> Path:
    """Return the folder of wav files, or the archive, given by data.source."""
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise DataError(f"data.source is {source or 'empty'}, but recipe=yesno needs the "
                        f"recordings; {WHERE}.")
    candidates = [path] if path.is_file() else [path / "waves_yesno", path, *(path / name for name in ARCHIVES)]
    for candidate in candidates:
        if candidate.is_file() or next(candidate.glob("*.wav"), None):
            return candidate
    raise DataError(f"data.source is {source}, which contains neither wav files nor "
                    f"{' nor '.join(ARCHIVES)}; {WHERE}.")


def make(data: DataConfig, feature_config: FeatureConfig, changes: AugmentConfig) -> tuple[dict[str, SpeechSet], Language]:
    """Return train, valid and test without alignment, and the language."""
    place = locate(data.source)
    content_of = {PurePosixPath(name): content for name, content in source.wav_files(place)
                  if _NAME.fullmatch(PurePosixPath(name).name)}
    if len(content_of) < 4:
        raise DataError(f"{data.source} contains only {len(content_of)} recordings with names such "
                        f"as 0_1_0_1_1_0_0_1.wav; {WHERE}.")
    utterances = []
    for name in sorted(content_of):
        samples = source.decoded(f"{place}: {name}", content_of[name])
        words = tuple(WORDS[int(digit)] for digit in name.stem.split("_"))
        utterances.append(Utterance(name.stem, SPEAKER, words, samples,
                                    unaligned(num_frames(len(samples)))))
    half = len(utterances) // 2
    train, valid = hold_out(utterances[:half], share=data.valid_fraction)
    sets = {"train": train, "valid": valid, "test": utterances[half:]}
    topology = Topology(("N", "Y"), dict(LEXICON), data.num_silence_states)
    return {name: speech_set.build(augment.for_set(name, said, changes), feature_config)
            for name, said in sets.items()}, Language(topology)


def fingerprint(data: DataConfig) -> dict[str, Any]:
    """Identify the recordings by name, size and time."""
    place = locate(data.source)
    status = [(path.name, path.stat().st_size, path.stat().st_mtime_ns)
              for path in (sorted(place.glob("*.wav")) if place.is_dir() else [place])]
    return {"files": status}
