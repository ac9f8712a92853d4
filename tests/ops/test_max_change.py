"""Limits on parameter change against Kaldi's nnet3 (golden/maxchange.npz, cases m*)."""

import math

import numpy as np
import pytest
import torch

from ngsgd.ops.max_change import max_change_limits
from tests.conftest import Golden

GOLDEN = Golden("maxchange.npz")
CASES = GOLDEN.cases("m")


@pytest.mark.parametrize("case", CASES)
def test_limited_change_equals_kaldi(case: str) -> None:
    config = GOLDEN.config(case)
    num_components = len(config["per_component"])
    params = [GOLDEN.npz[f"params_{k}"].astype(np.float64) for k in range(num_components)]
    call = 0
    while GOLDEN.has(case, f"delta{call}_0"):
        deltas = [GOLDEN(case, f"delta{call}_{k}").astype(np.float64) for k in range(num_components)]
        norms = torch.tensor([np.linalg.norm(delta) for delta in deltas])
        per_component = [limit or math.inf for limit in config["per_component"]]
        limits = max_change_limits(norms, torch.tensor(per_component, dtype=torch.float64),
                                   config["max_param_change"], scale=config["scale"],
                                   max_change_scale=config["max_change_scale"])
        for k in range(num_components):
            params[k] = params[k] + float(limits.factors_C[k]) * deltas[k]
            after = GOLDEN(case, f"after{call}_{k}")
            # float32 in Kaldi; its README measures 1e-7
            assert np.linalg.norm(params[k] - after) <= 1e-6 * np.linalg.norm(after), (case, call, k)
        flags = [bool(limits.model_ratio < 1.0), *(limits.layer_ratios_C < 1.0).tolist()]
        assert flags == [bool(flag) for flag in GOLDEN(case, f"flags{call}")], (case, call)
        call += 1
    assert call


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_reported_even_with_component_limits(bad: float) -> None:
    for of_layers, of_model in (([0.75, 0.75], 2.0), ([math.inf] * 2, 0.0)):
        assert not max_change_limits(torch.tensor([1.0, bad]), torch.tensor(of_layers),
                                     of_model).is_finite


def test_a_change_of_zero_is_finite_and_hits_no_limit() -> None:
    limits = max_change_limits(torch.zeros(2), torch.tensor([0.75, math.inf]), 2.0)
    assert limits.is_finite and limits.factors_C.tolist() == [1.0, 1.0]
    assert limits.model_ratio >= 1.0 and bool((limits.layer_ratios_C >= 1.0).all())


def test_infinity_and_zero_mean_no_limit() -> None:
    limits = max_change_limits(torch.tensor([100.0]), torch.tensor([math.inf]), 0.0)
    assert limits.factors_C.tolist() == [1.0] and limits.model_ratio >= 1.0 and bool((limits.layer_ratios_C >= 1.0).all())
