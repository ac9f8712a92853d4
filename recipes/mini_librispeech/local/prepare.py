"""Make data directories of mini_librispeech (openslr.org/31) for
`ngsgd train recipe=mini_librispeech`.

    python recipes/mini_librispeech/local/prepare.py DOWNLOADED OUTPUT

DOWNLOADED contains LibriSpeech/train-clean-5 and LibriSpeech/dev-clean-2, unpacked, and from
openslr.org/11 librispeech-lexicon.txt and 3-gram.pruned.3e-7.arpa.gz.  OUTPUT gets train/ and test/
(wav.scp, text, utt2spk), lexicon.txt and lm.arpa.  Each part is a stage; finished stages are
skipped.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

SETS = {"train": "train-clean-5", "test": "dev-clean-2"}
LEXICON, MODEL = "librispeech-lexicon.txt", "3-gram.pruned.3e-7.arpa.gz"
UNKNOWN = "<UNK> SPN\n"  # noise: a separate phone


def stage(final: Path, make: Callable[[Path], None]) -> None:
    """Make `final` under another name and rename it, unless it exists."""
    if final.exists():
        print(f"{final} is there already")
        return
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        make(temporary)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)
        raise
    print(f"{final} made")


def write_set(downloaded: Path, folder: Path) -> None:
    """text, utt2spk and wav.scp of one part of LibriSpeech; a speaker is a reader and a chapter, as
    in Kaldi's recipe.
    """
    tables: dict[str, list[str]] = {"text": [], "utt2spk": [], "wav.scp": []}
    for transcript in sorted(downloaded.glob("*/*/*.trans.txt")):
        for line in transcript.read_text(encoding="utf-8").splitlines():
            utt_id, _, words = line.partition(" ")
            audio = transcript.with_name(f"{utt_id}.flac")
            if not audio.is_file():
                raise SystemExit(f"{transcript} names {utt_id}, and {audio} does not exist; unpack the archive again.")
            tables["text"].append(f"{utt_id} {words}")
            tables["utt2spk"].append(f"{utt_id} {utt_id.rpartition('-')[0]}")
            tables["wav.scp"].append(f"{utt_id} {audio.resolve()}")
    if not tables["text"]:
        raise SystemExit(f"{downloaded} holds no transcript (*/*/*.trans.txt); unpack the archives of openslr.org/31 there.")
    folder.mkdir(parents=True)
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


def write_lexicon(source: Path, path: Path) -> None:
    """Remove stress marks from vowels: 39 phones, because there is little speech."""
    lines = dict.fromkeys(_without_stress(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip())
    path.write_text("\n".join(lines) + "\n" + UNKNOWN, encoding="utf-8")


def _without_stress(line: str) -> str:
    word, *phones = line.split()
    return " ".join([word, *(phone.rstrip("012") for phone in phones)])


def write_model(source: Path, path: Path) -> None:
    """The n-gram model, unpacked."""
    with gzip.open(source, "rb") as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    downloaded, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    for name, part in SETS.items():
        stage(output / name, lambda path, part=part: write_set(downloaded / "LibriSpeech" / part, path))  # type: ignore[misc]
    stage(output / "lexicon.txt", lambda path: write_lexicon(downloaded / LEXICON, path))
    stage(output / "lm.arpa", lambda path: write_model(downloaded / MODEL, path))


if __name__ == "__main__":
    main()
