"""Exchange with Kaldi: export of models, data, alignments and examples; import of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.features.cmvn import GLOBAL, mean_and_deviation
from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.lang.language import Language
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import ModelConfig, OptimizerConfig, RunConfig
from ngsgd.data.examples import NO_FRAME
from ngsgd.data.nnet3_examples import Nnet3Example, write_nnet3_examples
from ngsgd.data.reader import EgsReader
from ngsgd.errors import CheckpointError, ConfigError, DataError
from ngsgd.files import read_json, write_text
from ngsgd.models.layers import Window
from ngsgd.models.nnet3.network import describe, rebuild
from ngsgd.models.nnet3.raw_models import Updates, model_from_bytes, to_text, vector_from_bytes, vector_to_text
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.runs.final_model import load_final, write_final
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.worker import make_optimizer


def export_model(folder: RunFolder, training: RunConfig, output: Path, *, trust: bool) -> list[Path]:
    """Write the final model as nnet3 text, and its priors."""
    model, prior_P = load_final(folder, trust=trust)
    about = read_json(folder.final / "model.json")
    window = Window(about["left_context"], about["right_context"], about["feature_dim"], about["side_dim"])
    config = ModelConfig(**about["model"])
    network = describe(model, config, window, has_softmax=about["objective"] != "lfmmi")
    write_text(output / "final.raw", to_text(network, updates_of(model, training)))
    write_text(output / "priors.vec", vector_to_text(prior_P))
    return [output / "final.raw", output / "priors.vec"]


def updates_of(model: nn.Module, config: RunConfig) -> dict[str, Updates]:
    """Settings of the last jobs for each layer, with the effective learning rate."""
    optimizer = make_optimizer(model, config.optimizer, config.schedule.lr_final, 1.0)
    is_natural = isinstance(optimizer, NGSGD)
    if isinstance(optimizer, NGSGD):
        optimizer.detach()
    unused = asdict(OptimizerConfig())
    return {group["name"]: Updates(
        group["lr"] * group["lr_factor"], group["lr_factor"], group["max_change"], group["weight_decay"], is_natural,
        *(group.get(key, unused[key]) for key in ("rank_in", "rank_out", "update_period", "num_samples_history", "alpha")))
        for group in optimizer.param_groups}


def import_model(content: bytes, priors: bytes, output: Path) -> None:
    """Write a final model from an nnet3 model and its priors; the default is equal priors."""
    network = model_from_bytes(content)
    made = rebuild(network)
    prior_P = vector_from_bytes(priors).astype(np.float64) if priors else np.full(made.num_classes, 1.0 / made.num_classes)
    if len(prior_P) != made.num_classes or prior_P.min() <= 0.0:
        raise DataError(f"The priors are {len(prior_P)} numbers with minimum {prior_P.min():g}, "
                        f"but the model has {made.num_classes} classes; write one number above 0 for each class.")
    about = {"model": asdict(made.config), "num_inputs": made.window.num_inputs,
             "num_classes": made.num_classes, **made.window._asdict(), "priors": prior_P.tolist(),
             "stage": None, "class_counts": [],
             "objective": "ce" if network.has_softmax else "lfmmi"}
    output.mkdir(parents=True, exist_ok=True)
    write_final(output / "final", made.model, about, made.transform)


def export_data(folder: RunFolder, config: RunConfig, corpus: Corpus, output: Path) -> list[Path]:
    """Write a data directory of each set, and the lexicon."""
    if config.adaptation.lda_dim:
        raise ConfigError(f"{folder.path} has adapted features (adaptation.lda_dim), and Kaldi "
                          "data directories hold features before adaptation; export the data of a run without it.")
    sets = corpus.sets
    for name, speech in sets.items():
        export_set(speech, output / name, ivector_period=config.ivectors.period)
    return [*(output / name for name in sets),
            *export_language(corpus.language, sets, output, of_graph=bool(config.data.graph))]


def export_language(language: Language, sets: Mapping[str, SpeechSet], output: Path, *, of_graph: bool) -> list[Path]:
    """Write lexicon and alignment; the table of pdfs is also next to the alignment of each set."""
    topology = language.topology
    write_text(output / "lexicon.txt", "".join(f"{word} {' '.join(phones)}\n" for word, spoken in topology.lexicon.items()
                                               for phones in spoken))
    names = language.pdf_names(of_graph=of_graph)
    table = "".join(f"{pdf} {name}\n" for pdf, name in enumerate(names))
    for folder in (output, *(output / name for name in sets)):
        write_text(folder / alignments.PDF_TABLE, table)
    tables.write_int_vectors(output / "ali.ark", (
        aligned for speech in sets.values() if speech.is_aligned
        for aligned in zip(speech.frames.utt_ids, speech.split_pdfs(), strict=True)))
    return [output / name for name in ("lexicon.txt", alignments.PDF_TABLE, "ali.ark")]


def export_set(speech: SpeechSet, place: Path, *, ivector_period: int) -> None:
    """Write features before normalization with their statistics, i-vectors, labels and tables."""
    place.mkdir(exist_ok=True)
    utt_ids, side = speech.frames.utt_ids, speech.frames.side
    tables.write_matrices(place / "feats.ark", ((utt_id, speech.raw(u)) for u, utt_id in enumerate(utt_ids)))
    stats = speech.cmvn.stats if speech.cmvn else {}
    if GLOBAL in stats:
        # of all training speech, with online means, for apply-cmvn-online, which only subtracts
        # means; the fixed scale is for transform-feats
        tables.write_matrix(place / "global_cmvn.stats", stats[GLOBAL])
        scale_DD = np.diag(1.0 / mean_and_deviation(stats[GLOBAL])[1]).astype(np.float32)
        tables.write_matrix(place / "scale.mat", scale_DD)
        spoken: dict[str, list[str]] = {}
        for utt_id, speaker in zip(utt_ids, speech.speakers, strict=True):
            spoken.setdefault(speaker, []).append(utt_id)
        rows = [f"{speaker} {' '.join(names)}\n" for speaker, names in sorted(spoken.items())]
        write_text(place / "spk2utt", "".join(rows))
    elif stats:
        tables.write_matrices(place / "cmvn.ark", sorted(stats.items()))
    if speech.is_aligned:
        tables.write_int_vectors(place / "ali.ark", zip(utt_ids, speech.split_pdfs(), strict=True))
    if side is not None:
        rows_of = [side.rows_RS[row_T[0]:row_T[-1] + 1] for row_T in np.split(side.row_T, speech.frames.offsets[1:-1])]
        tables.write_matrices(place / "ivector_online.ark", zip(utt_ids, rows_of, strict=True))
        write_text(place / "ivector_period", f"{ivector_period}\n")
    lines = {"text": [" ".join(words) for words in speech.texts], "utt2spk": list(speech.speakers)}
    for table, values in lines.items():
        write_text(place / table, "".join(f"{utt_id} {value}\n" for utt_id, value in sorted(zip(utt_ids, values, strict=True))))


def export_egs(folder: RunFolder, output: Path, num_archives: int) -> list[Path]:
    try:
        directory = str(read_json(folder.data)["egs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder.data} is damaged ({type(error).__name__}: {error}); restore it.") from error
    reader = EgsReader(Path(directory))
    written = []
    for archive in range(min(num_archives, reader.info.num_archives)):
        path = output / f"egs.{archive + 1}.ark"
        write_nnet3_examples(path, _examples(reader, archive))
        written.append(path)
    return written


def _examples(reader: EgsReader, archive: int) -> Iterator[Nnet3Example]:
    info = reader.info
    for index in range(info.num_examples[archive]):
        example = reader.example(archive, index)
        # an example at the end of an utterance is shorter
        num_frames = int((example.pdf_F != NO_FRAME).sum())
        width = info.left_context + num_frames + info.right_context
        yield Nnet3Example(f"{example.utt_id}-{archive}-{index}", example.features_WD[:width], info.left_context,
                           example.pdf_F[:num_frames], example.weight_F[:num_frames], info.num_classes,
                           # an example has a single i-vector; that of its middle frame is used
                           None if example.side_FS is None else example.side_FS[num_frames // 2])
