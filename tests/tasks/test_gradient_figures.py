"""Gradient noise and curvature of a model by layer, and that training is not touched by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.config import EgsConfig, TrackingConfig, check
from ngsgd.data.reader import Minibatch
from ngsgd.errors import ConfigError
from ngsgd.tasks.frame_scores import diagnose, gradient_figures
from ngsgd.training.diagnostics.deferred import DeferredDiagnostics
from tests.toy import Run, config

N = 40
SUBSET = Minibatch(torch.randn(N + 5, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(N + 5) % 3,
                   torch.rand(N + 5, generator=torch.Generator().manual_seed(2)).double())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


@pytest.mark.parametrize("weighted", [True, False])
def test_figures_are_those_of_one_gradient_per_frame(weighted: bool) -> None:
    model = _model()
    subset = SUBSET if weighted else Minibatch(SUBSET.x_ND, SUBSET.pdf_N, None)
    figures = gradient_figures(model, subset, N)
    assert all(p.grad is None for p in model.parameters())
    total = {"model": [0.0, 0.0]}
    for layer in ("0", "2"):
        gradients = []
        for n in range(N):
            loss = nn.functional.cross_entropy(model(SUBSET.x_ND[n:n + 1]), SUBSET.pdf_N[n:n + 1])
            loss = loss * SUBSET.weight_N[n] if weighted and SUBSET.weight_N is not None else loss
            slopes = torch.autograd.grad(loss, list(model.get_submodule(layer).parameters()))
            gradients.append(torch.cat([slope.flatten() for slope in slopes]))
        g_NP = torch.stack(gradients)
        trace = float(g_NP.var(dim=0).sum())
        squared_norm = float(g_NP.mean(dim=0).square().sum()) - trace / N
        assert figures[f"signal_to_noise/{layer}"] == pytest.approx(squared_norm / trace, rel=1e-9)
        assert figures[f"curvature_trace/{layer}"] > 0.0
        total["model"] = [total["model"][0] + trace, total["model"][1] + squared_norm]
    assert figures["signal_to_noise/model"] == pytest.approx(total["model"][1] / total["model"][0], rel=1e-9)
    if total["model"][1] > 0:
        assert figures["noise_scale/model"] == pytest.approx(total["model"][0] / total["model"][1], rel=1e-9)


def test_figures_repeat_and_leave_the_generator_of_training_alone() -> None:
    model = _model()
    state = torch.get_rng_state()
    first = diagnose(model, SUBSET, SUBSET, num_curvature_frames=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == diagnose(model, SUBSET, SUBSET, num_curvature_frames=20)
    assert "curvature_trace/0" in first.figures
    assert not any("curvature" in name for name in diagnose(model, SUBSET, SUBSET).figures)


def test_a_model_whose_layers_are_not_known_is_refused_before_training(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
    run = Run(tmp_path, config(tracking=TrackingConfig(kind="none", curvature_frames=20)))
    with pytest.raises(ConfigError, match="Scale"):
        DeferredDiagnostics(Scale(), run.spec.task(), lambda record: None)


@pytest.mark.slow
def test_training_ends_with_the_same_model_and_every_record_has_the_figures(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain")
    watched = Run(tmp_path / "watched", config(tracking=TrackingConfig(kind="none", curvature_frames=50)))
    assert np.array_equal(plain.train().parameters, watched.train().parameters)
    assert watched.recorder.records
    for record in watched.recorder.records:
        assert sum(name.startswith("curvature_trace/") for name in record.diagnostics) > 1
        assert "signal_to_noise/model" in record.diagnostics
    assert not any("signal" in name for record in plain.recorder.records for name in record.diagnostics)


@pytest.mark.parametrize(("curvature", "subset", "named"),
                         [(1, 200, "tracking.curvature_frames"), (50, 1, "egs.num_diagnostic_frames")])
def test_a_single_frame_is_refused_before_training(curvature: int, subset: int, named: str) -> None:
    wrong = config(egs=EgsConfig(num_diagnostic_frames=subset), tracking=TrackingConfig(curvature_frames=curvature))
    assert [named in problem for problem in check(wrong)] == [True]
    assert check(config(tracking=TrackingConfig(curvature_frames=2))) == check(config())
