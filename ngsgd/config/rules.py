"""Checks of a configuration: each value against its range, and rules between options."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any

from ngsgd.config.option import Problem, choices_of, shown
from ngsgd.config.run import RunConfig
from ngsgd.config.sections.data import DataConfig
from ngsgd.config.sections.optimizer import OF_SUMMED_GRADIENTS, WITHOUT_MEAN
from ngsgd.errors import ConfigError
from ngsgd.object_storage.urls import check_url
from ngsgd.schedules import DropoutSchedule

# NumPy, torch and files store no larger integer
_LARGEST_INT = 2**63 - 1
# A folder's name has at most 255 bytes; that of a run also holds its time and a number
_MAX_NAME_BYTES = 200
# names of sites are parts of keys in object storage
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
# options with which sites would not agree on plans or models: their default, and the reason
_PLAN, _LAYERS = "all sites must have the same plan", "all sites must have the same layers"
_ALIKE: dict[str, tuple[object, str]] = {
    "failure.policy": ("retry", _PLAN), "cluster.elastic": (False, _PLAN),
    "schedule.load_balancing": ("none", _PLAN),
    "model.add_layers_period": (0, _LAYERS), "model.num_subclasses": (0, _LAYERS),
    "outer.overlap": (False, "jobs must start from the average of their site"),
    "outer.ema_decay": (0.0, "sites exchange no moving averages")}
# the only sampling rate of these corpora
_RATE_HZ = 8000


def check(config: RunConfig) -> list[str]:
    """Return one message per wrong value; an empty list if the configuration can run."""
    return [one.message for one in problems_of(config)]


def problems_of(config: RunConfig, wrong: Sequence[Problem] = ()) -> list[Problem]:
    """Return everything that is wrong.

    `wrong` are the problems of values that could not be read; `config` has their defaults. A rule
    about one of them would report a value that nobody wrote, so it is dropped.
    """
    unknown = [option for one in wrong for option in one.options]
    bad = [one for one in _problems_of_values(config) if not any(map(one.is_about, unknown))]
    for problem in bad:
        config = _with_default(config, problem.options[0].split("."))
    unknown += [option for one in bad for option in one.options]
    found = [problem for rule in _RULES for problem in rule(config)]
    return [*wrong, *bad, *(problem for problem in found if not any(map(problem.is_about, unknown)))]


def _with_default(section: Any, names: Sequence[str]) -> Any:
    """Replace an option that is out of its range, because rules compute with values."""
    name, *rest = names
    if rest:
        return replace(section, **{name: _with_default(getattr(section, name), rest)})
    [spec] = (spec for spec in fields(section) if spec.name == name)
    return replace(section, **{name: spec.default})


def check_values(config: RunConfig) -> list[str]:
    """Return one message per value outside its range, without the rules between options."""
    return [problem.message for problem in _problems_of_values(config)]


def _problems_of_values(section: Any, prefix: str = "") -> Iterator[Problem]:
    for spec in fields(section):
        value = getattr(section, spec.name)
        if is_dataclass(value):
            yield from _problems_of_values(value, f"{prefix}{spec.name}.")
        else:
            yield from _check_value(section, f"{prefix}{spec.name}", spec)


def _check_value(section: Any, path: str, spec: Field[Any]) -> Iterator[Problem]:
    value, choices = getattr(section, spec.name), choices_of(type(section), spec.name)
    low, high, above = (spec.metadata[name] for name in ("low", "high", "above"))
    if choices and value not in choices:
        yield Problem((path,), f"{path} is {value!r}; choose one of {', '.join(choices)}.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    # NaN passes every comparison below
    if math.isnan(value):
        yield Problem((path,), f"{path} is not a number; give a finite value.")
    elif low is not None and value < low:
        yield Problem((path,), f"{path} is {value}; it must be at least {low:g}.")
    elif above is not None and value <= above:
        yield Problem((path,), f"{path} is {value}; it must be greater than {above:g}.")
    elif high is None and isinstance(value, int) and value > _LARGEST_INT:
        yield Problem((path,), f"{path} is {value}; it must be at most {_LARGEST_INT}.")
    elif high is not None and value > high:
        yield Problem((path,), f"{path} is {value}; it must be at most {high:g}.")


def _wrong(c: RunConfig, options: tuple[str, ...], text: str) -> Problem:
    """Return the problem "OPTION is VALUE", of the first option, followed by `text`."""
    value = operator.attrgetter(options[0])(c)
    return Problem(options, f"{options[0]} is {shown(value)}{text}")


def _name(c: RunConfig) -> Iterator[Problem]:
    """The name is part of a folder's name, by which --continue and other commands find the run."""
    if not c.name:
        return
    has_separator = any(letter in c.name for letter in "/\\")
    if not c.name.isprintable() or has_separator or c.name[0] in ".- " or c.name[-1] == " ":
        yield Problem(("name",), f"name is {c.name!r} and becomes part of a folder's name; "
                      "remove / and \\, characters that cannot be printed, and . - or a space "
                      "at its beginning. output_dir=PATH sets another folder.")
    elif len(c.name.encode()) > _MAX_NAME_BYTES:
        yield Problem(("name",), f"name has {len(c.name.encode())} bytes; give at most {_MAX_NAME_BYTES}.")


