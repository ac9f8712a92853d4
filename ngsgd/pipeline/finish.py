"""End of a run: combination of the last models, the final model on disk, its WER."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import nn

from ngsgd.asr.bundle_files import INDEX
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode.evaluation import DecodingResult
from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.models.growing import Stages, set_stage
from ngsgd.models.statistics import model_for
from ngsgd.phase import Phase
from ngsgd.pipeline.adaptation import refined_by_network
from ngsgd.pipeline.combination import Candidate, HeldOut, candidates, generalized, normalize_stddev, running_mean
from ngsgd.pipeline.prepare import PreparedData
from ngsgd.pipeline.score import decode_and_score, log_likelihoods
from ngsgd.pipeline.services import Services
from ngsgd.runs.final_model import load_final, save_final
from ngsgd.runs.recognizer import keep_recognizer
from ngsgd.runs.run_folder import RunFolder
from ngsgd.schedules import Schedule
from ngsgd.tasks.frame_scores import score_subset
from ngsgd.tasks.frames import stages_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.records import FinalReport
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore


def finish(folder: RunFolder, data: PreparedData, spec: SpeechTaskSpec, checkpoints: CheckpointStore, end: Checkpoint,
           services: Services) -> FinalReport:
    """Combine the last models, write and decode the final model, and plot the learning curve."""
    config, reader = spec.config, spec.frames()
    model, scratch = model_for(config, reader), model_for(config, reader)
    for one in (model, scratch):
        set_stage(one, stages_of(config, spec.shards()).at(end.progress.outer_iter))
    missing = checkpoints.missing_candidates(end.progress.outer_iter)
    if missing:
        services.report("the models of outer iterations "
                        f"{', '.join(str(one + 1) for one in missing)} are missing in "
                        f"{checkpoints.models}; the final model is combined from the others")
    services.report(Phase("combining the last models"))
    checkpoints.layout.load(model, final_parameters(config, end, checkpoints, scratch, reader, services.report))
    services.report(Phase("writing final/"))
    save_final(folder, config, model, reader)
    # the model that users will load, read from disk
    model, prior_P = load_final(folder)
    result = decode_final(folder, config, data, model, prior_P, services.report)
    services.report(Phase("drawing the learning curve"))
    services.plot(folder.events, folder.learning_curve)
    takes_audio = config.features.kind != "given"
    files = {"run folder": folder.path, "final model": folder.final,
             **({"recognizer": folder.final / INDEX} if takes_audio else {}), "per-utterance": folder.decode / "test.per_utt.txt",
             "learning curve": folder.learning_curve, "events": folder.events}
    return FinalReport(result.test, result.valid,
                       score_subset(model, reader.diagnostic("train")), score_subset(model, reader.diagnostic("valid")),
                       end.progress.frames_processed, end.progress.elapsed_s,
                       {label: str(path) for label, path in files.items() if path.exists()},
                       interval=asdict(result.test_interval))


def decode_final(folder: RunFolder, config: RunConfig, data: PreparedData, model: nn.Module,
                 prior_P: npt.NDArray[np.float64], report: Callable[[str], None]) -> DecodingResult:
    """Decode valid and test with the final model; write decode/ and the recognizer in final/."""
    corpus = refined_corpus(config, data, model, prior_P, report)
    result = decode_and_score(folder, config, corpus, model, prior_P, report)
    keep_recognizer(folder, config, corpus, result)
    return result


def refined_corpus(config: RunConfig, data: PreparedData, model: nn.Module, prior_P: npt.NDArray[np.float64],
                   report: Callable[[str], None]) -> Corpus:
    """Return the corpus; with fMLLR the network adapts valid and test to their speakers again."""
    if data.adaptation is None:
        return data.corpus

    def scores(features_TD: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return log_likelihoods(FrameSet.of_utterance(features_TD), config.egs, model, prior_P)[0]
    return refined_by_network(config, data.corpus, data.unadapted, data.adaptation, scores, report)


def wanted_for_combination(config: RunConfig, schedule: Schedule, stages: Stages) -> tuple[int, ...]:
    """Outer iterations whose complete models a run must keep for the final combination."""
    ships_one = config.combination.kind == "none" or config.outer.ema_decay > 0
    found = () if ships_one else candidates(schedule, config.combination.max_models)
    return tuple(outer_iter for outer_iter in found if stages.at(outer_iter) == stages.at(schedule.num_outer_iters - 1))


def final_parameters(config: RunConfig, end: Checkpoint, store: CheckpointStore, scratch: nn.Module, reader: EgsReader,
                     report: Callable[[str], None]) -> Vector:
    """Return the final parameters: the moving average if it exists, else the combination."""
    kept = store.kept()
    if "ema" in end.buffers or config.combination.kind == "none" or not kept:
        return end.buffers.get("ema", end.parameters)
    models = [Candidate(outer_iter, partial(store.load_model, outer_iter)) for outer_iter in kept]
    held_out = HeldOut(scratch, reader.diagnostic("valid"))
    combine = running_mean if config.combination.kind == "mean" else generalized
    found = combine(models, held_out)
    objf, newest = f"{found.objf:.3f}", f"{found.objf_newest:.3f}"
    if objf != newest:
        kind = "mean" if found.chosen == "mean" else "weighted mean"
        report(f"final model: {kind} of the last {counted(found.num_models, 'model')}, valid objf {objf}; "
               f"the last model alone has {newest}")
    return normalize_stddev(found.parameters, scratch) if config.combination.kind == "generalized" else found.parameters
