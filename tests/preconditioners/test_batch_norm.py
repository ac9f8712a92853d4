"""BatchNorm in training mode: rows of other layers are those that autograd sends through it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.preconditioners import METHODS
from tests.preconditioners.problems import Pooled, close, gradients_of, joint
from tests.preconditioners.support import SEES_ROWS
from tests.reference import preconditioners as dense
from tests.reference.combinations import dimensions, factored, sparse
from tests.reference.simple_natural_gradient import precondition_by_definition

N, DAMPING = 6, 0.05
AFFINE, NORMS = ("0", "3", "7"), ("1", "4", "8")
CE = nn.functional.cross_entropy


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1, bias=False), nn.BatchNorm1d(3), nn.Tanh(),
                          nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3, track_running_stats=False),
                          nn.ReLU(), Pooled(), nn.Linear(3, 4), nn.BatchNorm1d(4),
                          nn.Linear(4, 3)).double()
    for p in model.parameters():
        nn.init.normal_(p)  # separate scales and offsets
    return model


def _minibatch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 2, 5, generator=generator, dtype=torch.float64), torch.arange(N) % 3


def _rows(model: nn.Sequential) -> dict[str, tuple[Tensor, Tensor]]:
    """(input, derivative of the summed loss at the output) of every layer, from autograd."""
    inputs, outputs = {}, {}
    h, y = _minibatch()
    for name, layer in model.named_children():
        inputs[name] = h.detach()
        h = outputs[name] = layer(h)
    derivatives = torch.autograd.grad(CE(h, y, reduction="sum"), list(outputs.values()))
    return dict(zip(inputs, zip(inputs.values(), derivatives, strict=True), strict=True))


def _of_layers(model: nn.Sequential) -> dict[str, tuple[Tensor, Tensor]]:
    """(N x T x I, 1 x N x T x O) of the affine layers."""
    return {name: (dense.input_rows(model[int(name)], x),
                   (e.transpose(1, 2) if e.ndim == 3 else e[:, None])[None])
            for name, (x, e) in _rows(model).items() if name in (*AFFINE, "9")}


def _directions(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients, directions) of the first step, by layer or parameter."""
    model, (x, y) = _net(), _minibatch()
    preconditioner = METHODS[kind](model, damping=DAMPING)
    preconditioner.evaluate(lambda: CE(model(x), y))
    plain = gradients_of(model)
    preconditioner.step(lr=0.01)
    return plain, gradients_of(model)