def _ranges(c: RunConfig) -> Iterator[Problem]:
    for path in ("data.snr_db", "augment.noise_snr_db"):
        section, _, name = path.partition(".")
        low, high = (getattr(getattr(c, section), f"{name}_{end}") for end in ("low", "high"))
        if low > high:
            yield _wrong(c, (f"{path}_low", f"{path}_high"), f" and above {path}_high, {high}; swap them.")
    if c.schedule.lr_final > c.schedule.lr_initial:
        yield _wrong(c, ("schedule.lr_final", "schedule.lr_initial", "schedule.lr_schedule"),
                     f" and above schedule.lr_initial, {c.schedule.lr_initial}; the rate can only fall.")
    if c.schedule.num_jobs_final < c.schedule.num_jobs_initial:
        yield _wrong(c, ("schedule.num_jobs_final", "schedule.num_jobs_initial"), "; it must be at "
                     f"least schedule.num_jobs_initial, {c.schedule.num_jobs_initial}.")
    for name, value in (("tracking.curvature_frames", c.tracking.curvature_frames),
                        ("egs.num_diagnostic_frames", c.egs.num_diagnostic_frames)):
        if c.tracking.curvature_frames and value < 2:
            yield Problem((name, "tracking.curvature_frames"), f"{name} is {value}, and the "
                          "noise of a gradient needs at least 2 frames; raise it, or set tracking.curvature_frames=0.")


def _features(c: RunConfig) -> Iterator[Problem]:
    features, corpus = c.features, c.data.corpus
    if c.augment.changes_audio and features.kind == "given":
        yield Problem(("augment", "features.kind", "data.corpus"), "augment changes audio, and "
                      f"data.corpus={corpus} comes as features; use only SpecAugment (augment=spec).")
    if corpus in ("digits", "fsdd", "yesno") and features.sample_rate_hz != _RATE_HZ:
        yield _wrong(c, ("features.sample_rate_hz", "data.corpus"), f", and {corpus} is sampled "
                     f"at {_RATE_HZ} Hz; set {_RATE_HZ}.")
    if features.resample and corpus not in ("kaldi", "lhotse") and not c.data.added_dirs:
        yield _wrong(c, ("features.resample", "data.corpus"), ", but it has no effect with "
                     f"data.corpus={corpus}, whose audio is sampled at {_RATE_HZ} Hz; remove it, "
                     "or add audio with data.added_dirs.")
    if corpus == "an4" and features.kind != "given":
        yield _wrong(c, ("features.kind", "data.corpus"), ", and data.corpus=an4 comes as "
                     "cepstra, without audio; set features.kind=given.")
    if features.kind == "given" and corpus not in ("an4", "kaldi"):
        yield _wrong(c, ("features.kind", "data.corpus"), f", and data.corpus={corpus} comes as "
                     "audio; set features.kind=fbank or mfcc.")
    if features.kind == "given" and c.data.added_dirs:
        yield _wrong(c, ("features.kind", "data.added_dirs"), ", and data.added_dirs adds "
                     "audio; set features.kind=fbank or mfcc, or put all features into one data directory.")
    if features.cmvn == "given" and (features.kind != "given" or corpus != "kaldi"):
        yield _wrong(c, ("features.cmvn", "features.kind", "data.corpus"), " with features.kind "
                     f"{features.kind} and data.corpus {corpus}; cmvn.scp is a file of Kaldi data "
                     "directories with feats.scp (recipe=kaldi features.kind=given).")
    if features.kind == "mfcc" and features.num_ceps > features.num_mel_bins:
        yield _wrong(c, ("features.num_ceps", "features.num_mel_bins", "features.kind"),
                     f"; it can be at most features.num_mel_bins, {features.num_mel_bins}.")


