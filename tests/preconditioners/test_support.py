"""Every cell of the support table works, or raises the ConfigError that the table announces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS
from tests.gloo import gloo_group
from tests.preconditioners.problems import gradients_of
from tests.preconditioners.support import CE, FEATURES, PAGE, Feature, made, with_table

CELLS = [pytest.param(kind, feature, id=f"{kind}-{feature.label}") for feature in FEATURES
         for kind in METHODS]


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process, for DistributedDataParallel."""
    with gloo_group(tmp_path_factory.mktemp("group")):
        yield


def _nll(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.nll_loss(f.log_softmax(dim=1), y)


def _require_works(kind: str, feature: Feature, net: tuple[nn.Module, nn.Module, Tensor, Tensor],
                   **options: Any) -> None:
    """The third step goes downhill and leaves no parameter of the feature its plain gradient."""
    model, called, x, y = net
    # pairs of L-BFGS need positive curvature, also in the first steps
    preconditioner = METHODS[kind](model, damping=10.0 if kind == "lbfgs" else 0.1, **options)
    loss, num_rows = (_nll, len(y)) if feature.loop == "any loss" else (CE, None)
    for _ in range(3):  # some methods begin with the gradient itself
        model.zero_grad()
        preconditioner.evaluate(lambda: loss(called(x), y), num_rows=num_rows)
        plain = gradients_of(model)
        preconditioner.step(lr=0.01)
        found = gradients_of(model)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert set(found) == set(dict(model.named_parameters()))
    assert all(bool(g.isfinite().all()) for g in found.values())
    assert sum(float((found[name] * g).sum()) for name, g in plain.items()) > 0.0
    kept = {name for name in feature.preconditioned if torch.equal(found[name], plain[name])}
    assert kept == set(options.get("skip", ()))


@pytest.mark.parametrize(("kind", "feature"), CELLS)
def test_every_cell_behaves_as_the_table_states(kind: str, feature: Feature) -> None:
    net = made(feature)
    if not feature.refuses(kind):
        _require_works(kind, feature, net)
        return
    before = [p.detach().clone() for p in net[0].parameters()]
    with pytest.raises(ConfigError) as error:
        _require_works(kind, feature, net)
    assert all(torch.equal(p, was) for p, was in zip(net[0].parameters(), before, strict=True))
    # a message with the way out, which works
    named = feature.named if kind in feature.errors else "cross-entropy" if feature.loop == "any loss" else "kfac"
    assert named in str(error.value) or named in str(error.value).lower()
    if feature.remedy is not None and kind in feature.errors:
        _require_works(kind, feature, made(feature), **feature.remedy)


def test_the_table_of_the_documentation_is_this_one() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.entries"
