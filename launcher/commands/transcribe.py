"""`ngsgd transcribe`: recognize recordings and live audio with a trained model."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import make_directories, write_text
from ngsgd.launcher.arguments import TRUST, Parser, add_words, words_of
from ngsgd.launcher.config.paths import require_writable
from ngsgd.launcher.text import printable

if TYPE_CHECKING:
    from ngsgd.asr.recognizer import Recognizer
    from ngsgd.pipeline.transcribe import Outcome

_STREAM = "-"
_ENDINGS = {"text": ".txt", "json": ".json", "ctm": ".ctm", "srt": ".srt"}
# chunk of a live stream; it delays the words
_CHUNK_S = 0.2
# in a line of the summary
_MAX_NAMES = 5


def command(arguments: Sequence[str]) -> int:
    """`ngsgd transcribe`."""
    options = _options(arguments)
    changed = words_of(options)
    from ngsgd.asr.recognizer import Recognizer
    from ngsgd.pipeline import transcribe as service
    from ngsgd.pipeline.runs.recognizer import open_bundle

    audio, others = ([], []) if options.audio == [_STREAM] else service.find_audio(options.audio)
    if options.output:
        _require_different_names(audio)
    elif options.format == "srt" and len(audio) > 1:
        raise ConfigError(
            f"--format srt of {len(audio)} recordings needs a file for each; give a folder with "
            f"--output."
        )
    recognizer = Recognizer(open_bundle(options.model, trust=options.trust).with_words(**changed))
    if options.audio == [_STREAM]:
        return _stream(recognizer, options)
    began = time.monotonic()
    outcomes = service.transcribe_all(
        recognizer, audio, num_best=options.nbest, num_processes=options.processes, trust=True
    )
    finished = []
    for outcome in _with_progress(outcomes, len(audio)):
        if outcome.transcript is not None:
            _write(outcome, options, is_alone=len(audio) == 1)
        finished.append(outcome)
    _summarize(finished, recognizer.sample_rate_hz, time.monotonic() - began, quiet=options.quiet)
    if others and not options.quiet:
        _say(f"{_files(len(others))} not read, because of the ending: {', '.join(map(str, others[:_MAX_NAMES]))}"
             f"{' ...' if len(others) > _MAX_NAMES else ''}; convert audio: ffmpeg -i INPUT -ac 1 OUTPUT.wav")
    failed = sum(outcome.transcript is None for outcome in finished)
    return DataError.exit_code if failed else EXIT_OK


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(list(arguments))
    problems = [f"--{name} is {getattr(options, name)}; it must be 1 to 1000." for name in ("nbest", "processes")
                if not 1 <= getattr(options, name) <= 1000]
    if _STREAM in options.audio and len(options.audio) > 1:
        problems.append("- is the stream on stdin, which cannot be combined with files; give it "
                        "alone.")
    if options.sample_rate is not None and options.audio != [_STREAM]:
        problems.append("--sample-rate is for raw samples from stdin (-); files have their own "
                        "rate. Remove it.")
    if problems:
        raise ConfigError(problems)
    if options.output:
        require_writable("--output", Path(options.output))
    return options


def _parser() -> Parser:
    parser = Parser("transcribe", epilog="exit codes: 0: all recordings were recognized; 3: some "
                                         "could not be read; 2 and 6: none was recognized, because "
                                         "of a wrong argument or an unusable model")
    parser.add_argument("model", metavar="MODEL",
                        help="run folder, its name under runs/, or a file of ngsgd export "
                             "--format bundle RUN FILE")
    parser.add_argument("audio", metavar="AUDIO", nargs="+",
                        help="files (wav, flac, ogg, mp3 and others), folders or patterns; -: "
                             "stdin, one of these files or raw 16-bit samples")
    parser.add_argument("--format", choices=tuple(_ENDINGS), default="text",
                        help="format of the result (default: %(default)s)")
    parser.add_argument("--output", "-o", metavar="FOLDER",
                        help="folder for one file per recording (default: stdout)")
    parser.add_argument("--nbest", type=int, default=1, metavar="N",
                        help="number of hypotheses per segment (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N",
                        help="number of processes that share the files (default: %(default)s)")
    parser.add_argument("--sample-rate", type=int, metavar="HZ",
                        help="sampling rate of raw samples from stdin (default: the model's)")
    add_words(parser.add_argument_group("other words than those of the model"))
    parser.add_argument("--quiet", "-q", action="store_true", help="print words and failures only")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    return parser


def _require_different_names(audio: Sequence[Path]) -> None:
    for stem, number in Counter(path.stem for path in audio).items():
        if number > 1:
            both = [str(path) for path in audio if path.stem == stem][:2]
            raise ConfigError(
                f"{both[0]} and {both[1]} would be written to one file of --output; transcribe "
                "them one after the other into different folders."
            )


def _with_progress(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """Yield the outcomes, with a progress bar on a terminal."""
    # rich belongs to the extra [service], which recognition does not need
    has_bar = total > 1 and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not has_bar:
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("transcribing", total=total)
        for outcome in outcomes:
            yield outcome
            bar.advance(task)


def _write(outcome: Outcome, options: argparse.Namespace, *, is_alone: bool) -> None:
    from ngsgd.asr.transcript import FORMATS

    assert outcome.transcript is not None
    is_file = bool(options.output)
    name = str(
        outcome.audio.stem if options.format == "ctm" and (is_file or is_alone) else outcome.audio
    )
    if options.format == "text" and (is_file or is_alone):
        name = ""
    text = FORMATS[options.format](outcome.transcript, name)
    if not is_file:
        print(printable(text), end="")
        return
    folder = Path(options.output)
    make_directories(folder)
    write_text(folder / f"{outcome.audio.stem}{_ENDINGS[options.format]}", text)


def _summarize(outcomes: Sequence[Outcome], rate_hz: int, elapsed_s: float, *, quiet: bool) -> None:
    """Print amount, speed, resampled files and failures on stderr."""
    done = [outcome.transcript for outcome in outcomes if outcome.transcript is not None]
    failed = [outcome for outcome in outcomes if outcome.transcript is None]
    if not quiet:
        seconds = sum(transcript.duration_s for transcript in done)
        speed = f", real-time factor {elapsed_s / seconds:.3f}" if seconds else ""
        _say(f"{_files(len(done))}, {seconds:.1f} s of audio in {elapsed_s:.1f} s{speed}")
        for rate, number in sorted(
            Counter(transcript.sample_rate_hz for transcript in done).items()
        ):
            if rate != rate_hz:
                _say(
                    f"resampled from {rate} to {rate_hz} Hz by soxr: {_files(number)}"
                    f"{'' if rate > rate_hz else '; the model was trained on a wider band'}"
                )
        empty = [
            str(outcome.audio)
            for outcome in outcomes
            if outcome.transcript is not None and not outcome.transcript.words
        ]
        if empty:
            _say(
                f"no words in {_files(len(empty))}: "
                f"{', '.join(empty[:_MAX_NAMES])}{' ...' if len(empty) > _MAX_NAMES else ''}"
            )
    if failed and len(outcomes) > 1:
        _say(f"{_files(len(failed))} failed:")
    for outcome in failed:
        _say(f"ngsgd: {outcome.error}")


def _stream(recognizer: Recognizer, options: argparse.Namespace) -> int:
    """Recognize stdin; text is printed at the end of each segment."""
    from ngsgd.asr import recording
    from ngsgd.asr.recording import FULL_SCALE
    from ngsgd.asr.transcript import FORMATS, Partial, Segment, Transcript

    # a BufferedReader; typed as any binary stream
    source = recording.of_stream(
        cast(Any, sys.stdin.buffer), options.sample_rate or recognizer.sample_rate_hz
    )
    as_written = FORMATS[options.format]
    if source.num_channels > 1:
        print(
            printable(as_written(recognizer.transcribe(source, num_best=options.nbest), "stdin")),
            end="",
        )
        return EXIT_OK
    segments: list[Segment] = []
    num_samples = 0

    def chunks() -> Iterator[Any]:
        nonlocal num_samples
        for block_NC in source.blocks(_CHUNK_S):
            num_samples += len(block_NC)
            yield block_NC[:, 0] / FULL_SCALE

    is_terminal = sys.stderr.isatty() and not options.quiet
    for found in recognizer.stream(
        chunks(), source.sample_rate_hz, num_best=options.nbest, partial=is_terminal
    ):
        if isinstance(found, Partial):
            print(f"\r\x1b[K{printable(found.text)[-100:]}", end="", file=sys.stderr, flush=True)
            continue
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if options.format == "text":
            print(
                printable(as_written(Transcript((found,), found.end_s, source.sample_rate_hz, 1))),
                end="",
                flush=True,
            )
        segments.append(found)
    if not num_samples:
        raise DataError("the stream on stdin holds no sample; send a recording or raw 16-bit samples.")
    if options.format != "text":
        transcript = Transcript(
            tuple(segments), num_samples / source.sample_rate_hz, source.sample_rate_hz, 1
        )
        print(printable(as_written(transcript, "stdin")), end="")
    return EXIT_OK


def _files(number: int) -> str:
    return f"{number} {'file' if number == 1 else 'files'}"


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
