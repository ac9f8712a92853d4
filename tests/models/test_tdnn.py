"""Time-delay networks: the numbers of dilated convolutions, in windows and complete utterances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.config import EgsConfig, ModelConfig, RunConfig, check
from ngsgd.models import DataStatistics, Window, build_model
from ngsgd.models.growing import utterance_logits
from ngsgd.models.tdnn import FactoredTdnn, Tdnn, TimeDelayNetwork
from ngsgd.optim.groups import layer_options
from tests import toy
from tests.reference import models as reference

DIM, LEFT, RIGHT, CLASSES = 3, 5, 4, 6
WINDOW = Window(LEFT, RIGHT, DIM)
OFFSETS = {"tdnn": "-1,0,1 -2,2 -2,1", "tdnnf": "-1,0,1 -2,0,2 -2,0,1"}


def network(kind: Any, normalize: Any = "renormalize", *, transform: Tensor | None = None) -> TimeDelayNetwork:
    """A network in test mode whose statistics and output layer are not those it starts with."""
    config = ModelConfig(kind=kind, num_layers=3, hidden_dim=8, bottleneck_dim=4, normalize=normalize, tdnn_offsets=OFFSETS[kind])
    model = build_model(config, (LEFT + 1 + RIGHT) * DIM, CLASSES, 1, window=WINDOW, statistics=DataStatistics((), transform))
    assert isinstance(model, TimeDelayNetwork)
    model.get_submodule("output").requires_grad_(False)
    for parameter in model.get_submodule("output").parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(2))
    model.train()(torch.randn(50, (LEFT + 1 + RIGHT) * DIM, generator=torch.Generator().manual_seed(3)))
    return model.eval()


def utterance(num_frames: int) -> tuple[np.ndarray, Tensor]:
    """(frames, the same spliced)."""
    frames = np.random.default_rng(num_frames).normal(size=(num_frames, DIM))
    row_TW = np.arange(num_frames)[:, None] + np.arange(-LEFT, RIGHT + 1)
    return frames, torch.from_numpy(frames[np.clip(row_TW, 0, num_frames - 1)].reshape(num_frames, -1)).float()


@pytest.mark.parametrize("num_frames", [1, 2, 17])
@pytest.mark.parametrize("normalize", ["renormalize", "batchnorm"])
@pytest.mark.parametrize("kind", ["tdnn", "tdnnf"])
def test_windows_and_utterances_match_the_reference_frame_by_frame(kind: Any, normalize: Any, num_frames: int) -> None:
    model = network(kind, normalize)
    frames, x_TI = utterance(num_frames)
    expected = np.stack([reference.frame_by_frame(model, frames, t) for t in range(num_frames)])
    for logits in (model(x_TI), utterance_logits(model, x_TI)):
        # float32, three layers
        np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("has_transform", [False, True])
@pytest.mark.parametrize("kind", ["tdnn", "tdnnf"])
def test_a_side_input_affects_its_output_alone(kind: Any, has_transform: bool) -> None:
    """A bias of the first layer does what a constant next to all frames does."""
    side_dim = 2
    config = ModelConfig(kind=kind, num_layers=3, hidden_dim=8, bottleneck_dim=4, tdnn_offsets=OFFSETS[kind],
                         input_transform="lda" if has_transform else "none")
    transform = torch.randn(7, 3 * DIM + side_dim + 1, generator=torch.Generator().manual_seed(5)) if has_transform else None
    window = WINDOW._replace(side_dim=side_dim)
    model = build_model(config, window.num_inputs, CLASSES, 1, window=window, statistics=DataStatistics((), transform)).eval()
    with torch.no_grad():
        for parameter in model.get_submodule("output").parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(2))
    x_TI = utterance(17)[1]
    side_TS = torch.randn(4, side_dim, generator=torch.Generator().manual_seed(6))[torch.arange(17) // 5]
    beside_TI = torch.cat([x_TI, side_TS], dim=1)
    expected = model(beside_TI)
    # float32, three layers
    torch.testing.assert_close(utterance_logits(model, beside_TI), expected, rtol=2e-5, atol=2e-5)
    for t in (0, 7, 16):
        alone = torch.cat([x_TI, side_TS[t].expand(17, -1)], dim=1)
        torch.testing.assert_close(model(alone)[t], expected[t], rtol=2e-5, atol=2e-5)
    if not has_transform:
        first = next(layer for layer in model.children() if isinstance(layer, Tdnn))
        plain = build_model(config, WINDOW.num_inputs, CLASSES, 1, window=WINDOW).eval()
        state = dict(model.state_dict())
        name = next(name for name, module in model.named_modules() if module is first.affine)
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = weight[:, :-side_dim]
        state[f"{name}.bias"] = state[f"{name}.bias"] + weight[:, -side_dim:] @ side_TS[7]
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(x_TI)[7], expected[7], rtol=2e-5, atol=2e-5)


def test_a_layer_is_a_dilated_convolution() -> None:
    layer = Tdnn(ModelConfig(hidden_dim=7), DIM, (-3, 0, 3))
    x = torch.randn(1, 20, DIM, generator=torch.Generator().manual_seed(0))
    needed, splices = layer.plan(np.arange(3, 17))
    assert (needed[0], needed[-1]) == (0, 19)
    expected = reference.dilated(layer.affine, x[0], (-3, 0, 3))
    found = layer.affine(splices[0](x))[0].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_frames_that_the_output_depends_on_are_computed() -> None:
    model, rows = network("tdnn"), []
    for layer in model.children():
        if isinstance(layer, Tdnn):
            layer.affine.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    model(utterance(1)[1])
    # the third layer at 0, the second at -2 and 1, the first at -4, -1, 0 and 3
    assert rows == [4, 2, 1]


@pytest.mark.parametrize("kind", ["tdnn", "tdnnf"])
def test_the_derivative_is_that_of_finite_differences(kind: Any) -> None:
    model = network(kind).double()
    x = utterance(2)[1].double().requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradcheck(model.utterance, (torch.cat([x, x])[:1].detach().requires_grad_(),))


@pytest.mark.parametrize("kind", ["tdnn", "tdnnf"])
def test_every_affine_layer_takes_natural_gradient_steps(kind: Any) -> None:
    optimizer = NGSGD(network(kind), 1e-3)
    assert optimizer.fallbacks == [] and f"{kind}2.affine" in optimizer.preconditioned


def test_an_input_transform_is_applied_before_the_first_layer() -> None:
    transform = torch.randn(5, 3 * DIM + 1, generator=torch.Generator().manual_seed(4))
    model = network("tdnn", transform=transform)
    frames, x_TI = utterance(9)
    expected = np.stack([reference.frame_by_frame(model, frames, t) for t in range(9)])
    np.testing.assert_allclose(utterance_logits(model, x_TI).detach().numpy(), expected, rtol=2e-5, atol=2e-5)
    assert not any("transform" in name for name in model.state_dict())


def departure(M: Tensor) -> float:
    """How far a matrix is from orthogonal rows of equal length, 0 to 1; Kaldi's floating scale."""
    P = M @ M.T
    return float((P / (P.square().sum() / P.trace()) - torch.eye(len(P))).norm() / len(P) ** 0.5)


