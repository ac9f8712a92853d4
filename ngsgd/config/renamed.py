"""Old names of options, for command lines, recipes and run folders of earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngsgd.config.sections.optimizer import METHODS

_OF_PRECONDITIONERS = (
    "damping", "curvature_interval", "inverse_interval", "ema_decay", "fisher", "sharing", "graft",
    "kl_clip", "max_grad_norm", "skip", "block_size", "sketch", "form", "factor_lr", "products",
    "max_cg_steps", "alpha")
# old name -> name; the group `preconditioner` is now part of `optimizer`
RENAMED = {
    "cluster.start_timeout_s": "cluster.wait_for_workers_s",
    "preconditioner.kind": "optimizer.kind",
    **{f"preconditioner.{name}": f"optimizer.{name}" for name in _OF_PRECONDITIONERS},
    "preconditioner.averaging": "optimizer.curvature_state",
    "preconditioner.num_draws": "optimizer.mc_samples",
    "preconditioner.momentum": "optimizer.beta1",
    "preconditioner.weight_decay": "optimizer.decoupled_weight_decay",
    "optimizer.ng_state": "optimizer.curvature_state",
    "optimizer.cosine_period": "optimizer.cosine_interval",
    "objective.equalise_layers": "optimizer.equalize_layers",
    "objective.last_layer_factor": "optimizer.last_layer_factor",
    "objective.cross_entropy": "objective.ce_weight",
    "schedule.shares": "schedule.load_balancing",
    "schedule.round_s": "schedule.sync_interval_s",
    "outer.nesterov_lr": "outer.lr",
    "outer.nesterov_momentum": "outer.momentum",
    "outer.delay": "outer.fragment_delay",
    "outer.mixing": "outer.fragment_mixing",
    "failure.on_poison": "failure.on_repeated_crash",
    "failure.min_accepted": "failure.min_accepted_fraction",
    "failure.objf_tolerance": "failure.max_objf_gap",
    "failure.progress_timeout_s": "failure.hang_timeout_s",
    "failure.grace_s": "failure.grace_period_s",
    "data.oov": "data.oov_word",
    "data.arpa": "data.lm",
    "data.valid_share": "data.valid_fraction",
    "tracking.experiment": "tracking.experiment_name",
    "tracking.worker_runs": "tracking.nested_runs",
    "tracking.model": "tracking.log_model",
    "tracking.register_as": "tracking.registered_model_name",
    "tracking.system": "tracking.log_system_metrics",
    "tune.seed_share": "tune.coarse_fraction",
    "tune.workers": "tune.num_jobs",
    "tune.rates": "tune.max_lr_ratio",
}
# option -> old value -> value
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "combination.kind": {"generalised": "generalized"},
    # as exact as bf16 in half of its bytes
    "cluster.compression": {"bf16": "int8", "e3m0": "int8"},
    "schedule.load_balancing": {"equal": "none"},
}
@dataclass(frozen=True)
class Removed:
    """An option that is a constant now."""

    # the constant
    value: Any
    # what to do for another value
    instead: str = ""


_OF_LIBRARY = "The classes of ngsgd.preconditioners have it as an argument."
# An option is removed where no recipe and no measurement of this project needs another value.
# Files of earlier versions hold these constants, and names of cached files are made of them.
REMOVED = {
    "features.cmn_window": Removed(600),
    "features.cmn_speaker_frames": Removed(600),
    "features.cmn_global_frames": Removed(200),
    "ivectors.context": Removed(3),
    "ivectors.pca_dim": Removed(40),
    "ivectors.ubm_frames": Removed(200000),
    "ivectors.max_utterances": Removed(5000),
    "ivectors.num_gselect": Removed(5),
    "ivectors.min_post": Removed(0.025),
    "ivectors.max_remembered_frames": Removed(1000.0),
    "ivectors.train_utterances": Removed(2),
    "ivectors.test_utterances": Removed(0),
    "align.lr_initial": Removed(0.005),
    "align.lr_final": Removed(0.0005),
    "align.beam": Removed(200.0),
    "data.seed": Removed(0),
    "model.lda_within_class_factor": Removed(0.001),
    "model.lda_max_singular_value": Removed(5.0),
    "model.lda_dim": Removed(0),
    "model.subclass_min_count": Removed(10.0),
    "failure.max_worker_deaths": Removed(-1, "failure.max_restarts_per_hour limits restarts."),
    "failure.max_rollbacks": Removed(3),
    "combination.max_evaluations": Removed(30),
    "decode.num_prior_frames": Removed(20000),
    "tune.num_jobs": Removed(0, "schedule.num_jobs_final decides."),
    "tune.memory_gb": Removed(1.0, "tune.engine chooses another source of the trajectory."),
    "tune.max_lr_ratio": Removed(30.0),
    "tune.multipliers": Removed([1.0, 0.5, 0.25]),
    "tune.transfer_steps": Removed(0, "ngsgd tune transfer takes four times tune.proxy.steps."),
    "optimizer.last_layer_factor": Removed(1.0),
    "optimizer.cosine_interval": Removed(100),
    "optimizer.mc_samples": Removed(1, _OF_LIBRARY),
    "optimizer.sharing": Removed("expand", _OF_LIBRARY),
    "optimizer.max_grad_norm": Removed(0.0, "optimizer.max_param_change limits the update."),
    "optimizer.block_size": Removed(1024, _OF_LIBRARY),
    "optimizer.sketch": Removed(0, _OF_LIBRARY),
    "optimizer.form": Removed("kronecker", _OF_LIBRARY),
    "optimizer.factor_lr": Removed(0.1, _OF_LIBRARY),
    "optimizer.products": Removed("ggn", _OF_LIBRARY),
    "optimizer.max_cg_steps": Removed(10, _OF_LIBRARY),
    "augment.seed": Removed(0),
    "augment.speed_factors": Removed([0.9, 1.0, 1.1]),
    "augment.speed_probability": Removed(1.0),
    "augment.reverb_probability": Removed(0.5),
    "augment.rt60_ms_low": Removed(100.0, "Give impulse responses as augment.rir_dir."),
    "augment.rt60_ms_high": Removed(600.0, "Give impulse responses as augment.rir_dir."),
    "augment.noise_probability": Removed(0.5),
    "augment.volume_probability": Removed(1.0),
    "augment.volume_low": Removed(0.125),
    "augment.volume_high": Removed(2.0),
    "augment.spec_probability": Removed(0.5),
    "augment.spec_num_time_masks": Removed(1),
    "augment.spec_num_freq_masks": Removed(1),
}
# options of methods that are gone; files of earlier versions hold them without using them
_OF_REMOVED_METHODS = (
    "outer.slowmo_beta", "outer.slowmo_alpha", "outer.easgd_beta", "outer.fedopt_kind",
    "outer.fedopt_lr", "preconditioner.num_gradients", "preconditioner.rank",
    "preconditioner.hessian_power", "preconditioner.num_pairs")


def with_removed(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section with those of its removed options, as earlier versions had."""
    removed = {path.partition(".")[2]: one.value for path, one in REMOVED.items()
               if path.startswith(f"{section}.")}
    return {**values, **removed}