def _data(c: RunConfig) -> Iterator[Problem]:
    if c.data.lm_order and (c.data.lm or c.data.graph):
        other = "data.lm" if c.data.lm else "data.graph"
        yield _wrong(c, ("data.lm_order", other), f", and {other} gives another language model; "
                     f"remove data.lm_order or {other}.")
    if c.data.num_leaves and c.data.graph:
        yield _wrong(c, ("data.num_leaves", "data.graph"), f", and data.graph={c.data.graph} has "
                     "its own states; remove one of the two.")
    for name in ("num_leaves", "lm_order"):
        if getattr(c.data, name) and c.decode.graph == "given":
            yield _wrong(c, ("decode.graph", f"data.{name}"), f", and data.{name} needs a graph "
                         f"made of the lexicon; remove decode.graph or data.{name}.")
    if c.adaptation.lda_dim and c.ivectors.dim:
        yield Problem(("adaptation.lda_dim", "ivectors.dim"), "adaptation.lda_dim and "
                      "ivectors.dim are both set; i-vectors are not made of adapted features: set one of them to 0.")
    if c.adaptation.lda_dim and c.data.graph:
        yield _wrong(c, ("adaptation.lda_dim", "data.graph"), " with data.graph, whose silence "
                     "states are not known; remove one of the two.")
    if (c.data.split == "loo") != bool(c.data.held_out):
        yield _wrong(c, ("data.split", "data.held_out"), " with data.held_out "
                     f"{c.data.held_out!r}; split=loo, and only that, needs the speaker of the "
                     "test set: data.split=loo data.held_out=theo.")


def _architecture(c: RunConfig) -> Iterator[Problem]:
    model = c.model
    if model._target_:
        for name in ("num_subclasses", "add_layers_period", "prior_scale_power"):
            if getattr(model, name):
                yield _wrong(c, (f"model.{name}", "model._target_"), " with model._target_, a "
                             "custom network, whose layers stay as they are; leave it 0.")
        if model.input_transform != "none":
            yield _wrong(c, ("model.input_transform", "model._target_"), " with model._target_, "
                         "whose network receives the features unchanged; leave it none.")
    elif model.kind == "pnorm" and model.hidden_dim % model.pnorm_group:
        yield _wrong(c, ("model.hidden_dim", "model.pnorm_group", "model.kind"),
                     f"; with model=pnorm it must be a multiple of model.pnorm_group, {model.pnorm_group}.")
    elif model.kind in ("tdnn", "tdnnf"):
        yield from _tdnn(c)
    if model.dropout_schedule:
        try:
            DropoutSchedule.parse(model.dropout_schedule)
        except ConfigError as error:
            yield Problem(("model.dropout_schedule",), f"model.dropout_schedule: {error}")


