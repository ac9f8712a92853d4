"""Pack the public cepstra of AN4 for `ngsgd train recipe=an4`.

    python recipes/an4/local/prepare.py DOWNLOADED OUTPUT

DOWNLOADED is the folder an4/ of a clone of github.com/cphazen/Machine-Learning-Project-ASR, CMU's
distribution of features: etc/ with transcripts, dictionary and unigrams, and feat/ with Sphinx
cepstra.  OUTPUT is a new folder with Kaldi's tables and archives.  Every file must have the SHA-256
of ngsgd/asr/corpora/an4.sha256.

The labels and the graph of a GMM (ali_*.npz, ali.json, HCLG.fst) are not public.  Without them,
train with data.alignment=flat decode.graph=made, or recipe=an4_triphones data.alignment=flat.
"""

from __future__ import annotations

import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np

from ngsgd.asr.corpora import an4
from ngsgd.files import new_directory, sha256

# name of a set -> its folder of cepstra
SETS = {"train": "an4_clstk", "test": "an4test_clstk"}
NUM_CEPSTRA = 13
# the transcripts of test have no <s> and </s>
_LINE = re.compile(r"(?:<s>\s)?\s*(.*?)\s*(?:</s>)?\s*\((([^-]+)-([^-]+)-([^-]+))\)")


def write_set(downloaded: Path, folder: Path, name: str) -> None:
    """Write features and tables of a set; utterances are named as in Kaldi's egs/an4."""
    transcripts = downloaded / "etc" / f"an4_{name}.transcription"
    tables: dict[str, list[str]] = {table: [] for table in ("text", "utt2spk", "utt2num_frames", "feats")}
    position = 0
    with (folder / f"feats_{name}.ark").open("wb") as archive:
        for line in transcripts.read_text(encoding="utf-8").splitlines():
            found = _LINE.fullmatch(line.strip())
            if not found:
                raise SystemExit(f"{transcripts} has the line {line[:60]!r}, not WORDS (NAME); download it again.")
            words, stem, prefix, speaker, suffix = found.groups()
            utt_id = f"{speaker}-{prefix}-{suffix}"
            cepstra_TD = read_cepstra(downloaded / "feat" / SETS[name] / speaker / f"{stem}.mfc")
            # Kaldi's binary matrix of floats: a mark, the sizes with their widths, the values
            head = f"{utt_id} ".encode()
            content = b"\0BFM " + struct.pack("<bibi", 4, len(cepstra_TD), 4, NUM_CEPSTRA) + cepstra_TD.astype("<f4").tobytes()
            archive.write(head + content)
            values = {"text": words, "utt2spk": speaker, "utt2num_frames": str(len(cepstra_TD)),
                      "feats": f"feats_{name}.ark:{position + len(head)}"}
            for table, value in values.items():
                tables[table].append(f"{utt_id} {value}\n")
            position += len(head) + len(content)
    for table, lines in tables.items():
        path = folder / (f"feats_{name}.scp" if table == "feats" else f"{table}_{name}")
        path.write_text("".join(lines), encoding="utf-8")


def read_cepstra(path: Path) -> np.ndarray:
    """Read a file of Sphinx: the number of values, then 13 for each frame, big-endian."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; DOWNLOADED must be the folder with etc/ and feat/.")
    content = path.read_bytes()
    values = np.frombuffer(content[4:], ">f4")
    if len(content) % 4 or int.from_bytes(content[:4], "big") != len(values) or len(values) % NUM_CEPSTRA:
        raise SystemExit(f"{path} is not a complete file of big-endian cepstra; download it again.")
    return values.reshape(-1, NUM_CEPSTRA)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    downloaded, output = map(Path, sys.argv[1:])
    if output.exists():
        raise SystemExit(f"{output} exists; name a new folder.")
    if not (downloaded / "etc").is_dir():
        raise SystemExit(f"{downloaded} has no folder etc/; DOWNLOADED must be the folder with etc/ and feat/.")
    with new_directory(output) as folder:
        for name in SETS:
            write_set(downloaded, folder, name)
        for name in ("an4.dic", "an4.ug.lm"):
            shutil.copyfile(downloaded / "etc" / name, folder / name)
        for name, expected in an4.released_checksums().items():
            if (folder / name).exists() and sha256(folder / name) != expected:
                raise SystemExit(f"{name} differs from the supported release; use the folder an4/ at commit 5e478f0e.")
    print(f"ngsgd train recipe=an4 data.source={output} data.alignment=flat decode.graph=made")


if __name__ == "__main__":
    main()
