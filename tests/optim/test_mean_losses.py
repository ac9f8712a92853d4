"""A loss that is averaged over the minibatch is preconditioned as its sum is."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, OnlineNaturalGradient
from ngsgd.ops.natural_gradient import spectrum

NUM_IN, NUM_CLASSES = 12, 8


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "convolution":
        return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, NUM_CLASSES))
    return nn.Sequential(nn.Linear(NUM_IN, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, NUM_CLASSES))


def minibatch(seed: int, num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, NUM_IN, generator=generator)
    return x, (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4])


def trained(kind: str, num: int, divisor: float) -> tuple[Tensor, dict[str, Tensor]]:
    """(the move of all parameters, the spectrum of each estimate) after six minibatches."""
    model = network(kind)
    optimizer = NGSGD(model, lr=1e-4 * divisor, loss_reduction="sum", max_change=0.0, max_param_change=0.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    for seed in range(6):
        x, y = minibatch(seed, num)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y, reduction="sum") / divisor).backward()
        optimizer.step()
    spectra = {}
    for name, estimate in optimizer.preconditioners():
        assert estimate.state is not None
        spectra[name] = torch.from_numpy(spectrum(estimate.state, estimate.smoothing))
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start, spectra


@pytest.mark.entry("A6", "your loss is a mean over the minibatch", "works",
                   "the floor of the eigenvalues is relative to the largest, on both sides. A mean over 65,536 samples with lr "
                   "times 65,536 takes the steps of the sum. Where rows are below 1e-10 an estimate is flat, and one warning "
                   "reports it")
@pytest.mark.parametrize("kind", ["affine", "convolution"])
@pytest.mark.parametrize("divisor", [256.0, 65536.0, 2.0**24])
def test_a_mean_loss_is_preconditioned_as_the_sum_is(kind: str, divisor: float) -> None:
    (of_sum, spectra), (of_mean, others) = trained(kind, 512, 1.0), trained(kind, 512, divisor)
    # the start weighs at most delta = 5e-4 of the mean eigenvalue there and next to nothing in the
    # sum; e, between 0 and 1, and the direction differ by a few times that
    assert float((of_mean - of_sum).norm() / of_sum.norm()) < 5e-3
    for name, e in spectra.items():
        assert float((others[name] - e).abs().max()) < 5e-3, name


def test_rows_of_any_size_are_preconditioned_alike() -> None:
    """One float32 estimate on rows X and c X: neither floor nor start nor range shows."""
    outputs = {}
    for scale in (1.0, 1e-4, 1e-8):
        preconditioner = OnlineNaturalGradient(rank=5, relative_floor=True)
        for seed in range(5):
            X = torch.randn(64, 12, generator=torch.Generator().manual_seed(seed)) * torch.linspace(1.0, 4.0, 12)
            Xhat, gamma = preconditioner.precondition(scale * X)
        outputs[scale] = gamma * Xhat / scale
        assert preconditioner.state is not None
        assert np.isfinite(preconditioner.state.d_R).all()
    for scale in (1e-4, 1e-8):  # tolerance: see above
        assert float((outputs[scale] - outputs[1.0]).norm() / outputs[1.0].norm()) < 5e-3


@pytest.mark.entry("A6")
def test_an_estimate_that_is_flat_warns_once_for_the_optimizer() -> None:
    model = network("affine")
    optimizer = NGSGD(model, lr=1.0)
    x, y = minibatch(0, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            (nn.functional.cross_entropy(model(x), y) * 1e-14).backward()
            optimizer.step()
    assert sum("flat" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("num_zero", [1, 3])
def test_rows_of_zeros_leave_the_start_to_the_first_other_rows(num_zero: int) -> None:
    """Layers below one that starts at zero: their first derivatives are zero."""
    outputs = {}
    for scale, is_relative in ((1.0, False), (1.0, True), (1e-6, True)):
        preconditioner = OnlineNaturalGradient(rank=5, relative_floor=is_relative)
        for seed in range(5 + num_zero):
            X = torch.randn(64, 12, generator=torch.Generator().manual_seed(seed)) * torch.linspace(1.0, 4.0, 12)
            Xhat, gamma = preconditioner.precondition(scale * X if seed >= num_zero else torch.zeros_like(X))
        outputs[scale, is_relative] = gamma * Xhat / scale
    # rows of ordinary size: Kaldi's own numbers, bitwise in one process
    assert torch.equal(outputs[1.0, True], outputs[1.0, False])
    # as above
    assert float((outputs[1e-6, True] - outputs[1.0, True]).norm() / outputs[1.0, True].norm()) < 5e-3


@pytest.mark.entry("M6", "you compare a mean loss and its sum at the same `lr`", "works",
                   "both take the same steps up to the start of the estimates: the absolute floor is a larger part of the "
                   "small rows of a mean. The difference is 2e-5 of the first step and 5e-4 of the parameters' change after 30")
@pytest.mark.parametrize("kind", ["affine", "convolution"])
def test_a_mean_loss_trains_as_its_sum_does(kind: str) -> None:
    """With loss_reduction="mean", which is the default where no rate is given."""
    models = network(kind), network(kind), network(kind)
    optimizers = (NGSGD(models[0]), NGSGD(models[1], 0.024, loss_reduction="mean"), NGSGD(models[2], 0.024))
    for seed in range(6):
        x, y = minibatch(seed, 64)
        for model, optimizer, reduction in zip(models, optimizers, ("mean", "mean", "sum"), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
    for p, q, r, start in zip(*(model.parameters() for model in (*models, network(kind))), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, start)
        # the floor of eigenvalues, as above, on steps of at most 0.75
        torch.testing.assert_close(p, r, rtol=0.0, atol=5e-3)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num", [8, 256])
def test_a_mean_without_loss_reduction_is_warned_of(reduction: str, num: int) -> None:
    model = network("affine")
    optimizer = NGSGD(model, lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x, y = minibatch(seed, num)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
    found = [str(one.message) for one in caught if "seems to be a mean" in str(one.message)]
    assert len(found) == (reduction == "mean")
    assert all(f"over {num} samples" in one and "loss_reduction" in one for one in found)