def _tdnn(c: RunConfig) -> Iterator[Problem]:
    try:
        layers = c.model.layer_offsets()
    except ValueError:
        yield Problem(("model.tdnn_offsets", "model.kind"), "model.tdnn_offsets is "
                      f"{c.model.tdnn_offsets!r}; write rising frame offsets with commas between "
                      "them, and a space between two layers, such as '-2,-1,0,1,2 -1,1'.")
        return
    left = -sum(min(0, layer[0]) for layer in layers)
    right = sum(max(0, layer[-1]) for layer in layers)
    if len(layers) != c.model.num_layers:
        yield Problem(("model.tdnn_offsets", "model.num_layers", "model.kind"),
                      f"model.tdnn_offsets is for {len(layers)} layers, and model.num_layers is "
                      f"{c.model.num_layers}; make them equal.")
    elif left > c.egs.left_context or right > c.egs.right_context:
        yield Problem(("model.tdnn_offsets", "egs.left_context", "egs.right_context", "model.kind"),
                      f"model.tdnn_offsets reaches {left} frames back and {right} ahead, but "
                      f"examples have egs.left_context {c.egs.left_context} and egs.right_context "
                      f"{c.egs.right_context}; raise these or narrow the offsets.")


def _growth(c: RunConfig) -> Iterator[Problem]:
    changes = [name for name in ("add_layers_period", "num_subclasses") if getattr(c.model, name)]
    if changes and c.outer.jobs_keep_state:
        why = "outer.overlap" if c.outer.overlap else f"outer.kind {c.outer.kind}"
        yield Problem((f"model.{changes[0]}", "outer.kind", "outer.overlap"), f"model.{changes[0]} "
                      f"changes the model between outer iterations, but with {why} jobs continue "
                      "from their previous results; choose another outer optimizer, or leave it 0.")
    if changes and c.init_model:
        value = getattr(c.model, changes[-1])
        yield _wrong(c, ("init_model", f"model.{changes[-1]}"), f" with model.{changes[-1]} "
                     f"{value}, which starts from a small model; leave it 0.")


def _optimizer(c: RunConfig) -> Iterator[Problem]:
    optimizer = c.optimizer
    if optimizer.backstitch_scale and optimizer.momentum:
        yield _wrong(c, ("optimizer.backstitch_scale", "optimizer.momentum"),
                     f" with optimizer.momentum {optimizer.momentum}; backstitch needs momentum 0.")
    if optimizer.curvature_state == "average" and (optimizer._target_ or optimizer.kind in ("ngsgd", *WITHOUT_MEAN)):
        yield _wrong(c, ("optimizer.curvature_state", "optimizer.kind"), ", but the state of "
                     f"{optimizer.label} in different jobs has no mean; choose reset or keep.")
    has_ranks = c.cluster.ranks_per_worker > 1
    if has_ranks and not optimizer._target_ and optimizer.kind not in OF_SUMMED_GRADIENTS:
        yield _wrong(c, ("cluster.ranks_per_worker", "optimizer.kind"),
                     f", but optimizer={optimizer.kind} preconditions by the minibatch of one "
                     f"rank; choose {', '.join(OF_SUMMED_GRADIENTS)}, or 1 rank.")
    if has_ranks and optimizer.backstitch_scale:
        yield _wrong(c, ("cluster.ranks_per_worker", "optimizer.backstitch_scale"),
                     ", and optimizer.backstitch_scale depends on the minibatch of one rank; set it to 0, or take 1 rank.")


def _snapshots(c: RunConfig) -> Iterator[Problem]:
    if c.failure.snapshots != "on":
        return
    if c.failure.policy != "retry":
        yield _wrong(c, ("failure.snapshots", "failure.policy"), " with failure.policy "
                     f"{c.failure.policy}, which starts no job again; leave it auto, or set failure.policy=retry.")
    if c.cluster.ranks_per_worker > 1:
        yield _wrong(c, ("failure.snapshots", "cluster.ranks_per_worker"),
                     f" with cluster.ranks_per_worker {c.cluster.ranks_per_worker}; groups of "
                     "ranks have no snapshots: leave it auto, or take 1 rank.")
    if c.cluster.kind == "in_process":
        yield _wrong(c, ("failure.snapshots", "cluster.kind"), " with cluster.kind in_process; "
                     "a snapshot is of a worker process: leave it auto, or set cluster.kind=local or ray.")


