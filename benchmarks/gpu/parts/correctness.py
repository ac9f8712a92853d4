"""Operations, estimates, optimizers and curvature on the device in float32, compared with the CPU
in float64.

Operations and training steps run twice from the same numbers.  The online estimate, the simple
natural gradient and the orthonormality constraint are compared with tests/reference, and the
estimate and complete steps with vectors from Kaldi.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu import machine
from benchmarks.gpu.measurement import Failed, Measurement, Skipped
from benchmarks.gpu.operations import OPERATIONS, Draw
from benchmarks.gpu.training import DRY_WORKLOADS, PERIOD, WARM_UP, WORKLOADS, TrainingStep, Workload
from ngsgd import NGSGD, NaturalMuon, OnlineNaturalGradient, precondition_simple
from ngsgd.curvature import collect
from ngsgd.models import PNorm, Renormalize
from ngsgd.ops.kernels import native
from ngsgd.ops.orthonormal import constrain_orthonormal
from ngsgd.optim import SGD, Optimizer
from ngsgd.preconditioners import METHODS

# tolerances relative to the norm of the reference. Operations: GEMMs of 300 terms, and solves of
# condition 1e3
_OPERATION = 1e-4
# for parameter changes over a few steps, where ReLU inputs near 0 may have other signs
_STEPS = 2e-2
# for sums over minibatches, some of them differences
_CURVATURE = 1e-3
# for preconditioned gradients after solves with damping 0.1
_DIRECTION = 5e-3
# bfloat16 has 8 bits, and Muon's polynomial takes five steps in it on a GPU
_BFLOAT16 = 0.2
_NEWTON_SCHULZ = ("muon",)
_KALDI_ONE_CALL, _KALDI_TRAJECTORY = 1e-3, 1e-2
_QUANTITIES = (
    "batch_grad",
    "batch_l2",
    "sum_grad_squared",
    "second_moment",
    "variance",
    "diag_ggn",
    "batch_diag_ggn",
    "sqrt_ggn",
    "diag_h",
    "batch_diag_h",
)
_RANDOM = ("psgd", "esgd", "adahessian")
_GOLDEN = machine.ROOT / "tests" / "golden"


def run(measurement: Measurement) -> None:
    for name, operation in OPERATIONS.items():
        with measurement.case(f"operation {name}"):
            found, wanted = (
                operation(Draw(device, dtype))
                for device, dtype in (
                    (measurement.device, torch.float32),
                    (torch.device("cpu"), torch.float64),
                )
            )
            _require_close(found, wanted, _OPERATION)
    _against_reference(measurement)
    _against_kaldi(measurement)
    _preconditioners(measurement)
    _curvature(measurement)
    for net, workload in (DRY_WORKLOADS if measurement.dry_run else WORKLOADS).items():
        for name in ("SGD", "NGSGD", "NaturalMuon"):
            with measurement.case(f"steps {net} {name}") as figures:
                figures["difference"] = _steps(measurement, workload, name)
        with measurement.case(f"kernels {net}") as figures:
            figures["difference"] = _kernels(measurement, workload)
            measurement.need_gpu("Triton kernels")


def _require_close(found: Any, wanted: Any, tolerance: float) -> float:
    """The largest relative difference of tensors in the same order; raises Failed above the
    tolerance.
    """
    pairs = list(zip(_flat(found), _flat(wanted), strict=True))
    largest = 0.0
    for index, (one, other) in enumerate(pairs):
        a, b = (torch.as_tensor(x).detach().to("cpu", torch.float64) for x in (one, other))
        difference = float((a - b).norm()) / max(float(b.norm()), 1e-30)
        # also true of NaN
        if not difference <= tolerance:
            raise Failed(
                f"result {index} differs by {difference:.2g} of its norm; {tolerance:g} is allowed"
            )
        largest = max(largest, difference)
    return float(f"{largest:.2g}")


def _flat(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, tuple | list) else [found]


# References ---------------------------------------------------------------------------------------


def _against_reference(measurement: Measurement) -> None:
    from tests.reference.online_natural_gradient import DenseFisher
    from tests.reference.orthonormal import one_step
    from tests.reference.simple_natural_gradient import precondition_by_definition

    draw = Draw(measurement.device, torch.float32)
    with measurement.case("reference simple natural gradient"):
        X = draw(12, 7)
        _require_close(
            precondition_simple(X),
            torch.from_numpy(precondition_by_definition(_double(X), 4.0)),
            _OPERATION,
        )
    with measurement.case("reference orthonormal constraint"):
        for scale in (1.0, -1.0):
            weight = draw(6, 9)
            wanted = torch.from_numpy(one_step(_double(weight), scale))
            constrain_orthonormal(weight, scale)
            _require_close(weight, wanted, _OPERATION)
    with measurement.case("reference online natural gradient"):
        ng = OnlineNaturalGradient(rank=6, update_period=1)
        for _ in range(4):
            ng.precondition(draw(40, 20))
        state = ng.state_dict()
        dense = DenseFisher.from_w(
            _double(state["W"]), _double(state["d"]), float(state["rho"]), alpha=4.0
        )
        X = draw(40, 20)
        Xhat, gamma = ng.precondition(X)
        wanted_Xhat, wanted_scale = dense.precondition(_double(X))
        _require_close((Xhat, gamma), (torch.from_numpy(wanted_Xhat), wanted_scale), _OPERATION)
        dense.update(_double(X), 1.0 - np.exp(-40 / 2000.0))
        # the sign of a row of W is arbitrary
        W = ng.state_dict()["W"]
        _require_close(W.T @ W, torch.from_numpy(dense.W.T @ dense.W), _DIRECTION)


def _double(x: Any) -> Any:
    return torch.as_tensor(x).detach().cpu().double().numpy()


# Kaldi --------------------------------------------------------------------------------------------


def _against_kaldi(measurement: Measurement) -> None:
    from tests.golden.inputs import case_names

    with np.load(_GOLDEN / "ong_sequences.npz") as vectors:
        for name in case_names(vectors):
            if f"{name}__init_W" in vectors.files and name not in ("frozen", "alpha0"):
                with measurement.case(f"Kaldi estimate {name}"):
                    _kaldi_estimate(measurement, vectors, name)
    with np.load(_GOLDEN / "train.npz") as vectors:
        for name in case_names(vectors):
            config = json.loads(str(vectors[f"{name}__config"]))
            # with backstitch Kaldi counts calls differently
            if not config.get("bs", 0.0):
                with measurement.case(f"Kaldi training {name}") as figures:
                    figures["difference"] = _kaldi_training(measurement, vectors, name, config)


def _kaldi_estimate(measurement: Measurement, vectors: Any, name: str) -> None:
    """Each call, starting from Kaldi's state before it."""
    from tests.golden.inputs import case_inputs

    config, inputs = case_inputs(vectors, name)
    for t, X in enumerate(inputs):
        rows = next(
            (
                f"{name}__{kind}_{t:02d}"
                for kind in ("Xhat", "Xhat_rows")
                if f"{name}__{kind}_{t:02d}" in vectors.files
            ),
            None,
        )
        before = f"{name}__init_W" if t == 0 else f"{name}__W_{t - 1:02d}"
        if rows is None or before not in vectors.files:
            continue
        ng = OnlineNaturalGradient(
            config["rank"],
            config["update_period"],
            config["num_samples_history"],
            config["num_minibatches_history"],
            config["alpha"],
        )
        d, rho = (
            vectors[f"{name}__init_{x}"] if t == 0 else vectors[f"{name}__{x}"][t - 1]
            for x in ("d", "rho")
        )
        ng.load_state_dict(
            {
                "W": torch.tensor(vectors[before], device=measurement.device),
                "d": torch.tensor(d),
                "rho": torch.tensor(rho),
                "t": t,
            }
        )
        Xhat, scale = ng.precondition(torch.tensor(X, device=measurement.device))
        wanted = vectors[rows]
        _require_close(
            (Xhat[: len(wanted)], scale),
            (torch.from_numpy(wanted), float(vectors[f"{name}__scale"][t])),
            _KALDI_ONE_CALL,
        )


