"""The Fisher matrix of each method on sequences, as in docs/preconditioners.md: dense, float64.

Letters: N samples, T frames of each, R = N T rows of the loss, O outputs, I inputs of a layer (with
the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ngsgd.preconditioners import METHODS
from tests.preconditioners.problems import close, gradients_of, joint
from tests.reference.preconditioners import natural_gradient, unit_blocks

N, T, DAMPING = 3, 4, 0.1
R = N * T
LAYERS = ("0", "2")


def _problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.randn(N, T, 3, dtype=torch.float64), torch.randint(3, (N, T))


def _gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """O x I by layer, the bias as last column."""
    found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    grads = dict(zip(dict(model.named_parameters()), found, strict=True))
    return {layer: joint(grads, layer) for layer in LAYERS}


def _frame_losses() -> tuple[nn.Sequential, Tensor]:
    model, x, y = _problem()
    return model, nn.functional.cross_entropy(model(x).mT, y, reduction="none")


def _of_samples() -> list[dict[str, Tensor]]:
    """The gradient of each sample's sum over its frames."""
    model, loss_NT = _frame_losses()
    return [_gradients(loss_T.sum(), model) for loss_T in loss_NT]


def _of_frames() -> list[dict[str, Tensor]]:
    model, loss_NT = _frame_losses()
    return [_gradients(loss, model) for loss in loss_NT.flatten()]


def _of_root() -> list[dict[str, Tensor]]:
    """J^T s for each frame and column s of the root of diag(p) - p p^T."""
    model, x, _ = _problem()
    found = []
    for z_F in model(x).flatten(0, 1):
        p_F = z_F.detach().softmax(dim=0)
        values, U_FF = torch.linalg.eigh(p_F.diag() - torch.outer(p_F, p_F))
        found += [_gradients(z_F @ s_F, model) for s_F in (U_FF * values.clamp(min=0.0).sqrt()).T]
    return found


def _fisher(vectors: list[dict[str, Tensor]], layers: tuple[str, ...]) -> Tensor:
    g = torch.stack([torch.cat([one[layer].flatten() for layer in layers]) for one in vectors])
    return g.T @ g / R


def _direction(kind: str, fisher: str) -> dict[str, Tensor]:
    model, x, y = _problem()
    preconditioner = METHODS[kind](model, damping=DAMPING, fisher=fisher)
    preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    preconditioner.step()
    grads = gradients_of(model)
    return {layer: joint(grads, layer) for layer in LAYERS}


def _plain() -> dict[str, Tensor]:
    model, loss_NT = _frame_losses()
    return _gradients(loss_NT.mean(), model)


@pytest.mark.entry("A13", "you use DiagonalNG, UnitWiseNG, LayerWiseNG, FullNG, SENG or SMWNG on sequences", "works",
                   "F is the mean over samples of g g^T, where g is the gradient of one sample: the sum over its frames. With "
                   "fisher=\"exact\" it is the sum over frames, as always with K-FAC and EKFAC. See docs/preconditioners.md "
                   "for other methods.")
@pytest.mark.parametrize(("fisher", "vectors"), [("empirical", _of_samples), ("exact", _of_root)])
@pytest.mark.parametrize("kind", ["diagonal", "unit", "layer", "seng", "full", "smw"])
def test_methods_of_complete_gradients(kind: str, fisher: str, vectors: Callable[[], list[dict[str, Tensor]]]) -> None:
    found, plain, each = _direction(kind, fisher), _plain(), vectors()
    if kind in ("full", "smw"):
        flat = torch.cat([plain[layer].flatten() for layer in LAYERS])
        close(torch.cat([found[layer].flatten() for layer in LAYERS]), natural_gradient(_fisher(each, LAYERS), flat, DAMPING))
        return
    for layer, G_OI in plain.items():
        F = _fisher(each, (layer,))
        F = F.diagonal().diag() if kind == "diagonal" else unit_blocks(F, len(G_OI)) if kind == "unit" else F
        close(found[layer], natural_gradient(F, G_OI, DAMPING))


@pytest.mark.entry("A13")
def test_kfac_and_ekfac_take_frames_as_rows() -> None:
    """A is the mean over frames, B 1/R times the sum over frames, frame by frame."""
    plain, kfac, ekfac, frames = _plain(), _direction("kfac", "empirical"), _direction("ekfac", "empirical"), _of_frames()
    for layer, G_OI in plain.items():
        # a frame's gradient is e [a 1], so that its last column is e, and its largest row over e is
        # [a 1]
        e_RO = torch.stack([one[layer][:, -1] for one in frames])
        a_RI = torch.stack([(one[layer].T @ e) / (e @ e) for one, e in zip((f for f in frames), e_RO, strict=True)])
        A, B = a_RI.T @ a_RI / R, e_RO.T @ e_RO / R
        pi = float((A.trace() / len(A)) / (B.trace() / len(B))) ** 0.5
        damped_A, damped_B = (M + part * DAMPING**0.5 * torch.eye(len(M), dtype=M.dtype) for M, part in ((A, pi), (B, 1.0 / pi)))
        close(kfac[layer], torch.linalg.solve(damped_B, G_OI) @ torch.linalg.inv(damped_A))
        U_B, U_A = torch.linalg.eigh(B)[1], torch.linalg.eigh(A)[1]
        S_OI = torch.stack([U_B.T @ one[layer] @ U_A for one in frames]).square().sum(dim=0) / R
        close(ekfac[layer], U_B @ ((U_B.T @ G_OI @ U_A) / (S_OI + DAMPING)) @ U_A.T)


@pytest.mark.entry("A13")
def test_the_two_definitions_differ() -> None:
    """On purpose: a sample's square has the products of its frames, which K-FAC skips."""
    of_samples, of_frames = (_fisher(each, ("0",)).diagonal() for each in (_of_samples(), _of_frames()))
    assert float((of_samples - of_frames).norm()) > 0.1 * float(of_frames.norm())