def without_removed(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section of an earlier version, without removed options."""
    return {name: value for name, value in values.items() if f"{section}.{name}" not in REMOVED}


def removed_sentence(path: str) -> str:
    """Return the error message for an option that was removed and has another value."""
    one = REMOVED[path]
    return (f"{path} was removed; its value is always {one.value}. Remove it."
            f"{one.instead and f' {one.instead}'}")


def _is_removed(path: str, value: Any) -> bool:
    """Whether the option was removed and the value is that of all runs."""
    if path not in REMOVED:
        return False
    constant = REMOVED[path].value
    if isinstance(value, str) and not isinstance(constant, str):
        text = value.replace(" ", "").lower()
        try:
            return float(text) == float(constant)
        except (TypeError, ValueError):
            return text == str(constant).replace(" ", "").lower()
    return bool((list(value) if isinstance(value, tuple) else value) == constant)


@dataclass(frozen=True)
class Rename:
    """An old name, or an old value, that a configuration uses."""

    old: str
    new: str

    @property
    def sentence(self) -> str:
        return f"{self.old} is now {self.new}; the old name will be removed."


def with_new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Rename]]:
    """Return nested settings with the names of this version, and the old names found in them.

    A run folder of an earlier version holds all options of the section `preconditioner`. With
    preconditioner.kind=none they had no effect, and optimizer.kind decided. Removed options with
    the value of their constant are omitted.
    """
    flat = {path: value for path, value in _leaves(values, "")
            if path not in _OF_REMOVED_METHODS}
    method = flat.get("preconditioner.kind")
    if method == "none":
        flat = {path: value for path, value in flat.items()
                if not path.startswith("preconditioner.")}
    elif method in METHODS:
        # two names become one; that of the natural gradient had no effect here
        flat.pop("optimizer.ng_state", None)
        if method not in ("simple", "online"):
            flat.pop("preconditioner.alpha", None)
    found = [Rename(path, RENAMED[path]) for path in flat
             if path in RENAMED and RENAMED[path] not in REMOVED]
    renamed = {RENAMED.get(path, path): value for path, value in flat.items()
               if not _is_removed(RENAMED.get(path, path), value)}
    for path, new_values in RENAMED_VALUES.items():
        if isinstance(old := renamed.get(path), str) and old in new_values:
            found.append(Rename(f"{path}={old}", f"{path}={new_values[old]}"))
            renamed[path] = new_values[old]
    return _nested(renamed), found


def with_new_names_in(overrides: Sequence[str]) -> tuple[list[str], list[Rename]]:
    """Return command-line words with the names of this version, and the old names found in them.

    The group `preconditioner` chose a method besides optimizer=sgd; now it is a choice of
    `optimizer`, and preconditioner=none is the choice of the other word.
    """
    pairs = [override.partition("=")[::2] for override in overrides]
    others = [value for key, value in pairs if key in ("optimizer", "optimizer.kind")]
    plain = others[-1] if others else "ngsgd"
    chooses = any(key in _CHOICES and value != "none" for key, value in pairs)
    lines, found = [], []
    for override, (key, value) in zip(overrides, pairs, strict=True):
        if key in _CHOICES:
            new_key = _CHOICES[key]
            methods = ",".join(plain if one == "none" else one for one in value.split(","))
            found.append(Rename(override, f"{new_key}={methods}"))
            if chooses or not others:
                lines.append(f"{new_key}={methods}")
        elif not (chooses and key in ("optimizer", "optimizer.kind")):
            new_key = RENAMED.get(key, key)
            if _is_removed(new_key, value):
                continue
            new_values = RENAMED_VALUES.get(new_key, {})
            new_value = ",".join(new_values.get(one, one) for one in value.split(","))
            line = f"{new_key}={new_value}" if "=" in override else override
            if line != override:
                found.append(Rename(override, line))
            lines.append(line)
    return lines, found


# old choice of a method -> choice
_CHOICES = {"preconditioner": "optimizer", "preconditioner.kind": "optimizer.kind"}


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        path = f"{prefix}{name}"
        # mappings below an option, such as optimizer.layer_options, are values
        if isinstance(value, Mapping) and (not prefix or path == "tune.proxy"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        node = found
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return found