def _kaldi_training(
    measurement: Measurement, vectors: Any, name: str, config: dict[str, Any]
) -> float:
    """Complete training steps of nnet3-train."""
    model, affines = _kaldi_network(vectors, name, config)
    model.to(measurement.device)
    optimizer = _kaldi_optimizer(config, model)
    largest = 0.0
    for t in range(config["T"]):
        label, weight, X = (
            torch.tensor(vectors[f"{name}__{kind}_{t:02d}"]).to(measurement.device)
            for kind in ("label", "weight", "X")
        )
        optimizer.zero_grad()
        (
            weight * nn.functional.cross_entropy(model(X), label.long(), reduction="none")
        ).sum().backward()
        optimizer.step(num_samples=len(label))
        for k, affine in enumerate(affines):
            key = f"{name}__params_{t + 1:02d}_{k}"
            if key in vectors.files:
                start = torch.from_numpy(vectors[f"{name}__params0_{k}"]).double()
                ours = (
                    torch.cat([affine.weight, affine.bias[:, None]], dim=1).detach().cpu().double()
                )
                change = torch.from_numpy(vectors[key]).double() - start
                largest = max(largest, _require_close(ours - start, change, _KALDI_TRAJECTORY))
    return largest


def _kaldi_network(
    vectors: Any, name: str, config: dict[str, Any]
) -> tuple[nn.Sequential, list[nn.Linear]]:
    layers: list[nn.Module] = []
    affines = []
    for k, (kind, num_in, *dims) in enumerate(config["layers"]):
        affine = nn.Linear(num_in, dims[0])
        W1 = torch.tensor(vectors[f"{name}__params0_{k}"])
        with torch.no_grad():
            affine.weight.copy_(W1[:, :-1])
            affine.bias.copy_(W1[:, -1])
        affines.append(affine)
        layers.append(affine)
        if kind != "out":
            layers += [PNorm(dims[0] // dims[1]) if kind == "pnorm" else nn.ReLU(), Renormalize()]
    return nn.Sequential(*layers), affines


def _kaldi_optimizer(config: dict[str, Any], model: nn.Module) -> Optimizer:
    common = {
        "momentum": config["mom"],
        "max_change": config["mc"],
        "max_param_change": config["maxc"],
        "weight_decay": config["l2"] * config["l2f"],
    }
    made: Optimizer
    if config["ng"]:
        made = natural = NGSGD(
            model, config["lr"], update_period=config["period"], alpha=config["alpha"], **common
        )
        for side, estimate in natural.preconditioners():
            estimate.rank = config["rin"] if side.endswith("input") else config["rout"]
    else:
        made = SGD(model, config["lr"], **common)
    made.param_groups[-1]["max_change"] = config["mc_out"]
    return made


# Preconditioners, curvature, optimizers -----------------------------------------------------------


def _both(
    measurement: Measurement, model: nn.Module, x: Tensor
) -> Iterator[tuple[nn.Module, Tensor]]:
    """The model and its input on the device in float32, and on the CPU in float64."""
    yield copy.deepcopy(model).float().to(measurement.device), x.float().to(measurement.device)
    yield copy.deepcopy(model).double(), x.double()


def _preconditioners(measurement: Measurement) -> None:
    from tests.preconditioners.problems import problem

    for name in METHODS:
        for kind in ("linear", "conv frames"):
            with measurement.case(f"preconditioner {name}, {kind}") as figures:
                if name in _RANDOM:
                    raise Skipped("samples random vectors on the device")
                case = problem(kind)
                found, wanted = (
                    _directions(name, model, x, case.y)
                    for model, x in _both(measurement, case.model, case.x)
                )
                allowed = _BFLOAT16 if name in _NEWTON_SCHULZ else _DIRECTION
                figures["difference"] = _require_close(found, wanted, allowed)


def _directions(method: str, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Preconditioned gradients after four minibatches that differ in scale."""
    options: dict[str, Any] = (
        {"fisher": "empirical"} if METHODS[method].traits.fisher == "any" else {}
    )
    maker = METHODS[method](model, damping=0.1, **options)
    for step in range(4):
        rows = x * (1.0 + 0.1 * step)
        model.zero_grad()
        maker.evaluate(partial(_loss, model, rows, y.to(rows.device)))
        maker.step(lr=0.01)
    return [p.grad for p in model.parameters() if p.grad is not None]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _curvature(measurement: Measurement) -> None:
    torch.manual_seed(0)
    problems = {
        "linear": (
            nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)),
            torch.randn(6, 5),
        ),
        "conv": (
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
            torch.randn(6, 2, 6, 6),
        ),
    }
    for kind, (model, x) in problems.items():
        for name in _QUANTITIES:
            with measurement.case(f"curvature {name}, {kind}") as figures:
                found, wanted = (
                    _quantity(one, rows, name) for one, rows in _both(measurement, model, x)
                )
                figures["difference"] = _require_close(found, wanted, _CURVATURE)


def _quantity(model: nn.Module, x: Tensor, name: str) -> list[Tensor]:
    loss_fn = nn.CrossEntropyLoss()
    with collect(model, name, loss_fn=loss_fn) as q:
        loss_fn(model(x), torch.arange(len(x), device=x.device) % 3).backward()
    return [getattr(q[p], name) for p, _ in model.named_parameters()]


def _kernels(measurement: Measurement, workload: Workload) -> float:
    """Steps of NG-SGD with Triton kernels, and with torch operations on the same device."""
    found = []
    for in_torch in (False, True):
        with native.in_torch_operations() if in_torch else nullcontext():
            step = TrainingStep(workload, workload.dry_batch, "NG-SGD", measurement.device)
            before = torch.cat([p.detach().view(-1) for p in step.model.parameters()])
            step.repeat(2 if measurement.dry_run else WARM_UP + 2 * PERIOD)
            found.append(torch.cat([p.detach().view(-1) for p in step.model.parameters()]) - before)
    return _require_close(found[0], found[1], _STEPS)


def _steps(measurement: Measurement, workload: Workload, name: str) -> float:
    """Parameters after six training steps, compared by their change."""
    torch.manual_seed(0)
    model = workload.build()
    x, y = workload.batch(workload.dry_batch, torch.device("cpu"))
    changes = []
    for device, dtype in (
        (measurement.device, torch.float32),
        (torch.device("cpu"), torch.float64),
    ):
        one = copy.deepcopy(model).to(device, dtype)
        rows = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        optimizer = _OPTIMIZERS[name](one)
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(rows), y.to(device)).backward()
            optimizer.step()
        changes.append(
            torch.cat(
                [
                    (p.detach().cpu().double() - before.detach().double()).flatten()
                    for p, before in zip(one.parameters(), model.parameters(), strict=True)
                ]
            )
        )
    found, wanted = changes
    return _require_close(found, wanted, _BFLOAT16 if name == "NaturalMuon" else _STEPS)


_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model, 1e-2, momentum=0.9),
    "NGSGD": lambda model: NGSGD(model, 1e-3, loss_reduction="mean", momentum=0.9),
    "NaturalMuon": lambda model: NaturalMuon(model, 1e-3),
}
