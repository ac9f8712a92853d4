"""`ngsgd decode` and `ngsgd evaluate`: WER and frame scores of a trained model, on its own test set
or on other data.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.launcher.text import printable
from ngsgd.pipeline.runs.run_folder import find_run

if TYPE_CHECKING:
    from ngsgd.pipeline.decode_data import DataResult

# options that need --data, as attributes of the parsed arguments
_OF_DATA = (
    "lm",
    "lexicon",
    "words",
    "grammar",
    "scale",
    "penalty",
    "tune_on",
    "rescore_lm",
    "confidences",
    "output",
)


def decode(arguments: Sequence[str]) -> int:
    """`ngsgd decode`."""
    options = _options(arguments)
    if options.data is not None:
        return _decode_data(options)
    run = find_run(options.model)
    if options.frames or options.outer_iter is not None:
        return _frame_scores(run, options)
    if options.streaming:
        from ngsgd.launcher.commands.train import open_run
        from ngsgd.pipeline import streaming

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
    """`ngsgd evaluate`: the same as `ngsgd decode --frames`."""
    parser = Parser("evaluate")
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the result")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument(
        "--outer-iter",
        type=int,
        metavar="N",
        help="the checkpoint after outer iteration N, counted from 1 (default: the final model)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(arguments))
    return _frame_scores(find_run(options.run), options)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("decode")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, its name under runs/, or with --data also a file of "
        "ngsgd export --format bundle",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the result")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, and nothing else on stdout"
    )
    data = parser.add_argument_group("other data")
    data.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="a Kaldi data directory, or a folder with lhotse's recordings.jsonl.gz and supervisions.jsonl.gz "
        "(default: the test set of the run)",
    )
    data.add_argument("--lm", metavar="ARPA", type=Path, help="n-gram language model")
    data.add_argument(
        "--lexicon", metavar="FILE", type=Path, help="pronunciations in the phones of the model"
    )
    data.add_argument(
        "--words",
        metavar="FILE",
        type=Path,
        help="the words that may be recognized, one on each line",
    )
    data.add_argument(
        "--grammar",
        metavar="FILE",
        type=Path,
        help="grammar in a subset of JSGF, instead of a language model",
    )
    data.add_argument(
        "--scale", metavar="X", type=float, help="acoustic scale (default: that of the model)"
    )
    data.add_argument(
        "--penalty", metavar="X", type=float, help="cost of a word (default: that of the model)"
    )
    data.add_argument(
        "--tune-on",
        metavar="DIR",
        type=Path,
        help="data to choose scale and penalty on, those that are not given; with --confidences also the "
        "calibration",
    )
    data.add_argument(
        "--rescore-lm",
        metavar="ARPA",
        type=Path,
        help="n-gram language model to rescore lattices with",
    )
    data.add_argument(
        "--confidences",
        action="store_true",
        help="compare the confidences of words with the references",
    )
    data.add_argument(
        "--output",
        "-o",
        metavar="DIR",
        type=Path,
        help="new folder for wer.json and tables by utterance, speaker and operation",
    )
    own = parser.add_argument_group("the test set of the run")
    own.add_argument(
        "--frames",
        action="store_true",
        help="objective per frame and frame accuracy of the validation and test sets, without decoding",
    )
    own.add_argument(
        "--outer-iter",
        type=int,
        metavar="N",
        help="--frames of the checkpoint after outer iteration N, from 1",
    )
    own.add_argument(
        "--streaming",
        action="store_true",
        help="decode frame by frame on one thread, and report differences, speed and delay",
    )
    own.add_argument(
        "--chunk-frames",
        type=int,
        default=10,
        metavar="N",
        help="frames scored together (default: %(default)s)",
    )
    options = parser.parse_args(list(arguments))
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that exclude each other or are out of range."""
    if options.chunk_frames < 1:
        raise ConfigError(f"--chunk-frames is {options.chunk_frames}; it must be at least 1.")
    for name in ("scale", "penalty"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and (value > 0 or name == "penalty")):
            raise ConfigError(
                f"--{name} is {value}; give a number{' above 0' if name == 'scale' else ''}."
            )
    given = [
        f"--{name.replace('_', '-')}"
        for name in _OF_DATA
        if getattr(options, name) not in (None, False)
    ]
    if options.data is None and given:
        raise ConfigError(f"{given[0]} needs --data DIR, the data to decode.")
    own = [
        f"--{name.replace('_', '-')}"
        for name in ("frames", "outer_iter", "streaming")
        if getattr(options, name) not in (None, False)
    ]
    if options.data is not None and own:
        raise ConfigError(f"{own[0]} is for the test set of a run; leave it or --data out.")
    if options.streaming and (options.frames or options.outer_iter is not None):
        raise ConfigError("--streaming decodes, and --frames does not; give one of them.")
    if options.output is not None and options.output.exists():
        raise ConfigError(f"--output {options.output} exists; give a new folder.")


def _decode_data(options: argparse.Namespace) -> int:
    from ngsgd.asr.lang.vocabulary import Vocabulary
    from ngsgd.pipeline import decode_data as service
    from ngsgd.pipeline.runs.recognizer import open_bundle

    bundle = open_bundle(options.model, trust=options.trust)
    vocabulary = Vocabulary(options.lexicon, options.words, options.lm, options.grammar)
    result = service.decode_data(
        bundle,
        service.DecodeRequest(
            options.data,
            vocabulary,
            options.scale,
            options.penalty,
            options.tune_on,
            options.rescore_lm,
            options.confidences,
        ),
    )
    if options.output is not None:
        service.write(options.output, result)
    print(
        json.dumps(service.as_json(result), indent=1)
        if options.json
        else printable(_as_text(result, quiet=options.quiet))
    )
    return EXIT_OK


def _as_text(result: DataResult, *, quiet: bool) -> str:
    from ngsgd.asr.decode.calibration import expected_calibration_error
    from ngsgd.pipeline.decode_data import by_length, by_speaker

    lines = [
        f"{result.total}, 95 % interval {result.interval.low:.1f} to {result.interval.high:.1f}"
    ]
    if result.first_pass:
        lines.append(f"before rescoring: {result.first_pass}")
    if quiet:
        return lines[0]
    tuned = f", chosen on other data: {result.tuned}" if result.tuned else ""
    lines.append(
        f"acoustic scale {result.weights.acoustic_scale:g}, word penalty {result.weights.word_penalty:g}{tuned}"
    )
    if (unknown := result.unknown).num_unknown:
        listed = ", ".join(f"{word} ({count})" for word, count in unknown.most_frequent)
        lines.append(
            f"{unknown.num_unknown} of {unknown.num_words} words of the references are not in the vocabulary: {listed}"
        )
    for title, groups in (("speaker", by_speaker(result)), ("words", by_length(result.rows))):
        width = max(map(len, [title, *groups]))
        lines += ["", title, *(f"{name:{width}} {errors}" for name, errors in groups.items())]
    if result.reliability:
        lines += ["", "confidence    words   mean  correct"]
        lines += [
            f"{one.low:.1f} to {one.high:.1f} {one.num_words:8} {one.mean_confidence:6.3f} {one.accuracy:8.3f}"
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
        else "\n".join(_told(name, score) for name, score in scores.items())
    )
    return EXIT_OK


def _told(name: str, score: dict[str, float] | None) -> str:
    if score is None:
        return (
            f"{name:6} the states of its frames are not known; ngsgd decode gives a word error rate"
        )
    return f"{name:6} objf {score['objf']:.4f} nats per frame, {100 * score['accuracy']:.2f}% of frames right"
