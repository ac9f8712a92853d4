"""`ngsgd transcribe`: recognize recordings and live audio with a trained model."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import make_directories, write_text
from ngsgd.launcher.arguments import TRUST, WORDS, Parser, words_of
from ngsgd.launcher.config.config_builder import require_writable
from ngsgd.launcher.screen import is_terminal, loading, say, with_progress
from ngsgd.masking import printable
from ngsgd.runs.run_folder import find_model

if TYPE_CHECKING:
    from ngsgd.asr.recognizer import Recognizer
    from ngsgd.asr.transcript import Transcript
    from ngsgd.pipeline.decoding.transcribe import Outcome

_STREAM = "-"
ENDINGS = {"text": ".txt", "json": ".json", "ctm": ".ctm", "srt": ".srt", "textgrid": ".TextGrid"}
# chunk of a live stream; it delays the words
_CHUNK_S = 0.2
# in a line of the summary
_MAX_NAMES = 5


def command(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    model = find_model(options.model)
    changed = words_of(options)
    with loading():
        from ngsgd.asr.recognizer import Recognizer
        from ngsgd.pipeline.decoding import transcribe as service
        from ngsgd.runs.recognizer import open_bundle
    audio, others = ([], []) if options.audio == [_STREAM] else service.find_audio(options.audio)
    if options.output:
        for stem, number in Counter(path.stem for path in audio).items():
            if number > 1:
                both = [str(path) for path in audio if path.stem == stem][:2]
                raise ConfigError(f"{both[0]} and {both[1]} would be written to one file of "
                                  "--output; transcribe them one after the other into different folders.")
    elif options.format in ("srt", "textgrid") and len(audio) > 1:
        raise ConfigError(f"--format {options.format} of {len(audio)} recordings needs a file for each; "
                          "give a folder with --output.")
    with loading():
        recognizer = Recognizer(open_bundle(model, trust=options.trust).with_words(**changed))
    if options.audio == [_STREAM]:
        return _stream(recognizer, options)
    began = time.monotonic()
    outcomes = service.transcribe_all(recognizer, audio, num_best=options.nbest, num_processes=options.processes, trust=True)
    finished = []
    for outcome in with_progress(outcomes, len(audio), "transcribing"):
        if outcome.transcript is not None:
            _write(outcome, outcome.transcript, options, is_alone=len(audio) == 1)
        finished.append(outcome)
    _summarize(finished, recognizer.sample_rate_hz, time.monotonic() - began, quiet=options.quiet)
    if others and not options.quiet:
        say(f"{counted(len(others), 'file')} not read, because of the ending: {listed_names(others)}; "
             "convert audio: ffmpeg -i INPUT -ac 1 OUTPUT.wav")
    failed = any(outcome.transcript is None for outcome in finished)
    return DataError.exit_code if failed else EXIT_OK


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("transcribe", epilog="exit codes: 0: all recordings were recognized; 3: some "
                                         "could not be read; 2 and 6: none was recognized, because "
                                         "of a wrong argument or an unusable model")
    parser.declare({"MODEL": "run folder, its name under runs/, or a file of ngsgd export --format bundle RUN FILE"})
    parser.add_argument("audio", metavar="AUDIO", nargs="+",
                        help="files (wav, flac, ogg, mp3 and others), folders or patterns; -: "
                             "stdin, one of these files or raw 16-bit samples")
    parser.add_argument("--format", choices=tuple(ENDINGS), default="text", help="format of the result (default: %(default)s)")
    parser.declare({
        "--output -o FOLDER": "folder for one file per recording (default: stdout)",
        "--nbest N": (1, "number of hypotheses per segment"),
        "--processes N": (1, "number of processes that share the files"),
        "--sample-rate HZ": (int, "sampling rate of raw samples from stdin (default: the model's)")})
    parser.declare(WORDS, "other words than those of the model")
    parser.declare({"--quiet -q": "print words and failures only", "--trust": TRUST})
    options = parser.parse_args(arguments)
    problems = [f"--{name} is {getattr(options, name)}; it must be 1 to 1000."
                for name in ("nbest", "processes") if not 1 <= getattr(options, name) <= 1000]
    if _STREAM in options.audio and len(options.audio) > 1:
        problems.append("- is the stream on stdin, which cannot be combined with files; give it alone.")
    if options.sample_rate is not None and options.audio != [_STREAM]:
        problems.append("--sample-rate is for raw samples from stdin (-); files have their own rate. Remove it.")
    if problems:
        raise ConfigError(problems)
    if options.output:
        require_writable("--output", Path(options.output))
    return options


def _write(outcome: Outcome, transcript: Transcript, options: argparse.Namespace, *, is_alone: bool) -> None:
    from ngsgd.asr.transcript import FORMATS
    name = str(outcome.audio)
    if options.output or is_alone:
        name = {"text": "", "ctm": outcome.audio.stem}.get(options.format, name)
    text = FORMATS[options.format](transcript, name)
    if not options.output:
        print(printable(text), end="")
        return
    folder = Path(options.output)
    make_directories(folder)
    write_text(folder / f"{outcome.audio.stem}{ENDINGS[options.format]}", text)


def _summarize(outcomes: Sequence[Outcome], rate_hz: int, elapsed_s: float, *, quiet: bool) -> None:
    """Print amount, speed, resampled files and failures on stderr."""
    done = [(one.audio, one.transcript) for one in outcomes if one.transcript is not None]
    failed = [outcome for outcome in outcomes if outcome.transcript is None]
    if not quiet:
        seconds = sum(transcript.duration_s for _, transcript in done)
        speed = f", real-time factor {elapsed_s / seconds:.3f}" if seconds else ""
        say(f"{counted(len(done), 'file')}, {seconds:.1f} s of audio in {elapsed_s:.1f} s{speed}")
        rates = Counter(transcript.sample_rate_hz for _, transcript in done)
        for rate, number in sorted(rates.items()):
            if rate != rate_hz:
                wider = "" if rate > rate_hz else "; the model was trained on a wider band"
                say(f"resampled from {rate} to {rate_hz} Hz by soxr: {counted(number, 'file')}{wider}")
        if empty := [audio for audio, transcript in done if not transcript.words]:
            say(f"no words in {counted(len(empty), 'file')}: {listed_names(empty)}")
    if failed and len(outcomes) > 1:
        say(f"{counted(len(failed), 'file')} failed:")
    for outcome in failed:
        say(f"ngsgd: {outcome.error}")


def _stream(recognizer: Recognizer, options: argparse.Namespace) -> int:
    """Recognize stdin; text is printed at the end of each segment."""
    from ngsgd.asr import recording
    from ngsgd.asr.recording import FULL_SCALE
    from ngsgd.asr.transcript import FORMATS, Partial, Segment, Transcript
    # a BufferedReader; typed as any binary stream
    source = recording.of_stream(cast(Any, sys.stdin.buffer), options.sample_rate or recognizer.sample_rate_hz)
    rate, as_written = source.sample_rate_hz, FORMATS[options.format]
    if source.num_channels > 1:
        found = recognizer.transcribe(source, num_best=options.nbest)
        print(printable(as_written(found, "stdin")), end="")
        return EXIT_OK
    segments, num_samples = list[Segment](), 0

    def chunks() -> Iterator[Any]:
        nonlocal num_samples
        for block_NC in source.blocks(_CHUNK_S):
            num_samples += len(block_NC)
            yield block_NC[:, 0] / FULL_SCALE

    shows_words = is_terminal(sys.stderr) and not options.quiet
    for one in recognizer.stream(chunks(), rate, num_best=options.nbest, partial=shows_words):
        if shows_words:
            shown = printable(one.text)[-100:] if isinstance(one, Partial) else ""
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
        if isinstance(one, Partial):
            continue
        if options.format == "text":
            text = as_written(Transcript((one,), one.end_s, rate, 1))
            print(printable(text), end="", flush=True)
        segments.append(one)
    if not num_samples:
        raise DataError("the stream on stdin holds no sample; send a recording or raw 16-bit samples.")
    if options.format != "text":
        transcript = Transcript(tuple(segments), num_samples / rate, rate, 1)
        print(printable(as_written(transcript, "stdin")), end="")
    return EXIT_OK


def listed_names(names: Sequence[Path | str]) -> str:
    """Return the first names, and dots for the others."""
    return ", ".join(map(str, names[:_MAX_NAMES])) + (" ..." if len(names) > _MAX_NAMES else "")
