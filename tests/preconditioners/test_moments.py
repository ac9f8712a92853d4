"""TONGA, TNT, KFLR, KFRA, Kaldi's two natural gradients, and torch's optimisers, each against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import KFAC, KFLR, KFRA, METHODS, TNT, TONGA, OnlineNG, Preconditioner, SimpleNG
from ngsgd.preconditioners.fisher_recorder import FisherSample
from tests.preconditioners.problems import NAMES, SHARING, Problem, close, joint, problem
from tests.reference import preconditioners as dense
from tests.reference.curvature import loss_derivatives, recursion_of_averages
from tests.reference.online_natural_gradient import DenseFisher
from tests.reference.simple_natural_gradient import precondition_by_definition


def _random_gradients(preconditioner: Preconditioner, steps: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """(gradients of all steps, the last direction)."""
    generator = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(steps):
        for p in preconditioner.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        seen.append({name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None})
        preconditioner.step()
    return seen, {name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("rank", "num_fresh"), [(2, 3), (4, 1), (20, 20)])
@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_tonga_equals_the_dense_solve_with_the_cut_moment(name: str, rank: int, num_fresh: int) -> None:
    preconditioner = TONGA(problem(name).model, damping=0.05, ema_decay=0.9, rank=rank, num_fresh=num_fresh)
    seen, found = _random_gradients(preconditioner, 9)
    for layer in ("0", "2"):
        close(joint(found, layer), dense.tonga([joint(g, layer) for g in seen], 0.05, 0.9, rank=rank, num_fresh=num_fresh))


@pytest.mark.parametrize("name", NAMES)
def test_tnt_equals_the_dense_tensor_normal_matrix(name: str) -> None:
    case, damping = problem(name), 0.05
    preconditioner = TNT(case.model, damping=damping, num_draws=3)
    seen: dict[str, Any] = {}
    original = preconditioner.update_curvature

    def update_curvature(signal: FisherSample) -> None:
        seen.update(signal.rows)
        original(signal)

    preconditioner.update_curvature = update_curvature  # type: ignore[method-assign, assignment]
    plain, found = case.gradients(), case.preconditioned(preconditioner)
    for layer in ("0", "2"):
        rows = seen[f"{layer}.weight"]
        wanted = dense.tensor_normal(rows.a_NTI, rows.e_VNTO, joint(plain, layer), damping, num_rows=case.num_rows)
        close(joint(found, layer), wanted)


def test_tnt_s_draws_have_the_fisher_matrix_s_moments_as_mean() -> None:
    """4000 draws at seed 1: relative standard error about 1/45 per element, checked at 5 of them."""
    case = problem("linear")
    preconditioner = TNT(case.model, num_draws=4000, seed=1)
    case.preconditioned(preconditioner)
    for layer, a_NTI, e_VNTO in case.layers(exact=True):
        F = dense.fisher(a_NTI, e_VNTO, num_rows=case.num_rows)
        O = e_VNTO.shape[3]  # noqa: E741
        F_OIOI = F.view(O, len(F) // O, O, len(F) // O)
        found = preconditioner.curvature(f"{layer}.weight")
        for key, wanted in (("outputs", torch.einsum("oipi->op", F_OIOI)), ("inputs", torch.einsum("oioj->ij", F_OIOI))):
            assert float((found[key] - wanted).norm() / wanted.norm()) < 5.0 / 45.0


@pytest.mark.parametrize("name", NAMES)
def test_kflr_is_kfac_of_the_exact_matrix(name: str) -> None:
    case = problem(name)
    wanted = case.preconditioned(KFAC(case.model, fisher="exact", sharing=SHARING[name]))
    for key, value in case.preconditioned(KFLR(case.model, sharing=SHARING[name])).items():
        assert torch.equal(value, wanted[key])
    with pytest.raises(ConfigError, match="must be \"exact\""):
        KFLR(case.model, fisher="mc")


def _kfra_factors(case: Problem) -> dict[str, Tensor]:
    """B by layer: the recursion over dense Jacobians."""
    assert isinstance(case.model, nn.Sequential)
    _, H_NFF = loss_derivatives(case.loss, case.model(case.x), len(case.x))
    G = recursion_of_averages(list(case.model), case.x, H_NFF)
    found = {}
    for index, module in enumerate(case.model):
        if isinstance(module, nn.Linear):
            found[str(index)] = G[index]
        elif isinstance(module, nn.Conv1d):
            O = module.out_channels  # noqa: E741
            G_OTOT = G[index].view(O, len(G[index]) // O, O, -1)
            found[str(index)] = torch.einsum("otpt->op", G_OTOT)   # positions as rows
    return found


@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_kfra_equals_the_dense_recursion(name: str) -> None:
    case, damping = problem(name), 0.05
    plain, found = case.gradients(), case.preconditioned(KFRA(case.model, damping=damping))
    factors = _kfra_factors(case)
    for layer, a_NTI, e_VNTO in case.layers():
        A, _ = dense.kronecker_factors(a_NTI, e_VNTO, num_rows=case.num_rows, sharing="expand")
        values, U = torch.linalg.eigh(factors[layer])
        rows = (U * values.clamp(min=0.0).sqrt()).T   # whose sum of outer products is B
        wanted = dense.kfac(a_NTI, rows[:, None, None] * case.num_rows**0.5, joint(plain, layer), damping,
                            num_rows=case.num_rows, sharing="expand")
        assert A.shape[0] == joint(plain, layer).shape[1]
        close(joint(found, layer), wanted)


def test_kfra_does_not_depend_on_the_scale_of_the_loss_and_names_what_it_cannot_do() -> None:
    case = problem("linear")
    wanted, preconditioner = case.preconditioned(KFRA(case.model)), KFRA(case.model)
    case.model.zero_grad()
    with preconditioner.watch():
        (case.loss(case.model(case.x)) * 64.0).backward()
    preconditioner.step()
    for name, p in case.model.named_parameters():
        assert p.grad is not None
        close(p.grad, wanted[name] * 64.0)
    grouped = nn.Sequential(nn.Conv1d(2, 2, 1, groups=2), nn.Flatten(), nn.Linear(14, 3)).double()
    x = torch.randn(6, 2, 7, dtype=torch.float64)
    with pytest.raises(ConfigError, match="layer 0"):
        KFRA(grouped).evaluate(lambda: nn.functional.cross_entropy(grouped(x), case.y))
    KFRA(grouped, skip=("0",)).evaluate(lambda: nn.functional.cross_entropy(grouped(x), case.y))


@pytest.mark.parametrize("name", NAMES)
def test_the_simple_method_equals_its_definition_on_both_sides(name: str) -> None:
    case = problem(name)
    found = case.preconditioned(SimpleNG(case.model, alpha=2.0))
    for layer, a_NTI, e_VNTO in case.layers():
        a, e = a_NTI.flatten(0, 1).numpy(), e_VNTO.flatten(0, 2).detach().numpy()
        wanted = precondition_by_definition(e, 2.0).T @ precondition_by_definition(a, 2.0) / case.num_rows
        close(joint(found, layer), torch.from_numpy(np.asarray(wanted)))


@pytest.mark.parametrize("name", NAMES)
def test_the_online_method_applies_dense_estimates_to_both_sides(name: str) -> None:
    case = problem(name)
    preconditioner = OnlineNG(case.model, rank_in=2, rank_out=1, alpha=2.0)
    case.preconditioned(preconditioner, steps=2)
    state = preconditioner.state_dict()
    found = case.preconditioned(preconditioner)   # with the estimates that the first two steps left
    for layer, a_NTI, e_VNTO in case.layers():
        hats = []
        for side, rows in (("output", e_VNTO.flatten(0, 2)), ("input", a_NTI.flatten(0, 1))):
            W, d, rho = (np.asarray(state[f"{layer}.weight"][f"{side}.{key}"], dtype=np.float64) for key in ("W", "d", "rho"))
            Xhat, gamma = DenseFisher.from_w(W, d, float(rho), alpha=2.0).precondition(rows.detach().numpy())
            hats.append(Xhat * gamma)
        close(joint(found, layer), torch.from_numpy(hats[0].T @ hats[1] / case.num_rows))


@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_adam_equals_its_formula(name: str) -> None:
    preconditioner = METHODS["adam"](problem(name).model, damping=1e-3, ema_decay=0.95, momentum=0.8)
    seen, found = _random_gradients(preconditioner, 4)
    for key, value in found.items():
        close(value, dense.adam([g[key] for g in seen], beta_1=0.8, beta_2=0.95, eps=1e-3))


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_torch_s_optimisers_take_the_same_steps_behind_the_protocol(kind: str, name: str) -> None:
    own, case, lr = problem(name), problem(name), 0.01
    preconditioner = METHODS[kind](case.model, weight_decay=0.1)
    matrices = [nn.Parameter(p.detach().flatten(1)) for p in own.model.parameters() if p.ndim > 1]
    vectors = [p for p in own.model.parameters() if p.ndim == 1]
    optimizers: list[torch.optim.Optimizer]
    if kind == "muon":
        optimizers = [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1),
                      *([torch.optim.AdamW(vectors, lr=lr, betas=(0.95, 0.999), weight_decay=0.1)] if vectors else [])]
    else:
        optimizers = [{"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](own.model.parameters(), lr=lr, weight_decay=0.1)]
    for _ in range(4):
        own.gradients()
        for matrix, p in zip(matrices, [p for p in own.model.parameters() if p.ndim > 1], strict=True):
            assert p.grad is not None
            matrix.grad = p.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        if kind == "muon":
            with torch.no_grad():
                for matrix, p in zip(matrices, [p for p in own.model.parameters() if p.ndim > 1], strict=True):
                    p.copy_(matrix.view_as(p))
        case.preconditioned(preconditioner)
        with torch.no_grad():
            for p in case.model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=lr)
    for p, wanted in zip(case.model.parameters(), own.model.parameters(), strict=True):
        # Muon's iteration is in bfloat16, whose rounding flips where the last bit of its input does
        torch.testing.assert_close(p, wanted, rtol=1e-9 if kind != "muon" else 1e-3, atol=1e-9 if kind != "muon" else 1e-3)
