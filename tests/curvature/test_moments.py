"""Parts with a separate fast implementation: moments of convolutions, roots and samples of
cross-entropy, large results.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import losses
from ngsgd.curvature.forms import kronecker, memory
from ngsgd.curvature.forms.layer_inputs import Patches
from tests.curvature.support import close


@pytest.mark.parametrize("sliced", [1, 1 << 20])   # a sample at a time, and all at once
@pytest.mark.parametrize(("shape", "kernel", "stride", "dilation", "padding"), [
    ((3, 4, 11), (3,), (1,), (2,), (0,)),
    # one output: windows that have nothing in common
    ((3, 4, 7), (3,), (1,), (3,), (0,)),
    ((3, 4, 6), (4,), (1,), (1,), (2,)),
    ((3, 2, 6, 7), (3, 2), (1, 2), (1, 2), (1, 0)),
    ((3, 2, 5, 6), (2, 3), (1, 1), (2, 1), (0, 1)),
    ((2, 2, 4, 5, 4), (2, 1, 3), (1, 2, 1), (1, 1, 1), (1, 0, 1)),
])
def test_the_moment_of_overlapping_patches_is_that_of_the_patches(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...],
                                                                   kernel: tuple[int, ...], stride: tuple[int, ...],
                                                                   dilation: tuple[int, ...], padding: tuple[int, ...],
                                                                   sliced: int) -> None:
    monkeypatch.setattr(kronecker, "_SLICED", sliced)
    torch.manual_seed(0)
    inputs = Patches(torch.randn(shape).double(), kernel, stride, dilation, [(side, side) for side in padding], shape[0])
    assert inputs.overlap
    a_XI = inputs.rows(0, shape[0]).flatten(0, 1)
    total = kronecker.Gram()
    num_rows, moment_II = kronecker.add_inputs(total, inputs, "expand"), total.total()
    close(moment_II, a_XI.T @ a_XI)
    assert num_rows == len(a_XI)


@pytest.mark.parametrize("logits", [[0.3, -1.0, 2.0, 0.0], [50.0, 0.0, -80.0, 1.0], [0.0, -800.0, -900.0, 0.0],
                                    [-900.0, 0.0, -1e4, -1e4]])
def test_the_columns_of_cross_entropy_are_a_root_also_where_probabilities_underflow(logits: list[float]) -> None:
    f_NC = torch.tensor([logits]).double()
    settings = vars(nn.CrossEntropyLoss(reduction="sum"))
    view = losses.evaluation(settings, nn.CrossEntropyLoss, f_NC, torch.tensor([0]), torch.tensor(1.0))
    root_VC = torch.cat(list(view.columns(1, 2)))[:, 0]
    p_C = f_NC[0].softmax(dim=0)
    assert len(root_VC) == 3 and bool(root_VC.isfinite().all())
    close(root_VC.T @ root_VC, torch.diag(p_C) - torch.outer(p_C, p_C))


def test_classes_without_probability_are_never_drawn() -> None:
    p_RC = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    y_RM = losses._drawn(p_RC, 1000, torch.Generator().manual_seed(0))
    assert set(y_RM[0].tolist()) == {1, 3} and set(y_RM[1].tolist()) == {4} and set(y_RM[2].tolist()) == {0}


@pytest.mark.parametrize("pages", ["as they are", "none to ask for"])
def test_large_results_are_ordinary_tensors(monkeypatch: pytest.MonkeyPatch, pages: str) -> None:
    if pages == "none to ask for":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory._madvise.cache_clear()
    like = torch.zeros(1, dtype=torch.float64)
    x: Tensor = memory.empty(like, 3, 1 << 18)
    memory._madvise.cache_clear()
    x.fill_(2.0)
    assert x.shape == (3, 1 << 18) and x.dtype == torch.float64 and float(x.sum()) == 6.0 * (1 << 18)
