"""Types of arguments: every public constructor rejects a number that is given as a string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd import NGSGD, NaturalMuon, OnlineNaturalGradient
from ngsgd.arguments import checks_arguments, misfits
from ngsgd.errors import ArgumentError, ConfigError
from ngsgd.hypergrad import HyperparameterPlan, ReversibleSGD
from ngsgd.hypergrad.search import BaseHyperparameters
from ngsgd.optim import SGD
from ngsgd.optim.outer import Bmuf, DiLoCo
from ngsgd.preconditioners import METHODS

WRONG: list[dict[str, Any]] = [
    {"lr": "0.01"}, {"momentum": "0.9"}, {"weight_decay": "1e-5"}, {"alpha": "4"}, {"rank_in": "3"}, {"rank_in": 2.5},
    {"num_samples_history": "2"}, {"grad_scaler": 1}, {"layer_options": [1]}, {"layer_options": {"0": 1}},
    {"layer_options": {"0": {"weight_decay": "1e-5"}}}, {"layer_options": {"*": {"rank_in": 2.5}}},
    {"layer_options": {"0": {"betas": "0.9"}}}, {"max_change": "1"}, {"adamw_lr_factor": "1"}, {"momentum": None},
    {"fallback": 3}, {"ignore_zero_rows": "False"}, {"lr": -1}, {"lr": float("nan")},
    {"momentum": 1.0}, {"max_change": -0.1}, {"rank_in": 0},
    {"betas": (0.9, 0.95)}, {"max_chnage": 1.0}]
OF_METHODS: list[dict[str, Any]] = [
    {"damping": "1e-2"}, {"ema_decay": "0.9"}, {"curvature_interval": "3"}, {"curvature_interval": 2.5},
    {"curvature_interval": ((0, 1), (3, "4"))}, {"kl_clip": "1e-3"}, {"seed": "1"}, {"skip": "ReLU"},
    {"layer_options": {"0": {"damping": "1"}}}, {"graft": 1}]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


OF_OTHERS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (SGD, (network, "0.1"), {}), (SGD, (network, 0.1), {"max_param_change": "2"}), (NaturalMuon, (network,), {"alpha": "1"}),
    (NaturalMuon, (network,), {"ns_steps": 2.5}), (ReversibleSGD, (network, "0.1"), {}),
    (ReversibleSGD, (network, 0.1), {"layer_options": {"0": {"lr": "1"}}}), (OnlineNaturalGradient, ("40",), {}),
    (OnlineNaturalGradient, (), {"rank": 2.5}), (DiLoCo, (), {"lr": "0.5"}), (Bmuf, ("2",), {}),
    (BaseHyperparameters, ("0.1", 0.01), {}), (HyperparameterPlan.constant, (5, 2), {"lr": "0.1"}),
    (HyperparameterPlan.constant, ("5", 2), {"lr": 0.1}),
    (HyperparameterPlan.constant, (5, 2), {"lr": -0.1})]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_ngsgd_rejects_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        NGSGD(network(), **options)
    # callers that expect the errors of torch also catch it
    assert isinstance(error.value, ConfigError) and isinstance(error.value, ValueError) and isinstance(error.value, TypeError)
    assert "betas" not in options or "layer_options" in str(error.value)


@pytest.mark.parametrize("options", OF_METHODS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_preconditioners_reject_wrong_arguments(method: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        METHODS[method](network(), **options)


@pytest.mark.parametrize(("kind", "arguments", "options"), OF_OTHERS)
def test_other_constructors_reject_wrong_arguments(kind: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        kind(*(each() if each is network else each for each in arguments), **options)


@pytest.mark.parametrize(("kind", "arguments"), [(NGSGD, ()), (SGD, (0.1,)), (NaturalMuon, ()), (ReversibleSGD, (0.1,))])
def test_optimizers_take_the_module_with_its_parameters(kind: Any, arguments: tuple[Any, ...]) -> None:
    for wrong in (network().parameters(), nn.ReLU()):
        with pytest.raises(ArgumentError):
            kind(wrong, *arguments)


@pytest.mark.parametrize("rank", [3, 3.0, np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_other_types_are_accepted(rank: Any) -> None:
    lr: Any = np.float32(0.1)
    optimizer = NGSGD(network(), lr, rank_in=rank, momentum=0, layer_options={"0": {"rank_in": 2.0}}, loss_reduction="sum")
    assert [type(group["rank_in"]) is not float for group in optimizer.param_groups] == [True, True]
    network()(torch.randn(6, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("value", "hint", "fits"), [
    (1, float, True), (True, float, True), (torch.tensor(1.0), float, True), ("1", float, False), (None, float, False),
    (1j, float, False), (None, float | None, True), (1.0, int, True), (1.5, int, False), (float("inf"), int, False),
    (None, bool, False), (1, bool, True), ("x", str, True), (b"x", str, False),
    ({"a": {"b": 1}}, Mapping[str, Mapping[str, int]], True),
    ({"a": {"b": "1"}}, Mapping[str, Mapping[str, int]], False), (["a"], tuple[str, ...], True), ("a", tuple[str, ...], False),
    ([1], Sequence[str], False), (len, Callable[[int], int], True), (1, Callable[[int], int], False), (object(), Any, True),
    (((0, 1),), int | tuple[tuple[int, int], ...], True), (((0, "1"),), int | tuple[tuple[int, int], ...], False),
])
def test_types_and_annotations(value: Any, hint: Any, fits: bool) -> None:
    assert (not list(misfits("x", value, hint))) == fits


def test_the_decorator_keeps_signature_results_and_pythons_own_errors() -> None:
    @checks_arguments()
    def scaled(x: float, *, times: int = 2) -> float:
        return x * times

    assert scaled(1.5, times=3.0) == 4.5 and scaled(2) == 4  # type: ignore[arg-type]
    assert scaled.__name__ == "scaled" and "times" in scaled.__annotations__
    with pytest.raises(TypeError):
        scaled()  # type: ignore[call-arg]
    with pytest.raises(ArgumentError) as error:
        scaled("1", times="2")  # type: ignore[arg-type]
    assert len(error.value.problems) == 2
