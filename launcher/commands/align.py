"""`ngsgd align`: align recordings with their text, or write the HMM states of a data set."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import make_directories, read_regular_bytes, write_text
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.launcher.commands.transcribe import ENDINGS, listed_names
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.config_builder import require_paths, require_writable
from ngsgd.launcher.screen import say, with_progress
from ngsgd.masking import printable
from ngsgd.object_storage.urls import is_url
from ngsgd.runs.run_folder import RunFolder, find_model, find_run, require_unchanged

if TYPE_CHECKING:
    from ngsgd.asr.transcript import Alignment

# file suffix of each format
_ENDINGS = {"phone-ctm": ".phones.ctm", **{name: ENDINGS[name] for name in ("ctm", "textgrid", "json", "srt")}}
_MAX_TEXT_BYTES = 1 << 26
_EPILOG = ("A data directory: ngsgd align MODEL --data DIR. States of a data set: ngsgd align --output FILE [--model RUN] "
           "[KEY=VALUE ...]. Exit codes: 0: all recordings were aligned; 3: some were not; 2 and 6: none, because of a "
           "wrong argument or an unusable model")


def command(arguments: Sequence[str]) -> int:
    parser = Parser("align", epilog=_EPILOG)
    parser.add_argument("--output", "-o", metavar="PATH", help="folder of alignments, one file per recording (default: "
                        "stdout); of states: a file, .npz or text lines \"utterance pdf pdf ...\"")
    parser.add_argument("--format", choices=tuple(_ENDINGS), help="format of alignments (default: ctm)")
    parser.declare({
        "--data DIR": (Path, "Kaldi data directory, or folder with lhotse's manifests, to align with MODEL"),
        "--lexicon FILE": (Path, "pronunciations in the phones of MODEL, in addition to its own"),
        "--quiet -q": "print alignments and failures only",
        "--model RUN": "run whose final model, data and settings are used for states (default: flat start)",
        "--trust": f"with a model: {TRUST}"})
    options = parser.parse_with_settings(
        arguments, "MODEL: a run folder, its name or a bundle; AUDIO: a recording; TEXT: a file with its words. For "
                   "states: settings of ngsgd train, such as recipe=fsdd data.source=PATH",
        metavar="MODEL AUDIO TEXT | KEY=VALUE")
    if options.data is not None or (options.overrides and "=" not in options.overrides[0]):
        return _align_text(options)
    if unused := [f"--{name}" for name in ("format", "lexicon", "quiet") if getattr(options, name)]:
        raise ConfigError(f"{unused[0]} applies to the alignment of recordings; give MODEL AUDIO TEXT, or MODEL "
                          "and --data DIR.")
    if not options.output:
        raise ConfigError("--output FILE is needed for the states of a data set; to align a "
                          "recording give MODEL AUDIO TEXT.")
    return _label(options)


def _align_text(options: argparse.Namespace) -> int:
    """Align a recording, or the utterances of a data directory, with their text."""
    expected = "MODEL" if options.data is not None else "MODEL AUDIO TEXT"
    given = options.overrides
    problems = []
    if len(given) != len(expected.split()):
        problems.append(f"{counted(len(given), 'argument')} given ({' '.join(given)}); give {expected}"
                        f"{' with --data DIR' if options.data is not None else ', or MODEL --data DIR'}.")
    if options.model:
        problems.append("--model is the run of states; give the model of recordings as the first argument.")
    format_name = options.format or "ctm"
    if options.data is not None and not options.output and format_name in ("textgrid", "srt"):
        problems.append(f"--format {format_name} needs a file for each utterance; give a folder with --output.")
    if problems:
        raise ConfigError(problems)
    if options.output:
        require_writable("--output", Path(options.output))
    model = find_model(given[0])
    from ngsgd.asr.aligner import Aligner
    from ngsgd.runs.recognizer import open_bundle
    words = () if options.data is not None else _words(Path(given[2]))
    aligner = Aligner(open_bundle(model, trust=options.trust), lexicon=options.lexicon)
    if options.data is None:
        path = Path(given[1])
        _write(path.stem, aligner.align(path, words), format_name, options)
        return EXIT_OK
    from ngsgd.asr import test_set
    scored = test_set.read(aligner.bundle, options.data)
    everything = list(zip(scored.utt_ids, scored.logliks, scored.texts, strict=True))
    num_failed = 0
    for utt_id, loglik_TP, text in with_progress(everything, len(everything), "aligning"):
        try:
            _write(utt_id, aligner.align_scores(loglik_TP, text, utt_id), format_name, options)
        except DataError as error:
            num_failed += 1
            say(f"ngsgd: {utt_id}: {error}")
    if not options.quiet:
        say(f"{counted(len(everything) - num_failed, 'utterance')} aligned, {num_failed} failed")
    return DataError.exit_code if num_failed else EXIT_OK


def _words(path: Path) -> tuple[str, ...]:
    try:
        return tuple(read_regular_bytes(path, _MAX_TEXT_BYTES).decode("utf-8-sig").split())
    except (OSError, ValueError) as error:
        raise DataError(f"the text {path} cannot be read ({getattr(error, 'strerror', None) or error}); give a text "
                        "file in UTF-8 with the words of the recording.") from error


def _write(name: str, alignment: Alignment, format_name: str, options: argparse.Namespace) -> None:
    """Write an alignment to stdout or a file, and the deviations from the text to stderr."""
    from ngsgd.asr.transcript import FORMATS
    text = FORMATS[format_name](alignment, name)
    if options.output:
        make_directories(Path(options.output))
        write_text(Path(options.output) / f"{name.replace('/', '_')}{_ENDINGS[format_name]}", text)
    else:
        print(printable(text), end="", flush=True)
    for title, found in () if options.quiet else (
            ("in the text, not spoken", alignment.not_spoken), ("spoken, not in the text", alignment.not_in_text),
            ("without a pronunciation", alignment.unknown)):
        if found:
            places = [f"{one.word or '-'} {one.start_s:.2f} s" for one in found]
            say(f"{name}: {title}: {listed_names(places)}")


def _label(options: argparse.Namespace) -> int:
    """Write the HMM states of all frames of a data set to a file."""
    if options.model and options.overrides:
        raise ConfigError(f"--model uses the settings of its run; remove {' '.join(options.overrides)}.")
    output = Path(options.output)
    require_writable("--output", output.parent)
    folder = RunFolder.open(find_run(options.model)) if options.model else None
    if folder is None:
        config = compose.compose(options.overrides)
        require_paths(config)
        if is_url(config.data.source):
            raise ConfigError(f"data.source is {config.data.source}, and ngsgd align reads folders "
                              "of this machine; copy the data to a folder, and set data.source to it.")
    from ngsgd.asr.corpora import alignments
    from ngsgd.pipeline import align
    from ngsgd.runs.config_file import read_config
    if folder is not None:
        config = read_config(folder.config)
        require_unchanged(folder.config)
    try:
        cache = align.cache_folder(config)
        labels = (align.label(config, folder, cache, print, trust=options.trust) if folder
                  else alignments.read(align.make(config, cache, print)).pdf_T)
        alignments.write(output, labels)
    except OSError as error:
        raise DataError(f"the alignment could not be written to {error.filename or output} "
                        f"({error.strerror or error}); make room, or choose another place.") from error
    print(f"alignment {output}; use it with data.alignment={output}")
    return EXIT_OK