@pytest.mark.slow
def test_training_keeps_the_factors_semi_orthogonal_and_depends_on_the_seed(tmp_path: Path) -> None:
    model = ModelConfig(kind="tdnnf", num_layers=3, hidden_dim=16, bottleneck_dim=6, tdnn_offsets="-1,0 -1,0,1 0")
    config = toy.config(model=model, schedule=replace(toy.config().schedule, num_epochs=4.0))
    run, again = toy.Run(tmp_path / "a", config), toy.Run(tmp_path / "b", config)
    before = [departure(m.factor.weight.detach()) for m in run.model.modules() if isinstance(m, FactoredTdnn)]
    end = run.train()
    state = run.store.layout.unflatten(end.parameters)
    after = [departure(state[f"tdnnf{number}.factor.weight"]) for number in (2, 3)]
    assert max(after) < 0.1 < min(before)
    assert run.recorder.records[-1].valid.accuracy > 0.8  # six classes; chance is 0.17
    assert again.train().model_sha256 == end.model_sha256


def test_layer_options_name_the_factors() -> None:
    assert layer_options(network("tdnnf")) == {
        f"tdnnf{number}.factor": {"orthonormal_constraint": -1.0} for number in (2, 3)}
    assert layer_options(nn.Sequential(nn.Linear(2, 2))) == {}


@pytest.mark.parametrize(("changes", "said"), [
    ({"tdnn_offsets": "-1,0,1 a"}, "rising frame"), ({"tdnn_offsets": "1,0"}, "rising frame"),
    ({"tdnn_offsets": "-1,0,1 0"}, "model.num_layers is 1"),
    ({"tdnn_offsets": "-6,0", "num_layers": 1}, "6 frames")])
def test_offsets_that_cannot_be_are_reported(changes: dict[str, object], said: str) -> None:
    model = replace(ModelConfig(kind="tdnn", num_layers=1), **changes)  # type: ignore[arg-type]
    (problem,) = check(RunConfig(model=model, egs=EgsConfig(left_context=5, right_context=5)))
    assert said in problem


@pytest.mark.parametrize("kind", ["tdnn", "tdnnf"])
def test_no_rows_give_no_logits(kind: Any) -> None:
    assert network(kind)(utterance(3)[1][:0]).shape == (0, CLASSES)
