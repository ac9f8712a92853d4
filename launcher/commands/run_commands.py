"""The arguments of `ngsgd resume` and `align`; what they do is imported after those are read."""

from __future__ import annotations

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
    parser.add_argument("--verbose", "-v", action="store_true", help="compare predicted with measured times at the end")
    parser.add_argument("--allow-other-bits", action="store_true",
                        help="resume on another processor or with other versions or kernels; results agree to rounding")
    options = parser.parse_args(list(arguments))
    run = find_run(options.run)
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; it must be at least 1.")
    from ngsgd.launcher.commands import train as service

    return service.resume(run, quiet=options.quiet, verbose=options.verbose, address=options.address, num_workers=options.workers,
                          accept_changed_config=options.accept_changed_config, trust=options.trust,
                          allow_other_bits=options.allow_other_bits)


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


def _parser(command: str) -> Parser:
    parser = Parser(command)
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the result")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    return parser
