"""`ngsgd decode` and `ngsgd evaluate`: WER and frame accuracy of a trained model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, TRUST, Parser, add_words, words_of
from ngsgd.launcher.text import printable
from ngsgd.runs.run_folder import find_run

if TYPE_CHECKING:
    from ngsgd.pipeline.decoding.decode_data import DataResult

# options that need --data, as attributes of the parsed arguments
_OF_DATA = ("lm", "lexicon", "words", "grammar", "scale", "penalty", "tune_on", "rescore_lm", "confidences", "output")
# options that exclude --data
_OF_TEST_SET = ("frames", "outer_iter", "streaming")


def decode(arguments: Sequence[str]) -> int:
    """`ngsgd decode`."""
    options = _options(arguments)
    if options.data is not None:
        return _decode_data(options)
    reads_only = options.frames or options.outer_iter is not None or options.streaming
    run = find_run(options.model, to_write=not reads_only)
    if options.frames or options.outer_iter is not None:
        return _frame_scores(run, options)
    if options.streaming:
        from ngsgd.launcher.commands.train import open_run
        from ngsgd.pipeline.decoding import streaming

        print(
            streaming.measure(
                open_run(run, quiet=False), chunk_frames=options.chunk_frames, trust=options.trust
            )
        )
        return EXIT_OK
    from ngsgd.launcher.commands import train as service

    code = service.decode(run, quiet=options.quiet or options.json, trust=options.trust)
    if options.json:
        print((run / "decode" / "wer.json").read_text(encoding="utf-8"))
    return code


def evaluate(arguments: Sequence[str]) -> int:
    """`ngsgd evaluate`, equivalent to `ngsgd decode --frames`."""
    parser = Parser("evaluate")
    parser.add_argument("run", metavar="RUN", help="run folder, or its name under runs/")
    parser.add_argument("--outer-iter", type=int, metavar="N",
                        help="checkpoint after outer iteration N, counted from 1 (default: final "
                             "model)")
    _add_common(parser)
    options = parser.parse_args(list(arguments))
    return _frame_scores(find_run(options.run), options)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """The checked options of `ngsgd decode`."""
    parser = Parser("decode")
    parser.add_argument("model", metavar="MODEL",
                        help="run folder, or its name under runs/; with --data also a file of "
                             "ngsgd export --format bundle RUN FILE")
    _add_common(parser)
    _add_other_data(parser.add_argument_group("other data"))
    _add_test_set(parser.add_argument_group("test set of the run"))
    options = parser.parse_args(list(arguments))
    problems = list(_problems(options))
    try:
        options.changed = words_of(options)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def _add_common(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help=JSON)
    parser.add_argument("--quiet", "-q", action="store_true",
                        help="print incidents and the result only")
    parser.add_argument("--trust", action="store_true", help=TRUST)


def _add_other_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", metavar="DIR", type=Path,
                       help="Kaldi data directory, or folder with lhotse's recordings.jsonl.gz and "
                            "supervisions.jsonl.gz (default: test set of the run)")
    add_words(group)
    for flag, metavar, about in (
            ("--tune-on", "DIR", "data to choose scale and penalty on; with --confidences also to "
                                 "fit the calibration"),
            ("--rescore-lm", "ARPA", "n-gram language model for rescoring lattices"),
            ("--output", "DIR", "new folder for wer.json and for tables by utterance, speaker and "
                                "error type")):
        names = (flag, "-o") if flag == "--output" else (flag,)
        group.add_argument(*names, metavar=metavar, type=Path, help=about)
    group.add_argument("--confidences", action="store_true",
                       help="calibration error of the word confidences")


def _add_test_set(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--frames", action="store_true",
                       help="objective and frame accuracy of validation and test set, without "
                            "decoding")
    group.add_argument("--outer-iter", type=int, metavar="N",
                       help="checkpoint after outer iteration N for --frames, counted from 1")
    group.add_argument("--streaming", action="store_true",
                       help="streaming decoding on one thread, compared with offline decoding in "
                            "words, speed and latency")
    group.add_argument("--chunk-frames", type=int, default=10, metavar="N",
                       help="frames per chunk of --streaming (default: %(default)s)")


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """A message per option that is out of range or excludes another."""
    if options.chunk_frames < 1:
        yield f"--chunk-frames is {options.chunk_frames}; it must be at least 1."
    given = {name: f"--{name.replace('_', '-')}" for name in (*_OF_DATA, *_OF_TEST_SET)
             if getattr(options, name) not in (None, False)}
    of_data = [given[name] for name in _OF_DATA if name in given]
    of_test_set = [given[name] for name in _OF_TEST_SET if name in given]
    if options.data is None and of_data:
        yield f"{of_data[0]} needs --data DIR, the data to decode."
    if options.data is not None and of_test_set:
        yield f"{of_test_set[0]} applies to the test set of a run; remove it, or --data."
    if options.streaming and (options.frames or options.outer_iter is not None):
        yield "--streaming decodes, and --frames does not; give one of them."
    if options.output is not None and options.output.exists():
        yield f"--output {options.output} exists; give a new folder."


def _decode_data(options: argparse.Namespace) -> int:
    from ngsgd.pipeline.decoding import decode_data as service
    from ngsgd.runs.recognizer import open_bundle

    bundle = open_bundle(options.model, trust=options.trust)
    changed = options.changed
    result = service.decode_data(
        bundle,
        service.DecodeRequest(
            options.data,
            changed["words"],
            changed["scale"],
            changed["penalty"],
            options.tune_on,
            options.rescore_lm,
            options.confidences,
        ),
        report=changed["report"],
        progress=(lambda _line: None) if options.quiet or options.json else (lambda line: changed["report"](f"{line} ...")),
    )
    if options.output is not None:
        service.write(options.output, result)
    print(
        json.dumps(service.as_json(result), indent=1)
        if options.json
        else printable(as_text(result, quiet=options.quiet))
    )
    return EXIT_OK


def as_text(result: DataResult, *, quiet: bool) -> str:
    from ngsgd.asr.decode.calibration import expected_calibration_error
    from ngsgd.pipeline.decoding.decode_data import by_length, by_speaker

    lines = [
        f"{result.total}, 95 % interval {result.interval.low:.1f} to {result.interval.high:.1f}"
    ]
    if result.first_pass:
        lines.append(f"before rescoring: {result.first_pass}")
    if quiet:
        return lines[0]
    tuned = f", chosen on other data: {result.tuned}" if result.tuned else ""
    lines.append(
        f"acoustic scale {result.weights.acoustic_scale:g}, word penalty "
        f"{result.weights.word_penalty:g}{tuned}"
    )
    if (unknown := result.unknown).num_unknown:
        listed = ", ".join(f"{word} ({count})" for word, count in unknown.most_frequent)
        lines.append(
            f"{unknown.num_unknown} of {counted(unknown.num_words, 'word')} of the references are not in the "
            f"vocabulary: {listed}"
        )
    for title, groups in (("speaker", by_speaker(result)), ("words", by_length(result.rows))):
        width = max(map(len, [title, *groups]))
        lines += ["", title, *(f"{name:{width}} {errors}" for name, errors in groups.items())]
    if result.reliability:
        lines += ["", "confidence    words   mean  correct"]
        lines += [
            f"{one.low:.1f} to {one.high:.1f} {one.num_words:8} {one.mean_confidence:6.3f} "
            f"{one.accuracy:8.3f}"
            for one in result.reliability
        ]
        lines.append(
            f"expected calibration error {expected_calibration_error(result.reliability):.3f}"
        )
    return "\n".join(lines)


def _frame_scores(run: Path, options: argparse.Namespace) -> int:
    from ngsgd.launcher.commands import train as service

    scores = service.evaluate(
        run, quiet=options.quiet or options.json, outer_iter=options.outer_iter, trust=options.trust
    )
    print(
        json.dumps(scores, indent=1)
        if options.json
        else "\n".join(_score_line(name, score) for name, score in scores.items())
    )
    return EXIT_OK


def _score_line(name: str, score: dict[str, float] | None) -> str:
    if score is None:
        return f"{name:6} without alignment, so without frame scores; compute the WER with: ngsgd decode"
    return f"{name:6} objf {score['objf']:.4f} nats per frame, frame accuracy {100 * score['accuracy']:.2f}%"
