"""Inputs of sequence objectives: initial model, denominator, and archives of complete utterances.

All of them are stored in the run folder or the cache, so a run resumes even if the run it started
from is gone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn

from ngsgd import interface
from ngsgd.asr import denominators
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import CheckpointError, ConfigError
from ngsgd.files import keep_digest, matches_digest, new_directory, new_file, sha256
from ngsgd.phase import Phase
from ngsgd.pipeline.services import Report
from ngsgd.runs.final_model import open_final
from ngsgd.runs.run_folder import RunFolder, folder_of_model
from ngsgd.sequence.archives import Outputs, SequenceReader, prepare_sequences
from ngsgd.sequence.objectives import Denominator
from ngsgd.tasks.speech import SequenceData, SpeechTaskSpec
from ngsgd.training.parameter_vector import FlatLayout, Vector


def require_init_model(config: RunConfig) -> None:
    """Raise if the required initial model does not exist or its run has not ended."""
    if config.objective.kind not in ("ce", "lfmmi") and not config.init_model:
        raise ConfigError(f"objective.kind is {config.objective.kind}, which needs an initial "
                          "model trained with cross-entropy; set init_model=RUN.")
    if config.init_model and not (folder_of_model(config.init_model) / "final" / "model.json").is_file():
        raise ConfigError(f"init_model is {config.init_model}, which has no final model yet; "
                          f"finish it with: {interface.resume(config.init_model)}")


def keep_init_model(config: RunConfig, folder: RunFolder) -> None:
    """Copy the initial model to the folder of a new run."""
    if config.init_model:
        with new_directory(folder.init_model) as temporary:
            shutil.copytree(folder_of_model(config.init_model) / "final", temporary, dirs_exist_ok=True)


def starting_parameters(config: RunConfig, folder: RunFolder, model: nn.Module) -> Vector:
    """Parameters of the initial model, or random ones."""
    layout = FlatLayout.of(model)
    if not config.init_model:
        return layout.flatten(model.state_dict())
    start, _ = open_final(folder.init_model, own=config.model)
    stored = {id(value) for value in start.state_dict(keep_vars=True).values()}
    # buffers that are not parameters, such as the input transform
    if FlatLayout.of(start) != layout or not all(
            torch.equal(a, b) for a, b in zip(start.buffers(), model.buffers(), strict=True)
            if a.is_floating_point() and id(a) not in stored):
        raise ConfigError(f"init_model is {config.init_model}, whose model has other layers or "
                          "another input transform than this run; train with the same recipe, "
                          "model=, features. and egs. settings.")
    return layout.flatten(start.state_dict())


def sequence_data(config: RunConfig, folder: RunFolder, corpus: Corpus, cache_root: Path,
                  report: Report) -> SequenceData | None:
    """Prepare the data of a sequence objective; None for objectives of single frames."""
    if config.objective.kind == "ce":
        return None
    if folder.denominator.exists():
        try:
            if not matches_digest(folder.denominator):
                raise ValueError("its checksum does not match")
            denominator = Denominator.from_arrays(load_file(folder.denominator))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{folder.denominator} is damaged ({error}); remove it and "
                                  f"{folder.denominator.with_suffix('.sha256').name}, then resume "
                                  "to create it again from the data.") from error
    else:
        report(Phase("building the denominator graph"))
        if config.objective.kind == "lfmmi" and not config.objective.use_priors:
            prior_P = uniform_priors(corpus.num_pdfs)
        elif config.init_model:
            prior_P = open_final(folder.init_model, own=config.model)[1]
        else:
            # one more frame for each class, so that no prior is 0
            count_P = np.bincount(corpus.train.frames.pdf_T, minlength=corpus.num_pdfs) + 1.0
            prior_P = np.asarray(count_P / count_P.sum())
        denominator = denominators.of_corpus(corpus, config.objective, config.decode, prior_P)
        with new_file(folder.denominator) as temporary:
            arrays = denominator.arrays().items()
            save_file({name: np.ascontiguousarray(array) for name, array in arrays}, temporary)
            # first: a process may be killed between the two
            keep_digest(folder.denominator, sha256(temporary))
    graph = denominator.graph
    outputs = Outputs(config.objective.frame_subsampling, config.objective.tolerance_frames)
    directory = prepare_sequences(corpus.train.frames, graph, digest=corpus.digest, outputs=outputs,
                                  samples_per_iter=config.egs.samples_per_iter, chunk_frames=config.objective.chunk_frames,
                                  cache_root=cache_root, report=report)
    report(f"objective {config.objective.kind}: denominator of {counted(graph.num_states, 'state')} and "
           f"{counted(len(graph.source_A), 'arc')}")
    return SequenceData(str(directory), denominator)


def report_skipped(spec: SpeechTaskSpec, report: Report) -> None:
    """Report how many training sequences cannot be used, if any."""
    shards = spec.shards()
    if isinstance(shards, SequenceReader) and shards.index.num_left_out:
        total = sum(shards.index.num_sequences) + shards.index.num_left_out
        report(f"{shards.index.num_left_out} of {counted(total, 'training sequence is', 'training sequences are')} "
               "skipped, because their labels have no path through the denominator graph")


def uniform_priors(num_pdfs: int) -> npt.NDArray[np.float64]:
    """Priors of a model whose outputs are scores."""
    return np.full(num_pdfs, 1.0 / num_pdfs)
