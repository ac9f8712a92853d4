"""P-norm and renormalize, forward and backward, against Kaldi (golden/blocks.npz)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.models import BatchNorm, PNorm, Renormalize, build_model
from ngsgd.models.layers import FixedAffine
from tests.conftest import Golden
from tests.toy import Run
from tests.toy import config as toy_config

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


def test_batchnorm_normalises_and_forgets_as_kaldis() -> None:
    layer = BatchNorm(3)
    x_ND = 2.0 + 3.0 * torch.randn(50, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    mean, variance = x_ND.double().mean(0), x_ND.double().var(0, unbiased=False)
    expected = (x_ND.double() - mean) / (variance + 1e-3).sqrt()
    torch.testing.assert_close(layer(x_ND).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x_ND.view(5, 10, 3)).view(50, 3), layer(x_ND))
    assert list(layer.parameters()) == []
    fresh = BatchNorm(3)
    fresh(x_ND)
    torch.testing.assert_close(fresh.running_mean, (0.2 * mean).float(), rtol=1e-5, atol=1e-6)


def test_batchnorm_of_a_single_row_uses_the_statistics_so_far() -> None:
    layer = BatchNorm(2)
    y = layer(torch.tensor([[2.0, -1.0]]))
    torch.testing.assert_close(y, torch.tensor([[2.0, -1.0]]) / 1.001**0.5)
    assert layer.running_mean is not None and layer.running_mean.tolist() == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relu", "pnorm", "tdnn", "tdnnf"])
def test_batchnorm_trains_and_its_statistics_are_the_datas(tmp_path: Path, kind: Any) -> None:
    model = ModelConfig(kind=kind, num_layers=2, hidden_dim=20, normalize="batchnorm", tdnn_offsets="-1,0,1 -1,0")
    run = Run(tmp_path, toy_config(model=model))
    end = run.train()
    assert run.recorder.records[-1].valid.accuracy > 0.8  # six classes; chance is 0.17
    variances = [value for name, value in run.store.layout.unflatten(end.parameters).items() if name.endswith("running_var")]
    assert len(variances) == 2 and all(bool((v > 0.0).all()) and not bool((v == 1.0).any()) for v in variances)


def test_a_fixed_layer_is_no_parameter_and_not_in_the_state() -> None:
    layer = FixedAffine(torch.tensor([[1.0, 2.0, 10.0]]))
    assert layer(torch.tensor([[3.0, 4.0]])).tolist() == [[21.0]]
    assert list(layer.parameters()) == [] and layer.state_dict() == {}
