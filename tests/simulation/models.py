"""The models of a trial, computed a second time from its ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np

from ngsgd.ops.compression import decode, encode
from ngsgd.schedules import Shard
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.sites.contribution import from_bytes
from ngsgd.training.task import seeded_model
from ngsgd.training.validation.checksums import digest
from tests.recomputation import Line, Recomputation, Round, Start, Trained, Vector
from tests.simulation.task import EXAMPLES, objective, rate_of, trained
from tests.simulation.trial import Trial

# rounding of about ten steps in float32, whose order and fused operations depend on the processor
_TOLERANCE = 1e-5


def problems(trial: Trial) -> Iterator[str]:
    """Every committed model, and the final one, must follow from the ledger."""
    task, config = trial.task, trial.config
    model = seeded_model(task, config.seed)
    layout = FlatLayout.of(model)
    recomputed = Recomputation(config, (task.grid.num_archives, task.grid.shards_per_archive), layout.flatten(model.state_dict()),
                               list(layout.by_name().items()), lambda line, start: _job(trial, recomputed, line, start),
                               lambda number: _round(trial, number))
    recomputed.compares_deltas = not trial.faults and config.sites.compression == "none"
    if found := recomputed.read(trial.ledger_lines()):
        yield from found
        return
    kept = [int(path.stem.removeprefix("iter-")) for path in (trial.folder / "models").glob("iter-*.safetensors")]
    if config.combination.kind == "none" or config.outer.ema_decay:
        kept = []
    yield from _seeds(trial)
    if trial.final != recomputed.digest(max(recomputed.finals(kept), key=objective)):
        yield f"the final model is {trial.final[:12]}, which does not follow from the ledger"


def _round(trial: Trial, number: int) -> Round:
    """A closed round of the sites, from its objects."""
    assert trial.sites
    objects, sites = trial.sites.objects, trial.config.sites
    closed = json.loads(objects[f"rounds/{number:06d}/closed.json"][0])
    deltas, own = [], None
    for site in sorted(closed["digests"]):
        content = objects[f"rounds/{number:06d}/{site}.safetensors"][0]
        if hashlib.sha256(content).hexdigest() != closed["digests"][site]:
            raise AssertionError(f"round {number} has another delta of site {site}")
        delta, about = from_bytes(content, trial.sites.layout)
        deltas.append((sites.counts[site], delta))
        if site == sites.name:
            own = delta, about.outer_iter
    return Round(deltas, own, sites.name in closed["rejected"])


def _seeds(trial: Trial) -> Iterator[str]:
    """Random numbers of two jobs differ, and those of two attempts at a job do not."""
    seeds: dict[int, tuple[int, int]] = {}
    for place, found in trial.task.seeds.items():
        if len(found) > 1:
            yield f"attempts at job {place[1]} of outer iteration {place[0]} have the seeds {sorted(found)}"
        for seed in found:
            if seed in seeds:
                yield f"jobs {place} and {seeds[seed]} (outer iteration, job) have the same random numbers"
            seeds[seed] = place


def _job(trial: Trial, run: Recomputation, line: Line, start: Start) -> Trained:
    """The result of a job: of correct training, or as a fault altered it."""
    found, where = [], f"job {line['job']} of outer iteration {line['outer_iter']}"
    num_minibatches = sum(_size(trial, piece) for piece in line["pieces"]) - sum(_size(trial, piece) for piece in line["left"])
    if line["num_frames"] != EXAMPLES * num_minibatches:
        found.append(f"{where} has the weight {line['num_frames']}, and processed {num_minibatches} minibatches")
    altered = trial.history.altered.get((line["outer_iter"], line["job"], line["worker"], line["digest"]))
    if altered:
        # a silent divergence is rejected only if the average becomes worse, and a code may lose it
        if line["event"] == "accepted" and (altered.what == "not finite" or (altered.what == "diverged" and not run.codec)):
            found.append(f"{where} was accepted, and its result {altered.what}")
        return Trained(altered.sent, altered.own, altered.fisher, altered.what != "not finite", found)
    rate = start.lr if trial.scenario.has_workers else rate_of(start.lr, start.progress)
    x, fisher = trained(start.parameters, start.fisher, rate, line["pieces"], num_minibatches, trial.task)
    sent, own = _sent(run, x, start, line["outer_iter"])
    if trial.scenario.has_workers:
        result = trial.history.trained[line["digest"]]
        # a code may round a difference up
        if not run.codec and not np.allclose(result.sent, sent, rtol=0.0, atol=_TOLERANCE):
            found.append(f"the result of {where} is not that of SGD from its start")
        sent, own = result.sent, result.own
    elif line["digest"] != f"{digest(sent):016x}":
        found.append(f"the result of {where} does not follow from its start")
    # momentum and jobs that ran ahead may continue from a result that diverged
    if line["event"] == "rejected" and not any(fault.what.startswith("diverged") for fault in trial.world.occurred):
        found.append(f"{where} was rejected ({line['reason']}), and its result was good")
    return Trained(sent, own, fisher if run.keeps_fisher else None, problems=found)


def _size(trial: Trial, piece: Sequence[int | None]) -> int:
    archive, frame, _, _, first, stop = piece
    assert archive is not None and frame is not None and first is not None
    return (trial.task.num_batches(Shard(archive, frame), 1) if stop is None else stop) - first


def _sent(run: Recomputation, x: Vector, start: Start, outer_iter: int) -> tuple[Vector, Vector | None]:
    """The vector that a job sends, and the one that its slot keeps."""
    move = x - start.parameters
    if run.codec:
        if start.own is not None:
            move = move + (start.own - decode(encode(start.own, run.codec)))
        sent = decode(encode(move, run.codec))
        return (sent if run.sends_delta else sent + start.model), move
    if run.sends_delta:
        return move, move
    return (x[run.fragment(outer_iter)], x) if run.outer.kind == "streaming" else (x, None)
