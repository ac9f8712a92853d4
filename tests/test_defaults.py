"""Library and command line have the same defaults, and a method uses each of its options."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig, RunConfig, check
from ngsgd.config.sections.optimizer import OF_A_RUN
from ngsgd.errors import ConfigError
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.sgd import SGD
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.build import LIBRARY_NAMES, make_preconditioner, options_of


@pytest.mark.entry("R5", "you use a method or an optimizer in your own loop and in `ngsgd train`", "works",
                   "the defaults of `ngsgd.preconditioners` and of `OptimizerConfig` are equal for every kind, and those of "
                   "`NGSGD` and `SGD` equal `OptimizerConfig`'s; stated exceptions: `graft`, the two intervals "
                   "and `curvature_state`")
@pytest.mark.entry("P2", "you compare the defaults of a method in the library with those of the command line", "works",
                   "they are equal, damping 1e-2 included, except four options that docs/preconditioners.md lists: `graft`, "
                   "both intervals and `curvature_state` (`averaging`)")
@pytest.mark.parametrize("kind", METHODS)
def test_defaults_of_a_method_are_equal_in_the_library_and_in_a_run(kind: Any) -> None:
    config, options = OptimizerConfig(kind), METHODS[kind](nn.Linear(2, 2))
    for name in options_of(config):
        if name == "skip":
            assert (config.skip, options.skip) == ("", ())
        elif name not in OF_A_RUN:
            assert getattr(config, name) == getattr(options, LIBRARY_NAMES.get(name, name)), name
    in_library = {name: getattr(options, LIBRARY_NAMES.get(name, name)) for name in OF_A_RUN}
    assert in_library == {"graft": "none", "curvature_interval": 1, "inverse_interval": 1,
                          "curvature_state": "reset"}


@pytest.mark.entry("R5")
@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_defaults_of_the_optimizers_are_equal_in_the_library_and_in_a_run(kind: type[SGD | NGSGD]) -> None:
    config = OptimizerConfig()
    parameters = inspect.signature(kind).parameters
    shared = [spec.name for spec in fields(config) if spec.name in parameters]
    assert {"momentum", "max_change", "max_param_change", "weight_decay"} <= set(shared)
    in_library = {name: parameters[name].default for name in shared}
    assert in_library == {name: getattr(config, name) for name in in_library}
    if kind is NGSGD:
        assert {"rank_in", "rank_out", "update_period", "num_samples_history", "alpha", "update"} <= set(shared)


@pytest.mark.parametrize("kind", METHODS)
def test_the_signature_of_a_method_has_its_options_and_their_defaults(kind: Any) -> None:
    _, *parameters = inspect.signature(METHODS[kind]).parameters.values()
    assert {one.kind for one in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    preconditioner = METHODS[kind](torch.nn.Linear(2, 2))
    assert {one.name: one.default for one in parameters} == preconditioner.arguments()


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_the_configuration_lists_the_options_that_a_method_has(kind: Any) -> None:
    has = {spec.name for spec in fields(METHODS[kind])} - {"model"}
    with_fisher = replace(OptimizerConfig(kind), fisher="mc")
    names = {*options_of(OptimizerConfig(kind)), *options_of(with_fisher)}
    used = {LIBRARY_NAMES.get(name, name) for name in names}
    assert used <= has
    in_a_run = {LIBRARY_NAMES.get(spec.name, spec.name) for spec in fields(OptimizerConfig)}
    # options of SGD and NG-SGD in a run; a method's own ones have another name or stay at Kaldi's
    in_a_run -= {"layer_options", "momentum", "weight_decay", "kind", "rank_in", "rank_out",
                 "update_period", "num_samples_history"}
    # a method that has them refuses all values but one, or never reads them
    assert (has & in_a_run) - used <= {"ema_decay", "curvature_interval", "inverse_interval",
                                       "fisher", "num_draws", "damping", "graft"}


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_a_setting_of_another_method_is_refused_by_the_library(kind: Any) -> None:
    has = {spec.name for spec in fields(METHODS[kind])}
    others = {spec.name for one in METHODS.values() for spec in fields(one)}
    assert others - has
    for name in others - has:
        with pytest.raises(ConfigError, match=name):
            METHODS[kind](nn.Linear(2, 2), **{name: 7})
    # what a run uses is what the class accepts
    make_preconditioner(nn.Linear(2, 2), OptimizerConfig(kind, rank_in=7), seed=0)


OTHER = {"damping": 0.3, "curvature_interval": 2, "inverse_interval": 2, "ema_decay": 0.3, "fisher": "mc"}


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", METHODS)
def test_a_method_uses_the_common_options_that_the_configuration_gives_it(kind: Any) -> None:
    used = [name for name in options_of(OptimizerConfig(kind)) if name in OTHER]
    plain = trained(kind, {})
    for name in used:
        assert not torch.equal(trained(kind, {name: OTHER[name]}), plain), name


def trained(kind: Any, options: dict[str, object]) -> Tensor:
    """The parameters of a tiny network after four steps."""
    torch.manual_seed(0)
    # KFRA refuses normalizations
    norm = nn.Identity() if kind == "kfra" else nn.LayerNorm(6)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3)).double()
    preconditioner = METHODS[kind](model, seed=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x_SND, y_SN = torch.randn(4, 8, 4, dtype=torch.float64), torch.randint(3, (4, 8))
    for x_ND, y_N in zip(x_SND, y_SN, strict=True):
        optimizer.zero_grad()
        preconditioner.evaluate(partial(loss_of, model, x_ND, y_N))
        preconditioner.step(lr=0.05)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss_of(model: nn.Module, x_ND: Tensor, y_N: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x_ND), y_N)


@pytest.mark.entry("P1")
@pytest.mark.parametrize("kind", ["psgd", "simple"])
def test_a_method_refuses_an_option_of_all_that_it_does_not_use(kind: Any) -> None:
    with pytest.raises(ConfigError, match="ema_decay"):
        METHODS[kind](nn.Linear(2, 2), ema_decay=0.5)


def test_every_default_is_a_value_that_the_configuration_accepts() -> None:
    for kind in METHODS:
        config = RunConfig(optimizer=OptimizerConfig(kind))  # type: ignore[arg-type]
        assert not check(config)
    assert all(spec.default is not MISSING for spec in fields(OptimizerConfig))
