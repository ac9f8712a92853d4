"""The arguments of `ngsgd resume`, `evaluate`, `decode` and `align`; what they do is imported after those are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.console import TRUST, Parser
from ngsgd.pipeline.runs.run_folder import find_run


def resume(arguments: Sequence[str]) -> int:
    parser = _parser("resume")
    parser.add_argument("--address", help="the Ray cluster to join, where it is another than the run's own: host:port or auto")
    parser.add_argument("--workers", type=int, metavar="N", help="as many as there are now; the numbers stay those of the run")
    parser.add_argument("--accept-changed-config", action="store_true",
                        help="resume with a config.yaml that was edited since the run began")
    parser.add_argument("--allow-other-bits", action="store_true",
                        help="resume on another processor or with other versions or kernels; results agree to rounding")
    options = parser.parse_args(list(arguments))
    run = find_run(options.run)
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; it must be at least 1.")
    from ngsgd.launcher.commands import train as service

    return service.resume(run, quiet=options.quiet, address=options.address, num_workers=options.workers,
                          accept_changed_config=options.accept_changed_config, trust=options.trust,
                          allow_other_bits=options.allow_other_bits)


def decode(arguments: Sequence[str]) -> int:
    parser = _parser("decode")
    parser.add_argument("--json", action="store_true", help="print what decode/wer.json holds, and nothing else on stdout")
    parser.add_argument("--streaming", action="store_true",
                        help="the test set frame by frame as it comes, on one thread: is it the same, how fast, how late")
    parser.add_argument("--chunk-frames", type=int, default=10, metavar="N", help="frames scored together (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    run = find_run(options.run)
    if options.chunk_frames < 1:
        raise ConfigError(f"--chunk-frames is {options.chunk_frames}; it must be at least 1.")
    if options.streaming:
        from ngsgd.launcher.commands.train import open_run
        from ngsgd.pipeline import streaming

        print(streaming.measure(open_run(run, quiet=False), chunk_frames=options.chunk_frames, trust=options.trust))
        return EXIT_OK
    from ngsgd.launcher.commands import train as service

    code = service.decode(run, quiet=options.quiet or options.json, trust=options.trust)
    if options.json:
        print((run / "decode" / "wer.json").read_text(encoding="utf-8"))
    return code


def evaluate(arguments: Sequence[str]) -> int:
    parser = _parser("evaluate")
    parser.add_argument("--outer-iter", type=int, metavar="N",
                        help="the checkpoint after outer iteration N, counted from 1 (default: the final model)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(arguments))
    run = find_run(options.run)
    from ngsgd.launcher.commands import train as service

    scores = service.evaluate(run, quiet=options.quiet or options.json, outer_iter=options.outer_iter,
                              trust=options.trust)
    print(json.dumps(scores, indent=1) if options.json else "\n".join(_told(name, score) for name, score in scores.items()))
    return EXIT_OK


def align(arguments: Sequence[str]) -> int:
    parser = Parser("align")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for ngsgd train: recipe=fsdd data.source=PATH")
    parser.add_argument("--output", "-o", required=True, help="the file to write: .npz, or text lines \"utterance pdf pdf ...\"")
    parser.add_argument("--model", metavar="RUN", help="label with the final model of this run, on its data and with its settings, "
                                                       "in place of a flat start")
    parser.add_argument("--trust", action="store_true", help=f"with --model: {TRUST}")
    options = parser.parse_intermixed_args(list(arguments))
    if options.model and options.overrides:
        raise ConfigError(f"--model takes the settings of its run; leave out {' '.join(options.overrides)}.")
    run = find_run(options.model) if options.model else None
    from ngsgd.launcher.commands import align as service

    if run:
        service.with_model(run, Path(options.output), trust=options.trust)
    else:
        service.to_file(options.overrides, Path(options.output))
    return EXIT_OK


def _told(name: str, score: dict[str, float] | None) -> str:
    if score is None:
        return f"{name:6} the states of its frames are not known; ngsgd decode gives a word error rate"
    return f"{name:6} objf {score['objf']:.4f} nats per frame, {100 * score['accuracy']:.2f}% of frames right"


def _parser(command: str) -> Parser:
    parser = Parser(command)
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the result")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    return parser
