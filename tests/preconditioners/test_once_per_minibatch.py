"""Layers that run once for the complete minibatch, whose rows are no samples: position embeddings,
an affine layer of one row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS
from tests.preconditioners.problems import close

N, T = 4, 5
# chains alone
SEES_ROWS = [kind for kind in METHODS if METHODS[kind].traits.fisher]


class _Net(nn.Module):
    """Words and positions; `form` is how the positions are asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.position_embeddings, self.out, self.form = nn.Embedding(7, 4), nn.Embedding(T, 4), nn.Linear(4, 3), form

    def forward(self, x_NT: Tensor) -> Tensor:
        t_T = torch.arange(T)
        at = {"T": t_T, "1 x T": t_T[None], "N x T": t_T.expand(len(x_NT), T)}[self.form]
        outer: Tensor = self.out((self.words(x_NT) + self.position_embeddings(at)).tanh())
        return outer


class _OneRow(nn.Module):
    """A learned offset, made by an affine layer from one row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.offset, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x_ND: Tensor) -> Tensor:
        outer: Tensor = self.out((self.inner(x_ND) + self.offset(torch.ones(1, 2, dtype=x_ND.dtype))).tanh())
        return outer


def _gradients(model: nn.Module, kind: str, x: Tensor, y: Tensor, **options: object) -> dict[str, Tensor]:
    preconditioner = METHODS[kind](model, damping=0.1, **options)
    model.zero_grad()
    preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()))
    preconditioner.step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(7, (N, T), generator=generator), torch.randint(3, (N, T), generator=generator)


@pytest.mark.entry("P10", "your model has a layer that runs once for the complete minibatch (BERT's position_embeddings, 1 x T) "
                   "and you use a preconditioner that looks at rows", "error",
                   "ConfigError in the first backward pass names the layer; give it an input for each sample, or leave it its "
                   "plain gradient with skip=")
@pytest.mark.parametrize("form", ["T", "1 x T"])
@pytest.mark.parametrize("kind", SEES_ROWS)
def test_position_embeddings_that_run_once_are_refused(kind: str, form: str) -> None:
    with pytest.raises(ConfigError, match="position_embeddings"):
        _gradients(_Net(form).double(), kind, *_words())


@pytest.mark.entry("P10")
def test_an_affine_layer_of_one_row_is_refused() -> None:
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    with pytest.raises(ConfigError, match="offset"):
        _gradients(_OneRow().double(), "kfac", x, y)


@pytest.mark.entry("P10")
def test_a_skipped_position_embedding_keeps_its_gradient_and_others_theirs() -> None:
    """All forms give the same numbers then, and with an input for each sample the layer has its
    curvature, too.
    """
    each = _gradients(_Net("N x T").double(), "diagonal", *_words(), skip=("position_embeddings",))
    plain = _Net("N x T").double()
    x, y = _words()
    nn.functional.cross_entropy(plain(x).flatten(0, -2), y.flatten()).backward()
    assert plain.position_embeddings.weight.grad is not None
    for form in ("T", "1 x T"):
        once = _gradients(_Net(form).double(), "diagonal", x, y, skip=("position_embeddings",))
        close(once["position_embeddings.weight"], plain.position_embeddings.weight.grad)
        for name in ("words.weight", "out.weight", "out.bias"):
            close(once[name], each[name])
