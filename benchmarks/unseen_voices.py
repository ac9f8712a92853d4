"""WER of finished runs on voices that no training set uses.

    python recipes/digits/local/unseen_voices.py DATA
    python benchmarks/unseen_voices.py DATA RUN...

DATA holds Kaldi data directories; a speaker's name begins with f for women and m for men. Scale and word penalty are those
that each run chose on its validation set. One row for each run and data directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ngsgd.asr import speech_set
from ngsgd.asr.corpora import data_dir
from ngsgd.asr.decode import scoring
from ngsgd.asr.decode.evaluation import build_graph, decode_set
from ngsgd.asr.decode.scoring import WordErrors
from ngsgd.asr.lang import graphs
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.pipeline.run import Run, build_run
from ngsgd.pipeline.runs.final_model import load_final
from ngsgd.pipeline.runs.run_folder import RunFolder, find_run
from ngsgd.pipeline.runs.saved_config import read_config
from ngsgd.pipeline.score import log_likelihoods

NONE = WordErrors(0, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of data directories")
    parser.add_argument("runs", nargs="+", help="folders of finished runs")
    options = parser.parse_args()
    folders = sorted(path.parent for path in options.data.glob("*/text"))
    for index, name in enumerate(options.runs):
        place = RunFolder.open(find_run(name))
        run = build_run(read_config(place.config), folder=place, allow_other_bits=True)
        assert isinstance(run, Run)
        for folder in folders:
            errors = errors_by_speaker(run, folder)
            columns = ["run", "set", "all", "women", "men", *errors]
            if index == 0 and folder == folders[0]:
                print("|".join(["", *columns, ""]) + "\n" + "|---" * len(columns) + "|")
            groups = [errors.values(), *([one for voice, one in errors.items() if voice.startswith(sex)] for sex in "fm")]
            cells = [sum(group, NONE) for group in (*groups, *([one] for one in errors.values()))]
            print("|".join(["", run.folder.path.name, folder.name, *(f"{one.wer:.1f}" for one in cells), ""]), flush=True)


def errors_by_speaker(run: Run, folder: Path) -> dict[str, WordErrors]:
    """The errors of each speaker of a data directory, decoded with the run's final model."""
    config, metrics = run.config, run.metrics
    model, prior_P = load_final(run.folder)
    listed = data_dir.read(folder, given_features=False)
    speech: SpeechSet = speech_set.build(data_dir.spoken(listed, config.features), config.features)
    language = run.data.corpus.language
    graph = graphs.with_word_penalty(build_graph(language, config.decode), metrics["word_penalty"])
    found = decode_set(graph, config.decode, metrics["acoustic_scale"], log_likelihoods(speech, config.egs, model, prior_P),
                       language.num_pdfs)
    _, rows = scoring.score(speech.texts, found, speech.frames.utt_ids)
    errors: dict[str, WordErrors] = {}
    for row, speaker in zip(rows, speech.speakers, strict=True):
        errors[speaker] = errors.get(speaker, NONE) + row.errors
    return errors


if __name__ == "__main__":
    main()
