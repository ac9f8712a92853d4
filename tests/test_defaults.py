"""The library and the command line have the same defaults, and a method uses each of its options."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import OF_A_RUN, OptimizerConfig, PreconditionerConfig, RunConfig, check, unused_in
from ngsgd.errors import ConfigError
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.sgd import SGD
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.build import make_preconditioner

# the library has no log to write the cosine to; schedule is called update_schedule, since a section schedule is there, too
_ONLY_NAMES = {"cosine_period": "ngsgd train measures it for its log"}


def used_by(config: PreconditionerConfig) -> list[str]:
    unused = {setting.path for setting in unused_in(config)}
    return [spec.name for spec in fields(config) if spec.name != "kind" and spec.name not in unused]


@pytest.mark.entry("R5", "you use a method or an optimizer in your own loop and in `ngsgd train`", "right",
                   "the defaults of `ngsgd.preconditioners` and of `PreconditionerConfig` are equal for every kind, and those of "
                   "`NGSGD` and `SGD` equal `OptimizerConfig`'s; stated exceptions: `graft`, the two intervals, `averaging` and "
                   "`cosine_period`")
@pytest.mark.entry("P2", "you compare the defaults of a method in the library with those of the command line", "right",
                   "they are equal, damping 1e-2 included; stated exceptions, which docs/preconditioners.md lists: in a run "
                   "`graft` is `gradient`, the intervals are 10 and `averaging` depends on the kind")
@pytest.mark.parametrize("kind", METHODS)
def test_defaults_of_a_method_are_equal_in_the_library_and_in_a_run(kind: str) -> None:
    config, options = PreconditionerConfig(kind), METHODS[kind].Options()
    for name in used_by(config):
        if name == "skip":
            assert (config.skip, options.skip) == ("", ())
        elif name not in OF_A_RUN:
            assert getattr(config, name) == getattr(options, name), name
    in_library = {name: getattr(options, name) for name in OF_A_RUN}
    assert in_library == {"graft": "none", "curvature_interval": 1, "inverse_interval": 1, "averaging": "reset"}


@pytest.mark.entry("R5")
@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_defaults_of_the_optimizers_are_equal_in_the_library_and_in_a_run(kind: type[SGD]) -> None:
    config = OptimizerConfig()
    parameters = inspect.signature(kind).parameters
    shared = [spec.name for spec in fields(config) if spec.name in parameters and spec.name not in _ONLY_NAMES]
    assert {"momentum", "max_change", "max_param_change", "weight_decay"} <= set(shared)
    assert {name: parameters[name].default for name in shared} == {name: getattr(config, name) for name in shared}
    if kind is NGSGD:
        assert parameters["schedule"].default == config.update_schedule
        assert {"rank_in", "rank_out", "update_period", "num_samples_history", "alpha", "max_change_per_sample"} <= set(shared)


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_the_configuration_lists_the_options_that_a_method_has(kind: str) -> None:
    has = {spec.name for spec in fields(METHODS[kind].Options)}
    used = set(used_by(PreconditionerConfig(kind))) | set(used_by(replace(PreconditionerConfig(kind), fisher="mc")))
    assert used <= has
    own = {spec.name for spec in fields(PreconditionerConfig)}
    fixed = (has & own) - used   # a method that has them refuses all but one value, or never reads them
    assert fixed <= {"ema_decay", "curvature_interval", "inverse_interval", "fisher", "num_draws", "damping"}


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_a_setting_of_another_method_is_refused_by_the_library(kind: str) -> None:
    for setting in unused_in(PreconditionerConfig(kind)):
        if setting.path == "kind" or isinstance(setting.value, str):
            continue
        other: dict[str, Any] = {setting.path: 0.5 if isinstance(setting.value, float) else 7}
        wrong = replace(PreconditionerConfig(kind), **other)
        with pytest.raises(ConfigError, match=rf"^{setting.path} .*\b{kind}\b|^num_draws "):
            make_preconditioner(nn.Linear(2, 2), wrong, seed=0)


OTHER = {"damping": 0.3, "curvature_interval": 2, "inverse_interval": 2, "ema_decay": 0.3, "fisher": "mc"}


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_a_method_uses_the_common_options_that_the_configuration_gives_it(kind: str) -> None:
    used = [name for name in used_by(PreconditionerConfig(kind)) if name in OTHER]
    plain = trained(kind, {})
    for name in used:
        assert not torch.equal(trained(kind, {name: OTHER[name]}), plain), name


def trained(kind: str, options: dict[str, object]) -> Tensor:
    """The parameters of a tiny network after four steps."""
    torch.manual_seed(0)
    # KFRA's recursion has no LayerNorm
    between = nn.Identity() if kind == "kfra" else nn.LayerNorm(6)
    model = nn.Sequential(nn.Linear(4, 6), between, nn.Tanh(), nn.Linear(6, 3)).double()
    preconditioner = METHODS[kind](model, seed=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x_SND, y_SN = torch.randn(4, 8, 4, dtype=torch.float64), torch.randint(3, (4, 8))
    for x_ND, y_N in zip(x_SND, y_SN, strict=True):
        optimizer.zero_grad()
        preconditioner.evaluate(partial(loss_of, model, x_ND, y_N))
        preconditioner.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss_of(model: nn.Module, x_ND: Tensor, y_N: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x_ND), y_N)


@pytest.mark.entry("P1")
@pytest.mark.parametrize(("kind", "options"), [("psgd", {"ema_decay": 0.5}), ("lbfgs", {"inverse_interval": 2}),
                                               ("simple", {"ema_decay": 0.5}), ("mfac", {"ema_decay": 0.5})])
def test_a_method_refuses_an_option_of_all_that_it_does_not_use(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="meaning"):
        METHODS[kind](nn.Linear(2, 2), **options)


def test_every_default_is_a_value_that_the_configuration_accepts() -> None:
    for kind in METHODS:
        config = RunConfig(preconditioner=PreconditionerConfig(kind), optimizer=OptimizerConfig("sgd"))
        assert not check(config)
    assert all(spec.default is not MISSING for spec in fields(PreconditionerConfig))