def _kronecker(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, e, G: reference(a, e, G, DAMPING, num_rows=N, sharing="expand")


def _kbfgs(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor) -> Tensor:
    """Before any update H_g is I, and H_a the damped inverse."""
    a = a_NTI.flatten(0, 1)
    A = a.T @ a / len(a) + DAMPING**0.5 * torch.eye(a.shape[1], dtype=a.dtype)
    H_a: Tensor = torch.linalg.inv(A)
    return G_OI @ H_a


def _simple(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor) -> Tensor:
    sides = [rows.flatten(0, -2) for rows in (e_VNTO, a_NTI)]
    e, a = (torch.from_numpy(precondition_by_definition(rows.numpy(), 4.0)) for rows in sides)
    found: Tensor = e.T @ a * G_OI.norm() / (sides[0].T @ sides[1]).norm()
    return found


def _solved(block: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    return lambda a, e, G: dense.natural_gradient(block(dense.fisher(a, e, num_rows=N), len(G)), G,
                                                  DAMPING)


def _tnt(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor) -> Tensor:
    vectors = [g.view_as(G_OI) for g in dense.individual(a_NTI, e_VNTO)]
    return factored(*dimensions(vectors, N), G_OI, DAMPING)


def _fang(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor) -> Tensor:
    F = dense.fisher(a_NTI, e_VNTO, num_rows=N)
    if not bool((a_NTI[..., -1] == 1.0).all()):
        # of a layer without bias
        return dense.natural_gradient(F.diagonal().diag(), G_OI, DAMPING)
    return sparse(F, G_OI.flatten(), len(G_OI), DAMPING).view_as(G_OI)


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "kfac": _kronecker(dense.kfac),
    "skfac": _kronecker(dense.kfac),
    "ekfac": _kronecker(dense.ekfac),
    "diagonal": _solved(lambda F, _: F.diagonal().diag()),
    "unit": _solved(dense.unit_blocks),
    "layer": _solved(lambda F, _: F),
    "seng": _solved(lambda F, _: F),
    "tnt": _tnt,
    "fang": _fang,
    "kbfgs": _kbfgs,
    "simple": _simple}


@pytest.mark.entry("B14", "a model has a BatchNorm in training mode and you use a preconditioner "
                   "that looks at rows", "works", "Rows of linear and convolutional layers are the "
                   "derivatives at their outputs, as autograd sends them through the BatchNorm, "
                   "and sum up to the gradient; a row depends on all samples of the minibatch. "
                   "Scale and offset have the diagonal of their Fisher matrix.")
@pytest.mark.parametrize("kind", [kind for kind in SEES_ROWS if kind not in ("full", "smw", "kfra")])
def test_each_layer_equals_its_dense_solve(kind: str) -> None:
    plain, found = _directions(kind)
    for layer, (a_NTI, e_VNTO) in _of_layers(_net()).items():
        # rows sum up to the gradient
        close(torch.einsum("vnto,nti->oi", e_VNTO, a_NTI) / N, joint(plain, layer))
        close(joint(found, layer), REFERENCES[kind](a_NTI, e_VNTO, joint(plain, layer)))


@pytest.mark.entry("B14")
@pytest.mark.parametrize("kind", ["full", "smw"])
def test_all_layers_together_equal_the_dense_solve(kind: str) -> None:
    plain, found = _directions(kind)
    layers = _of_layers(_net())
    U = torch.cat([dense.individual(*rows) for rows in layers.values()], dim=1)
    g = torch.cat([joint(plain, layer).flatten() for layer in layers])
    close(torch.cat([joint(found, layer).flatten() for layer in layers]),
          dense.natural_gradient(U.T @ U / N, g, DAMPING))


@pytest.mark.entry("B14")
@pytest.mark.parametrize("kind", [kind for kind in SEES_ROWS if kind != "kfra"])
def test_scale_and_offset_have_their_diagonal(kind: str) -> None:
    plain, found = _directions(kind)
    for layer in NORMS:
        x, e = _rows(_net())[layer]
        x, e = (each if each.ndim == 3 else each[:, :, None] for each in (x, e))
        mean, variance = (x.mean(dim=(0, 2), keepdim=True),
                          x.var(dim=(0, 2), keepdim=True, unbiased=False))
        for name, rows in ((f"{layer}.weight", e * (x - mean) / (variance + 1e-5).sqrt()),
                           (f"{layer}.bias", e)):
            squares = rows.sum(dim=2).square().sum(dim=0) / N
            close(found[name], plain[name] / (squares + DAMPING))


@pytest.mark.entry("B14")
@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind != "kfra"])
def test_a_network_with_batch_norm_trains(kind: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                          nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x, y = torch.randn(24, 1, 7, 7), torch.arange(24) % 3
    preconditioner = METHODS[kind](model, damping=0.1, graft="gradient")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        losses.append(float(preconditioner.evaluate(lambda: CE(model(x), y))))
        preconditioner.step(0.5)
        optimizer.step()
    assert losses[-1] < 0.85 * losses[0]
    assert preconditioner.num_skipped == 0
    # a second look at the minibatch (kbfgs) leaves the running statistics alone
    assert int(model.get_buffer("1.num_batches_tracked")) == 25


def _exact_output_factors(model: nn.Sequential) -> dict[str, Tensor]:
    """B of each affine layer: columns of the roots of diag(p) - p p^T go back for all samples."""
    outputs, (h, _) = {}, _minibatch()
    for name, layer in model.named_children():
        h = outputs[name] = layer(h)
    columns = []
    for p in h.detach().softmax(dim=1):
        # of rank 2: the last row makes the columns' sums 0
        L = torch.linalg.cholesky((p.diag() - torch.outer(p, p))[:-1, :-1])
        columns.append(torch.cat([L, -L.sum(dim=0, keepdim=True)]))
    found = dict.fromkeys((*AFFINE, "9"), torch.zeros(()))
    for column in torch.stack(columns).unbind(dim=2):
        backward = torch.autograd.grad(h, [outputs[name] for name in found], column,
                                       retain_graph=True)
        for name, e in zip(found, backward, strict=True):
            e_XO = e.transpose(1, 2).flatten(0, 1) if e.ndim == 3 else e
            found[name] = found[name] + e_XO.T @ e_XO / N
    return found


@pytest.mark.entry("B14")
def test_vectors_of_the_loss_pass_through_batch_norm() -> None:
    model, (x, y) = _net(), _minibatch()
    preconditioner = METHODS["kfac"](model, fisher="exact")
    preconditioner.evaluate(lambda: CE(model(x), y))
    preconditioner.step(lr=0.01)
    for layer, B in _exact_output_factors(_net()).items():
        close(preconditioner.mean_statistics(f"{layer}.weight")["B"], B)


@pytest.mark.parametrize("quantity", ["kfac_emp", "kflr"])
def test_collect_has_kronecker_factors_with_batch_norm(quantity: str) -> None:
    model, (x, y) = _net(), _minibatch()
    with collect(model, quantity, loss_fn=nn.CrossEntropyLoss(), layers=[*AFFINE, "9"]) as q:
        CE(model(x), y).backward()
    exact = _exact_output_factors(_net())
    for layer, (a_NTI, e_VNTO) in _of_layers(_net()).items():
        A, B = dense.kronecker_factors(a_NTI, e_VNTO, num_rows=N, sharing="expand")
        factors = getattr(q[f"{layer}.weight"], quantity)
        num_inputs = len(factors.A_II)  # without the 1 of the bias
        close(factors.A_II, A[:num_inputs, :num_inputs])
        close(factors.B_OO, B if quantity == "kfac_emp" else exact[layer])


@pytest.mark.entry("B14")
# a hook of ASDL's
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_kfac_has_the_directions_of_asdl() -> None:
    """For layers without bias it has the same factors and damping; for norms, 2 x 2 blocks."""
    asdl = pytest.importorskip("asdl")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
                         nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(36, 3, bias=False)).double()
    theirs = copy.deepcopy(ours)
    x, y = torch.randn(8, 1, 7, 7, dtype=torch.float64), torch.arange(8) % 3
    preconditioner = METHODS["kfac"](ours, damping=DAMPING)
    preconditioner.evaluate(lambda: CE(ours(x), y))
    preconditioner.step()
    config = asdl.PreconditioningConfig(data_size=8, damping=DAMPING)
    maker = asdl.KfacGradientMaker(theirs, config, fisher_type="fisher_emp")
    maker.setup_loss_call(CE, maker.setup_model_call(theirs, x), y)
    maker.forward_and_backward()
    wanted = gradients_of(theirs)
    for layer in ("0", "3", "7"):
        close(gradients_of(ours)[f"{layer}.weight"], wanted[f"{layer}.weight"])