def _outer(c: RunConfig) -> Iterator[Problem]:
    proxy = c.tune.proxy
    if proxy.steps % proxy.outer_iters:
        yield _wrong(c, ("tune.proxy.steps", "tune.proxy.outer_iters"),
                     f", no multiple of tune.proxy.outer_iters, {proxy.outer_iters}; all "
                     "averaging steps follow the same number of minibatches.")
    if c.schedule.load_balancing == "time" and c.cluster.kind == "in_process":
        yield _wrong(c, ("schedule.load_balancing", "cluster.kind"), " with cluster.kind "
                     "in_process, where jobs run one after another; choose local or ray.")
    if c.outer.gain and not 1.0 <= c.outer.gain <= c.schedule.num_jobs_final:
        yield _wrong(c, ("outer.gain", "schedule.num_jobs_final"), "; it can be 1 (averaging) "
                     f"to schedule.num_jobs_final, {c.schedule.num_jobs_final}, or 0 for a good value in between.")


def _cuda_graphs(c: RunConfig) -> Iterator[Problem]:
    if c.cluster.cuda_graphs != "on":
        return
    reason = ("cluster.device is cpu" if c.cluster.device == "cpu" else
              "cluster.ranks_per_worker is above 1" if c.cluster.ranks_per_worker > 1 else
              f"optimizer={c.optimizer.label} trains without graphs" if c.optimizer.preconditions else
              f"objective.kind={c.objective.kind} plans each minibatch on the host" if c.objective.kind != "ce" else "")
    if reason:
        yield _wrong(c, ("cluster.cuda_graphs", "cluster.device", "cluster.ranks_per_worker",
                         "optimizer.kind", "objective.kind"), f", but {reason}; set cluster.cuda_graphs=auto.")


def _exchange(c: RunConfig) -> Iterator[Problem]:
    cluster = c.cluster
    if cluster.precision == "tf32" and cluster.device == "cpu":
        yield _wrong(c, ("cluster.precision", "cluster.device"), ", but cluster.device is cpu, "
                     "which has no TF32; choose float32 or bf16.")
    possible = {"in_process": ("auto",), "local": ("auto", "shared_memory", "collective")}.get(cluster.kind)
    if possible and cluster.exchange not in possible:
        yield _wrong(c, ("cluster.exchange", "cluster.kind"), "; with cluster.kind "
                     f"{cluster.kind} it can be {' or '.join(possible)}; cluster=ray has all.")
    if cluster.exchange in ("collective", "nccl") and c.outer.jobs_keep_state:
        why = "outer.overlap" if c.outer.overlap else f"outer.kind {c.outer.kind}"
        yield _wrong(c, ("cluster.exchange", "outer.kind", "outer.overlap"),
                     f" with {why}, whose jobs continue from their own results; leave it auto.")
    if cluster.codec and c.outer.kind == "streaming":
        yield _wrong(c, ("cluster.compression", "outer.kind"), " with outer.kind streaming, "
                     "whose jobs continue from their own parameters; leave it none.")


def _sites(c: RunConfig) -> Iterator[Problem]:
    sites = c.sites
    if not sites.jobs:
        return
    wrong = {name: count for name, count in sites.jobs.items()
             if not _SITE.fullmatch(str(name)) or isinstance(count, bool) or not isinstance(count, int) or count < 1}
    if wrong or len(sites.jobs) < 2:
        yield Problem(("sites.jobs",), f"sites.jobs is {dict(sites.jobs)!r}; give two or more "
                      "sites, named with letters, digits and -, and the number of jobs of each, "
                      "at least 1, such as {east: 4, west: 4}.")
        return
    if sites.name not in sites.jobs:
        yield Problem(("sites.name", "sites.jobs"), f"sites.name is {sites.name!r}; name this "
                      f"site, one of {', '.join(sites.jobs)}.")
    if not sites.exchange:
        yield Problem(("sites.exchange", "sites.jobs"), "sites.exchange is empty; give a URL of "
                      "object storage or a folder that all sites reach.")
    total = sum(sites.counts.values())
    if (c.schedule.num_jobs_initial, c.schedule.num_jobs_final) != (total, total):
        yield Problem(("sites.jobs", "schedule.num_jobs_initial", "schedule.num_jobs_final"),
                      f"sites.jobs has {total} jobs, but schedule.num_jobs_initial is "
                      f"{c.schedule.num_jobs_initial} and schedule.num_jobs_final {c.schedule.num_jobs_final}; remove both.")
    if c.outer.kind == "streaming":
        yield _wrong(c, ("outer.kind", "sites.jobs"), " with sites.jobs, but sites exchange "
                     "complete models; choose average, bmuf or diloco.")
    for path, (default, why) in _ALIKE.items():
        if (value := operator.attrgetter(path)(c)) != default:
            yield Problem((path, "sites.jobs"), f"{path} is {value} with sites.jobs, but {why}; leave it {default}.")


