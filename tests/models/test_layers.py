"""P-norm and renormalise, forward and backward, against Kaldi (golden/blocks.npz)."""

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.models import PNorm, Renormalize, build_model
from tests.conftest import Golden

GOLDEN = Golden("blocks.npz")
TOLERANCE = 1e-6  # float32 in Kaldi, relative to the norm


def assert_close(ours: torch.Tensor, kaldi: np.ndarray) -> None:
    assert np.linalg.norm(ours.detach().numpy() - kaldi) <= TOLERANCE * np.linalg.norm(kaldi)


@pytest.mark.parametrize("case", GOLDEN.cases("p"))
def test_pnorm_and_renormalize_equal_kaldi(case: str) -> None:
    x = torch.tensor(GOLDEN(case, "X"), requires_grad=True)
    y = PNorm(x.shape[1] // GOLDEN(case, "pnorm_out").shape[1])(x)
    assert_close(y, GOLDEN(case, "pnorm_out"))
    (dx,) = torch.autograd.grad(y, x, torch.tensor(GOLDEN(case, "dY_pnorm")))
    assert_close(dx, GOLDEN(case, "pnorm_dX"))
    z = Renormalize(float(GOLDEN(case, "target_rms")))(x)
    assert_close(z, GOLDEN(case, "norm_out"))
    (dx,) = torch.autograd.grad(z, x, torch.tensor(GOLDEN(case, "dY_norm")))
    assert_close(dx, GOLDEN(case, "norm_dX"))


def test_the_start_is_a_function_of_the_seed() -> None:
    config = ModelConfig(kind="pnorm", num_layers=2, hidden_dim=20, pnorm_group=5)
    first, again, other = (build_model(config, 7, 3, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["affine1.weight"], other["affine1.weight"])


def test_the_output_layer_starts_at_equal_probabilities() -> None:
    model = build_model(ModelConfig(hidden_dim=8), 6, 5, 0)
    assert torch.equal(model(torch.randn(3, 6)).softmax(-1), torch.full((3, 5), 0.2))


@pytest.mark.parametrize("layer", [PNorm(3), Renormalize(), Renormalize(0.5)])
def test_first_and_second_derivatives_are_those_of_finite_differences(layer: nn.Module) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("layer", [PNorm(3), Renormalize()])
def test_rows_of_zeros_and_half_precision_stay_finite(layer: nn.Module) -> None:
    x = torch.zeros(2, 6, dtype=torch.bfloat16)
    x[1] = 300.0  # its square is beyond float16 and coarse in bfloat16
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("layer", [PNorm(3), Renormalize()])
def test_any_leading_dimensions(layer: nn.Module) -> None:
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(layer(x).reshape(24, -1), layer(x.reshape(24, 6)))
