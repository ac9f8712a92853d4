"""The Free Spoken Digit Dataset: its recordings, or noisy strings of 3 to 7 of one speaker.

GitHub may repack the bytes of the pinned commit: samples must have the SHA-256 in the list.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np

from ngsgd.asr import recording, unpacking, utterance
from ngsgd.asr.corpora import digits
from ngsgd.asr.corpora.alignments import Alignment
from ngsgd.asr.features import augment
from ngsgd.asr.features.voice import Waveform
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, PdfIds, Samples, Utterance, frame_centers
from ngsgd.config import DataConfig
from ngsgd.errors import DataError
from ngsgd.files import new_file, read_regular_bytes
from ngsgd.phase import Phase

SHIPPED = "corpora/fsdd"
# recordings 0 to 4 of each speaker and digit are never in the training set, by the rule of the data
# set
NUM_HELD_OUT = 5
# the two speakers with the highest error rate of a model of the others
TEST_SPEAKERS = ("george", "nicolas")


@dataclass(frozen=True)
class Segment:
    """One recording of one digit."""

    utt_id: str
    file: str  # its name in the data set
    word: str
    speaker: str
    index: int  # 0 to 49, counted per speaker and digit
    num_samples: int
    sha256_pcm: str  # first 16 hex digits of the SHA-256 of the samples as little-endian int16


@dataclass(frozen=True)
class Catalog:
    """All recordings, and the HMM state of each of their frames."""

    segments: tuple[Segment, ...]
    pdf_T: Mapping[str, PdfIds]  # by utt_id
    topology: Topology

    def realigned(self, alignment: Alignment) -> Catalog:
        """Return the catalog with other labels, without unaligned recordings."""
        segments = tuple(segment for segment in self.segments if segment.utt_id in alignment.pdf_T)
        if not segments:
            raise DataError(f"{alignment.path} has no states for any recording of FSDD; use a file "
                            "of ngsgd align recipe=fsdd data.source=PATH --output FILE.")
        largest = max(int(pdf_T.max()) for pdf_T in alignment.pdf_T.values())
        if largest >= self.topology.num_pdfs:
            raise DataError(f"{alignment.path} has the state {largest}, but the phones of FSDD "
                            f"have {self.topology.num_pdfs} states, from 0; use a file of ngsgd "
                            "align recipe=fsdd data.source=PATH --output FILE.")
        pdf_T = {segment.utt_id: alignment.pdf_T[segment.utt_id] for segment in segments}
        _check_alignment(segments, pdf_T)
        return Catalog(segments, pdf_T, self.topology)


def load_catalog(folder: Traversable | None = None) -> Catalog:
    """Load the catalog in `folder`; without one, the catalog of the 3000 public recordings."""
    folder = folder or resources.files("ngsgd.asr").joinpath(SHIPPED)
    with folder.joinpath("segments.csv").open(encoding="utf-8") as file:
        segments = tuple(Segment(row["utt_id"], row["file"], row["word"], row["speaker"],
                                 int(row["index"]), int(row["num_samples"]), row["sha256_pcm"])
                         for row in csv.DictReader(file))
    description = json.loads(folder.joinpath("ali.json").read_text(encoding="utf-8"))
    lexicon = {word: tuple(map(tuple, all_)) for word, all_ in description["lexicon"].items()}
    with folder.joinpath("ali.npz").open("rb") as packed, np.load(packed) as arrays:
        # the silence of the GMM has three states in a row; spliced strings cut silence anywhere, so
        # it has one state here
        state_N = arrays["pdf"].astype(np.int32)
        pdf_N = np.where(state_N < STATES_PER_PHONE, SILENCE_PDF, state_N - STATES_PER_PHONE + 1).astype(np.int32)
        pieces = np.split(pdf_N, arrays["offsets"][1:-1])
        pdf_T = dict(zip(arrays["utt_ids"].tolist(), pieces, strict=True))
    _check_alignment(segments, pdf_T)
    return Catalog(segments, pdf_T, Topology(tuple(description["phones"][1:]), lexicon))


def split(segments: Sequence[Segment], kind: str, held_out: str = "") -> dict[str, tuple[Segment, ...]]:
    """Return the recordings of train, valid and test.

    "speaker": test is two speakers that are never trained on, valid the held-out recordings of the
    others. "official": test is the held-out recordings of all, valid index 5 to 9 of the official
    training part. "loo": test is the speaker `held_out` (DataError if it is none), valid as above.
    """
    speakers = sorted({segment.speaker for segment in segments})
    if kind == "loo" and held_out not in speakers:
        raise DataError(f"data.held_out is {held_out!r}, which is not a speaker of FSDD; choose "
                        f"one of {', '.join(speakers)}.")
    test_speakers = (held_out,) if kind == "loo" else TEST_SPEAKERS
    sets: dict[str, list[Segment]] = {"train": [], "valid": [], "test": []}
    for segment in segments:
        by_index = ("test", "valid") if kind == "official" else ("valid",)
        block = segment.index // NUM_HELD_OUT
        name = by_index[block] if block < len(by_index) else "train"
        is_test = kind != "official" and segment.speaker in test_speakers
        sets["test" if is_test else name].append(segment)
    for name, members in sets.items():
        if not members:
            raise DataError(f"The {name} set of data.split={kind} is empty: none of the "
                            f"{len(segments)} recordings belongs to it; use the complete data set, or another data.split.")
    return {name: tuple(members) for name, members in sets.items()}


def _check_alignment(segments: Sequence[Segment], pdf_T: Mapping[str, PdfIds]) -> None:
    for segment in segments:
        expected, found = utterance.num_frames(segment.num_samples), len(pdf_T.get(segment.utt_id, ()))
        if found != expected:
            raise DataError(f"The alignment has {found} frames for {segment.utt_id} "
                            f"({segment.file}), but its audio has {expected}; create it again with "
                            "ngsgd align recipe=fsdd data.source=PATH --output FILE.")


NUM_WORDS = (3, 7)
PAUSE_MS = (0, 150)
EDGE_SILENCE_MS = (50, 250)
LEVEL_DB = 3.0  # maximum random change of the level of each recording, dB
BABBLE_VOICES = 5
NOISES = (*augment.COLORS, "babble")
# phones of the synthesizer -> phones of FSDD; accents differ in the vowels of one and four and in
# the first sound of three
_PHONES = """
z=Z i@=IH r=R oU=OW w=W V=AH 0=AH n=N t=T u:=UW T=TH t[=TH i:=IY f=F o@=AO O@=AO aI=AY v=V s=S
I=IH k=K E=EH @=AH eI=EY
"""
PHONES = dict(pair.split("=") for pair in _PHONES.split())


@dataclass(frozen=True)
class Pool:
    """Recordings of one set."""

    segments: tuple[Segment, ...]
    # background voices from the training set; never the speaker of the string
    babble: tuple[Segment, ...]
    samples: Mapping[str, Samples]  # by utt_id
    pdf_T: Mapping[str, PdfIds]     # by utt_id


def utterances(set_name: str, data: DataConfig, pool: Pool, *, minutes: float,
               is_clean: Callable[[str], bool] = lambda _utt_id: False) -> Iterator[Utterance]:
    """Yield strings up to a total of `minutes`; those with `is_clean` have no noise."""
    rng = np.random.default_rng([0, digits.SETS.index(set_name)])
    speakers = sorted({segment.speaker for segment in pool.segments})
    decks = {speaker: draw_recordings(pool, speaker, rng) for speaker in speakers}
    index, made_s = 0, 0.0
    while made_s < 60 * minutes:
        speaker = str(rng.choice(list(decks)))
        segments = [next(decks[speaker]) for _ in range(int(rng.integers(*NUM_WORDS, endpoint=True)))]
        utt_id = f"{speaker}-{set_name}-{index:06d}"
        yield (utterance := splice_string(utt_id, segments, pool, data, rng, is_clean=is_clean(utt_id)))
        index, made_s = index + 1, made_s + len(utterance.samples) / SAMPLE_RATE_HZ


def recordings(pool: Pool) -> Iterator[Utterance]:
    """Yield the unmodified recordings, one word each."""
    for segment in pool.segments:
        yield Utterance(segment.utt_id, segment.speaker, (segment.word,), pool.samples[segment.utt_id], pool.pdf_T[segment.utt_id])


def draw_recordings(pool: Pool, speaker: str, rng: np.random.Generator) -> Iterator[Segment]:
    """Yield recordings of the speaker forever, in random order; each is used once per round."""
    own = [segment for segment in pool.segments if segment.speaker == speaker]
    while True:
        yield from (own[i] for i in rng.permutation(len(own)))


def splice_string(utt_id: str, segments: Sequence[Segment], pool: Pool, data: DataConfig, rng: np.random.Generator,
                  *, is_clean: bool = False) -> Utterance:
    starts, num_samples = lay_out_segments(segments, rng)
    speech = np.zeros(num_samples)
    pdf_T = np.full(len(frame_centers(num_samples)), SILENCE_PDF, dtype=np.int32)
    for start, segment in zip(starts, segments, strict=True):
        gain = 10 ** (rng.uniform(-LEVEL_DB, LEVEL_DB) / 20)
        speech[start:start + segment.num_samples] = gain * pool.samples[segment.utt_id]
        # frames are off by at most 5 ms
        own_T = pool.pdf_T[segment.utt_id]
        own_frame_T = (frame_centers(num_samples) - start) // utterance.FRAME_SHIFT
        inside_T = (own_frame_T >= 0) & (own_frame_T < len(own_T))
        pdf_T[inside_T] = own_T[own_frame_T[inside_T]]
    background = background_noise(str(rng.choice(NOISES)), num_samples, pool, segments[0].speaker, rng)
    snr_db = float(rng.uniform(data.snr_db_low, data.snr_db_high))
    samples = augment.mix(speech, background, snr_db=np.inf if is_clean else snr_db,
                          is_speech=utterance.spread_to_samples(pdf_T != SILENCE_PDF, num_samples))
    return Utterance(utt_id=utt_id, speaker=segments[0].speaker, words=tuple(segment.word for segment in segments),
                     samples=samples, pdf_T=pdf_T)


def lay_out_segments(segments: Sequence[Segment], rng: np.random.Generator) -> tuple[list[int], int]:
    """Return the first sample of each recording, and the length of the string."""
    position = _draw_samples(rng, EDGE_SILENCE_MS)
    starts = []
    for segment in segments:
        starts.append(position)
        position += segment.num_samples + _draw_samples(rng, PAUSE_MS)
    return starts, position + _draw_samples(rng, EDGE_SILENCE_MS)


def background_noise(color: str, num_samples: int, pool: Pool, speaker: str, rng: np.random.Generator) -> Waveform:
    if color != "babble":
        return augment.COLORS[color](num_samples, rng)
    others = [segment for segment in pool.babble if segment.speaker != speaker]
    total = np.zeros(num_samples)
    for _ in range(BABBLE_VOICES):
        # concatenated recordings of equal loudness
        pieces: list[Waveform] = []
        while sum(map(len, pieces)) < num_samples:
            utt_id = others[int(rng.integers(len(others)))].utt_id
            samples = pool.samples[utt_id].astype(np.float64)
            pieces.append(samples / np.sqrt(np.mean(samples ** 2)))
        total = np.concatenate(pieces)[:num_samples] + total
    return total


def _draw_samples(rng: np.random.Generator, bounds_ms: tuple[int, int]) -> int:
    return int(rng.integers(*bounds_ms, endpoint=True)) * SAMPLE_RATE_HZ // 1000


def with_pronunciations(topology: Topology) -> Topology:
    """Return the topology of FSDD with those pronunciations that it lacks: four without r."""
    lexicon = dict(topology.lexicon)
    for word, pronunciations in lexicon.items():
        spoken = (tuple(PHONES[phone] for phone in one) for one in digits.TOPOLOGY.lexicon[word])
        lexicon[word] = tuple(dict.fromkeys((*pronunciations, *spoken)))
    return replace(topology, lexicon=lexicon)


def relabeled(utterances: Iterable[Utterance], topology: Topology) -> Iterator[Utterance]:
    """Yield synthetic digits with the HMM states of `topology`."""
    synthetic = digits.TOPOLOGY
    pdf_of = np.zeros(synthetic.num_pdfs, dtype=np.int32)
    pdf_of[list(synthetic.silence_pdfs)] = topology.silence_pdfs
    for phone, name in PHONES.items():
        pdf_of[list(synthetic.pdfs_of_phone(phone))] = topology.pdfs_of_phone(name)
    for one in utterances:
        yield replace(one, pdf_T=pdf_of[one.pdf_T])


COMMIT = "26eb9aaf76e81b692f806f9140c2d2777410d7a1"
URL = f"https://github.com/Jakobovski/free-spoken-digit-dataset/archive/{COMMIT}.tar.gz"
DOWNLOAD_TIMEOUT_S = 60.0  # seconds without a byte
MAX_DOWNLOAD_BYTES = 1 << 30  # the archive has 16 MB

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
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer, new_file(archive) as part, part.open("wb") as file:
            expected = int(answer.headers.get("Content-Length") or 0)
            while chunk := answer.read(1 << 20):
                file.write(chunk)
                if file.tell() > MAX_DOWNLOAD_BYTES:
                    raise ConnectionError(f"it is larger than {MAX_DOWNLOAD_BYTES} bytes")
            if expected and file.tell() != expected:
                raise ConnectionError(f"the connection closed after {file.tell()} of {expected} bytes")
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DataError(f"{url} could not be downloaded ({error}); try again, or download it "
                        "elsewhere and set data.source to its path.") from error
    return archive


def read_recordings(place: Path, segments: Sequence[Segment]) -> dict[str, Samples]:
    """Return the samples of every segment by utt_id, after checking format, length and content."""
    files = dict(wav_files(place))
    if missing := [segment.file for segment in segments if segment.file not in files]:
        raise DataError(f"{place} lacks {len(missing)} of {len(segments)} recordings, the first is "
                        f"{missing[0]}; get the complete data set, or leave data.source empty to download it.")
    found = {}
    for segment in segments:
        where = f"{place}: {segment.file}"
        samples = decoded(where, files[segment.file])
        digest = hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest()[:16]
        if digest != segment.sha256_pcm:
            raise DataError(f"{where} is not the recording of that name: its SHA-256 is "
                            f"{digest}..., the list has {segment.sha256_pcm}; download FSDD at commit {COMMIT[:8]}.")
        found[segment.utt_id] = samples
    return found


def decoded(where: str, content: bytes) -> Samples:
    """Return the samples of a mono recording at 8 kHz."""
    samples, rate_hz = recording.read_mono(where, io.BytesIO(content))
    if rate_hz != SAMPLE_RATE_HZ:
        raise DataError(f"{where} is sampled at {rate_hz} Hz, but the corpus at {SAMPLE_RATE_HZ} Hz; download it again.")
    return np.asarray(np.round(samples), np.int16)


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
