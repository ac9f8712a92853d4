"""`ngsgd decode` and `ngsgd evaluate`: WER and frame accuracy of a trained model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, RUN, TRUST, WORDS, Parser, out_of_range, words_of
from ngsgd.masking import printable
from ngsgd.runs.run_folder import find_model, find_run

if TYPE_CHECKING:
    from ngsgd.pipeline.decoding.decode_data import DataResult

# options that need --data, as attributes of the parsed arguments
_OF_DATA = ("lm", "lexicon", "words", "grammar", "scale", "penalty", "tune_on", "rescore_lm", "confidences", "output", "filter",
            "ignore_case")
# options that exclude --data
_OF_TEST_SET = ("frames", "outer_iter", "streaming")
_COMMON = {"--json": JSON, "--quiet -q": "print incidents and the result only", "--trust": TRUST}


def decode(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.data is not None:
        return _decode_data(options)
    reads_only = options.frames or options.outer_iter is not None or options.streaming
    path = find_run(options.model, to_write=not reads_only)
    if options.frames or options.outer_iter is not None:
        return _frame_scores(path, options)
    from ngsgd.launcher.commands.train import open_run
    if options.streaming:
        from ngsgd.pipeline.decoding import streaming
        print(streaming.measure(open_run(path, quiet=False), chunk_frames=options.chunk_frames, trust=options.trust))
        return EXIT_OK
    run = open_run(path, quiet=options.quiet or options.json)
    result = run.decode(trust=options.trust)
    run.services.report(f"valid  {result.valid}")
    run.services.report(f"test   {result.test}")
    if options.json:
        print((path / "decode" / "wer.json").read_text(encoding="utf-8"))
    return EXIT_OK


def evaluate(arguments: Sequence[str]) -> int:
    """`ngsgd evaluate`, equivalent to `ngsgd decode --frames`."""
    parser = Parser("evaluate")
    parser.declare({"RUN": RUN, "--outer-iter N": (
        int, "checkpoint after outer iteration N, counted from 1 (default: final model)"), **_COMMON})
    options = parser.parse_args(arguments)
    return _frame_scores(find_run(options.run), options)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("decode")
    parser.declare({"MODEL": f"{RUN}; with --data also a file of ngsgd export --format bundle RUN FILE", **_COMMON})
    parser.declare({
        "--data DIR": (Path, "Kaldi data directory, or folder with lhotse's recordings.jsonl.gz and "
                             "supervisions.jsonl.gz (default: test set of the run)"),
        **WORDS,
        "--tune-on DIR": (Path, "data to choose scale and penalty on; with --confidences also to fit the calibration"),
        "--rescore-lm ARPA": (Path, "n-gram language model for rescoring lattices"),
        "--filter FILE": (Path, "rules WORD WORD => WORD, applied to references and recognized words before scoring"),
        "--ignore-case": "score without case",
        "--output -o DIR": (Path, "new folder for wer.json and for tables by utterance, speaker and error type"),
        "--confidences": "calibration error of the word confidences"}, "other data")
    parser.declare({
        "--frames": "objective and frame accuracy of validation and test set, without decoding",
        "--outer-iter N": (int, "checkpoint after outer iteration N for --frames, counted from 1"),
        "--streaming": "streaming decoding on one thread, compared with offline decoding in words, speed and latency",
        "--chunk-frames N": (10, "frames per chunk of --streaming")}, "test set of the run")
    options = parser.parse_args(arguments)
    problems = out_of_range(options, {"chunk_frames": 1})
    of_data, of_test_set = ([f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]
                            for names in (_OF_DATA, _OF_TEST_SET))
    if options.data is None and of_data:
        problems.append(f"{of_data[0]} needs --data DIR, the data to decode.")
    if options.data is not None and of_test_set:
        problems.append(f"{of_test_set[0]} applies to the test set of a run; remove it, or --data.")
    if options.streaming and (options.frames or options.outer_iter is not None):
        problems.append("--streaming decodes, and --frames does not; give one of them.")
    if options.output is not None and options.output.exists():
        problems.append(f"--output {options.output} exists; give a new folder.")
    try:
        options.changed = words_of(options)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def _decode_data(options: argparse.Namespace) -> int:
    model = find_model(options.model)
    from ngsgd.asr.decode.scoring import Rules
    from ngsgd.pipeline.decoding import decode_data as service
    from ngsgd.runs.recognizer import open_bundle
    rules = Rules.read(options.filter, ignore_case=options.ignore_case)
    changed, is_quiet = options.changed, options.quiet or options.json
    result = service.decode_data(
        open_bundle(model, trust=options.trust),
        service.DecodeRequest(options.data, changed["words"], changed["scale"], changed["penalty"],
                              options.tune_on, options.rescore_lm, options.confidences, rules), report=changed["report"],
        progress=lambda line: None if is_quiet else changed["report"](f"{line} ..."))
    if options.output is not None:
        service.write(options.output, result)
    print(json.dumps(service.as_json(result), indent=1) if options.json else printable(as_text(result, quiet=options.quiet)))
    return EXIT_OK


def as_text(result: DataResult, *, quiet: bool) -> str:
    from ngsgd.asr.decode.tuning import expected_calibration_error
    from ngsgd.pipeline.decoding.decode_data import tables
    interval = f"95 % interval {result.interval.low:.1f} to {result.interval.high:.1f}"
    lines = [f"{result.total}, {interval}"]
    if result.first_pass:
        lines.append(f"before rescoring: {result.first_pass}")
    if quiet:
        return lines[0]
    lines.append(result.characters.line("%CER"))
    if result.num_changed is not None:
        lines.append(f"the rules changed {counted(result.num_changed, 'reference or result', 'references and results')}")
    tuned = f", chosen on other data: {result.tuned}" if result.tuned else ""
    lines.append(f"acoustic scale {result.weights.acoustic_scale:g}, word penalty {result.weights.word_penalty:g}{tuned}")
    if (unknown := result.unknown).num_unknown:
        listed = ", ".join(f"{word} ({count})" for word, count in unknown.most_frequent)
        lines.append(f"{unknown.num_unknown} of {counted(unknown.num_words, 'word')} of the "
                     f"references are not in the vocabulary: {listed}")
    for title, groups in tables(result).items():
        width = max(map(len, [title, *groups]))
        lines += ["", title, *(f"{name:{width}} {errors}" for name, errors in groups.items())]
    if result.reliability:
        lines += ["", "confidence    words   mean  correct"]
        lines += [f"{one.low:.1f} to {one.high:.1f} {one.num_words:8} {one.mean_confidence:6.3f} "
                  f"{one.accuracy:8.3f}" for one in result.reliability]
        error = expected_calibration_error(result.reliability)
        lines.append(f"expected calibration error {error:.3f}")
    return "\n".join(lines)


def _frame_scores(path: Path, options: argparse.Namespace) -> int:
    from ngsgd.launcher.commands.train import open_run
    run = open_run(path, quiet=options.quiet or options.json)
    scores = run.evaluate(options.outer_iter, trust=options.trust)
    if options.json:
        print(json.dumps(scores, indent=1))
        return EXIT_OK
    for name, score in scores.items():
        print(f"{name:6} objf {score['objf']:.4f} nats per frame, frame accuracy {100 * score['accuracy']:.2f}%" if score else
              f"{name:6} without alignment, so without frame scores; compute the WER with: ngsgd decode")
    return EXIT_OK
