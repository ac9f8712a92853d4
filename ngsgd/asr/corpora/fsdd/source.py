"""Location, download and verification of the recordings of the Free Spoken Digit Dataset.

The public archive is pinned by commit. GitHub may repack its bytes, so the content is pinned: the
samples of every recording must have the SHA-256 in the list of the package.
"""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ngsgd.asr import recording, unpacking
from ngsgd.asr.corpora.fsdd.segments import Segment
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Samples
from ngsgd.errors import DataError
from ngsgd.files import read_regular_bytes
from ngsgd.phase import Phase

COMMIT = "26eb9aaf76e81b692f806f9140c2d2777410d7a1"
URL = f"https://github.com/Jakobovski/free-spoken-digit-dataset/archive/{COMMIT}.tar.gz"
DOWNLOAD_TIMEOUT_S = 60.0  # seconds without a byte
# the archive has 16 MB
MAX_DOWNLOAD_BYTES = 1 << 30

ARCHIVES_IN_FOLDER = ("recordings.tar.xz", "recordings.tar.gz", "recordings.zip")


def locate(source: str) -> Path:
    """Return the folder of wav files or the archive given by `data.source`."""
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(f"data.source is {source}, which does not exist; set it to the folder or "
                        "the archive with the FSDD recordings, or leave it empty to download them.")
    if path.is_file():
        return path
    for candidate in (path / "recordings", path):
        if next(candidate.glob("*.wav"), None):
            return candidate
    for name in ARCHIVES_IN_FOLDER:
        if (path / name).is_file():
            return path / name
    raise DataError(f"data.source is {source}, which contains neither wav files, nor a folder "
                    f"recordings, nor one of {', '.join(ARCHIVES_IN_FOLDER)}; set it to the folder "
                    "or the archive with the FSDD recordings.")


def download(folder: Path, report: Callable[[str], None], url: str = URL) -> Path:
    """Return the archive in `folder`, downloaded if necessary; an incomplete file is removed."""
    archive = folder / f"fsdd-{COMMIT[:8]}.tar.gz"
    if archive.exists():
        return archive
    report(Phase(f"downloading {url}"))
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{archive.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        _fetch(url, part)
        part.rename(archive)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DataError(f"{url} could not be downloaded ({error}); try again, or download it "
                        "elsewhere and set data.source to its path.") from error
    finally:
        part.unlink(missing_ok=True)
    return archive


def read_recordings(place: Path, segments: Sequence[Segment]) -> dict[str, Samples]:
    """Return the samples of every segment by utt_id, after checking format, length and content."""
    files = dict(wav_files(place))
    missing = [segment.file for segment in segments if segment.file not in files]
    if missing:
        raise DataError(f"{place} lacks {len(missing)} of {len(segments)} recordings, the first is "
                        f"{missing[0]}; get the complete data set, or leave data.source empty to "
                        "download it.")
    found = {}
    for segment in segments:
        where = f"{place}: {segment.file}"
        samples = decoded(where, files[segment.file])
        digest = hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest()[:16]
        if digest != segment.sha256_pcm:
            raise DataError(f"{where} is not the recording of that name: its SHA-256 is {digest}..., "
                            f"the list has {segment.sha256_pcm}; download FSDD at commit {COMMIT[:8]}.")
        found[segment.utt_id] = samples
    return found


def decoded(where: str, content: bytes) -> Samples:
    """Return the samples of a mono recording at 8 kHz."""
    samples, rate_hz = recording.read_mono(where, io.BytesIO(content))
    if rate_hz != SAMPLE_RATE_HZ:
        raise DataError(f"{where} is sampled at {rate_hz} Hz, but the corpus at {SAMPLE_RATE_HZ} Hz; "
                        "download it again.")
    return np.asarray(np.round(samples), np.int16)


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer, path.open("wb") as file:
        expected = int(answer.headers.get("Content-Length") or 0)
        while chunk := answer.read(1 << 20):
            file.write(chunk)
            if file.tell() > MAX_DOWNLOAD_BYTES:
                raise ConnectionError(f"it is larger than {MAX_DOWNLOAD_BYTES} bytes")
    if expected and path.stat().st_size != expected:
        raise ConnectionError(f"the connection closed after {path.stat().st_size} of {expected} "
                              "bytes")


def wav_files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of every wav file of a folder or an archive."""
    try:
        if place.is_dir():
            for path in sorted(place.glob("*.wav")):
                yield path.name, read_regular_bytes(path, unpacking.MAX_MEMBER_BYTES)
        else:
            yield from unpacking.members(place, ".wav")
    except unpacking.UnpackError as error:
        raise DataError(f"{place} is damaged or is not a tar or zip archive ({error}); delete it "
                        "and download it again.") from error
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read ({error.strerror or error}); "
                        "download it again.") from error
