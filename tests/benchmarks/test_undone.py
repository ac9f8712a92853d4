"""Section 5 of the paper: the exact Fisher matrix, the change of variables, and the fixed point."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.paper.undone import MINIBATCH, Network, exact_fisher, inverse, main, online_change, spread, train

ROOT = Path(__file__).parents[2]


def test_the_fisher_matrix_is_the_expectation_over_all_classes() -> None:
    network, x_ND = Network((5, 4, 3), 0), torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fisher, A_II, B_OO = exact_fisher(network, x_ND, 0)
    expected = torch.zeros_like(fisher)
    for x, label in itertools.product(x_ND, range(3)):
        x_1D, y_1 = x[None], torch.tensor([label])
        inputs, derivatives = network.rows(x_1D, y_1)[0]
        gradient = (derivatives.T @ inputs).flatten()
        expected += torch.exp(torch.tensor(-network.loss(x_1D, y_1))) * torch.outer(gradient, gradient) / len(x_ND)
    torch.testing.assert_close(fisher, expected)
    assert fisher.shape == (4 * 6, 4 * 6)
    assert A_II.shape == (6, 6)
    assert B_OO.shape == (4, 4)


def test_natural_gradient_evens_the_eigenvalues_and_exact_factors_do_so_best() -> None:
    random = torch.Generator().manual_seed(0)
    x_ND, y_N = torch.randn(1600, 6, dtype=torch.float64, generator=random) * torch.arange(1, 7), torch.arange(1600) % 3
    network = train((x_ND, y_N), 0, 0.001, 1, (6, 8, 8, 3))
    rows = [network.rows(x_ND[first:first + MINIBATCH], y_N[first:first + MINIBATCH])[1] for first in range(0, 1600, MINIBATCH)]
    fisher, A_II, B_OO = exact_fisher(network, x_ND, 1)
    changes = (torch.eye(len(fisher), dtype=torch.float64), online_change(rows, 8, 4.0), online_change(rows, 8, 0.25),
               torch.kron(inverse(B_OO), inverse(A_II)))
    ratios = [spread(fisher, change)[0] for change in changes]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2.0 * ratios[-1]


@pytest.mark.slow
def test_the_page_has_the_rows_of_its_command_and_the_update_converges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (ROOT / "benchmarks" / "paper" / "UNDONE.md").read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"(<!-- 5.*? -->).*?(<!-- end -->)", r"\1\2", kept, flags=re.DOTALL), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["undone", "--page", str(page)])
    main()
    written = page.read_text(encoding="utf-8")
    # figures depend on the processor
    assert [line.split("|")[1] for line in written.splitlines() if "|" in line] == \
        [line.split("|")[1] for line in kept.splitlines() if "|" in line]
    last = [float(line.split("|")[-2]) for line in written.splitlines() if line.startswith("| exact covariance")]
    assert max(map(abs, last)) < 1e-6
