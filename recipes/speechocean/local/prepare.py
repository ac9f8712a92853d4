"""Make data directories of speechocean762 (openslr.org/101) for `ngsgd train recipe=speechocean`.

    python recipes/speechocean/local/prepare.py CORPUS OUTPUT

CORPUS is the unpacked corpus (train/, test/, WAVE/, resource/lexicon.txt), or a folder with train/,
test/ and lexicon.txt whose wav.scp names files relative to it or to the tables.  OUTPUT gets
train/, valid/ and test/ (wav.scp, text, utt2spk, spk2gender, spk2age) and lexicon.txt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

# training speakers of the validation set, as in RESULTS.md; 8 of them are children
HELD_OUT = frozenset(["0005", "0054", "0103", "0594", "1012", "1042", "1064", "1309", "1418", "1447", "3208", "6912", "9624"])
BY_UTTERANCE, BY_SPEAKER = ("text", "utt2spk", "wav.scp"), ("spk2gender", "spk2age")


def read(path: Path) -> dict[str, str]:
    """Return the lines of a table by their first field."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; give the folder of speechocean762 with train, test and the audio.")
    return {key: rest.strip() for key, _, rest in (line.replace("\t", " ", 1).partition(" ")
                                                   for line in path.read_text(encoding="utf-8").splitlines() if line.strip())}


def audio_of(name: str, corpus: Path, tables: Path) -> str:
    """Return the absolute name of an audio file."""
    for folder in (corpus, tables):
        if (folder / name).is_file():
            return str((folder / name).resolve())
    raise SystemExit(f"{tables / 'wav.scp'} names {name}, which is in neither {corpus} nor {tables}; unpack the corpus again.")


def write(folder: Path, tables: dict[str, dict[str, str]], speakers: Iterable[str]) -> None:
    """Write the rows of some speakers."""
    chosen = frozenset(speakers)
    utterances = {utt_id for utt_id, speaker in tables["utt2spk"].items() if speaker in chosen}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        kept = utterances if name in BY_UTTERANCE else chosen
        lines = [f"{key} {value}\n" for key, value in sorted(rows.items()) if key in kept]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def write_lexicon(source: Path, path: Path) -> None:
    """Remove stress marks from vowels: 39 phones, because there is little speech."""
    entries = (line.split() for line in source.read_text(encoding="utf-8").splitlines() if line.strip())
    lines = dict.fromkeys(" ".join([word, *(phone.rstrip("012") for phone in phones)]) for word, *phones in entries)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    corpus, output = map(Path, sys.argv[1:])
    for name in ("train", "test"):
        tables = {table: read(corpus / name / table) for table in (*BY_UTTERANCE, *BY_SPEAKER)}
        tables["wav.scp"] = {utt_id: audio_of(file, corpus, corpus / name) for utt_id, file in tables["wav.scp"].items()}
        speakers = set(tables["utt2spk"].values())
        if name == "train":
            write(output / "valid", tables, speakers & HELD_OUT)
        write(output / name, tables, speakers - HELD_OUT)
    lexicons = [corpus / "lexicon.txt", corpus / "resource" / "lexicon.txt"]
    write_lexicon(next((path for path in lexicons if path.is_file()), lexicons[0]), output / "lexicon.txt")
    print(f"{output} is ready: ngsgd train recipe=speechocean data.source={output}")


if __name__ == "__main__":
    main()