def _layers(c: RunConfig) -> Iterator[Problem]:
    known = ("lr_factor", "max_change", "weight_decay")
    for layer, options in (c.optimizer.layer_options or {}).items():
        if not isinstance(options, Mapping) or not all(
                key in known and _is_number(value) and value >= 0.0 for key, value in options.items()):
            yield Problem(("optimizer.layer_options",), f"optimizer.layer_options[{layer}] is "
                          f"{options!r}; give {', '.join(known)}, at least 0 each, such as "
                          "{lr_factor: 1.3}.")
    for layer, scale in (c.model.init_scales or {}).items():
        if not _is_number(scale) or scale <= 0.0:
            yield Problem(("model.init_scales",), f"model.init_scales[{layer}] is {scale!r}; give a number above 0.")
    if wrong := [factor for factor in c.schedule.lr_factors if factor <= 0.0]:
        yield Problem(("schedule.lr_factors",), f"schedule.lr_factors has {wrong[0]}; each must be above 0.")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _objective(c: RunConfig) -> Iterator[Problem]:
    if (kind := c.objective.kind) == "ce":
        return
    if c.combination.kind != "none":
        yield _wrong(c, ("combination.kind", "objective.kind"), ", which compares the "
                     f"cross-entropy of held-out frames, and objective.kind is {kind}; set "
                     f"combination.kind=none (objective={kind} does).")
    if c.optimizer.preconditions:
        yield _wrong(c, ("optimizer.kind", "objective.kind"), ", which needs the loss of single "
                     f"frames, and objective.kind is {kind}; set optimizer=ngsgd or optimizer=sgd.")
    if c.augment.spec:
        yield Problem(("augment.spec", "objective.kind"), "augment.spec masks windows of single "
                      f"frames, and objective.kind is {kind}; set augment.spec=false.")
    if c.model.num_subclasses or c.model.add_layers_period:
        yield _wrong(c, ("objective.kind", "model.num_subclasses", "model.add_layers_period"),
                     ", and the model changes during training; set model.num_subclasses and model.add_layers_period to 0.")


def of_other_nodes(c: RunConfig) -> Iterator[Problem]:
    """Yield a problem per option for other nodes that a run on one machine, not on Ray, sets."""
    for name, default in (("store", ""), ("node_cache_gb", DataConfig().node_cache_gb)):
        if getattr(c.data, name) != default:
            # without the value, which may contain a password
            yield Problem((f"data.{name}", "cluster.kind"), f"data.{name} is set, but all "
                          "workers run on this machine and read the prepared data in place; "
                          "remove it, or set cluster=ray cluster.address=HEAD:PORT.")


def _store(c: RunConfig) -> Iterator[Problem]:
    if c.cluster.kind in ("in_process", "local"):
        yield from of_other_nodes(c)
    if c.data.store:
        try:
            check_url(c.data.store)
        except ConfigError as error:
            yield Problem(("data.store",), f"data.store cannot be used: {error}")


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _name, _ranges, _features, _data, _architecture, _growth, _optimizer, _snapshots, _outer, _cuda_graphs, _exchange, _sites,
    _layers, _objective, _store)
