"""Three experiments that section 5 of the paper describes and its authors left undone.

    python -m benchmarks.paper.undone [--page benchmarks/paper/UNDONE.md]

The eigenvalues of the exact Fisher matrix of a layer, before and after the change of variables that
natural gradient is (5.1). Rescaling by the norm of the previous minibatch instead of the present
one (5.2). The fixed point of the online update (5.3). Data are scikit-learn's 8 x 8 digits, and
networks have tanh units.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor

import ngsgd
from benchmarks.paper.report import between

NUM_TRAIN, MINIBATCH = 1297, 64
# N x (I + 1) inputs with a one, N x O derivatives of log-probabilities
Rows = tuple[Tensor, Tensor]


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 x 64 images with mean 0 and variance 1, and their classes."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x_ND, y_N = torch.from_numpy(x)[order], torch.from_numpy(y)[order]
    return (x_ND - x_ND.mean()) / x_ND.std(), y_N.long()


class Network:
    """A tanh network in float64 whose layers give their rows."""

    def __init__(self, dims: tuple[int, ...], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(o, i + 1, generator=random, dtype=torch.float64) / (i + 1) ** 0.5
                        for i, o in itertools.pairwise(dims)]

    def forward(self, x_ND: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return log-probabilities, and the inputs and outputs of each affine layer."""
        inputs, outputs = [], []
        for index, W_OI in enumerate(self.weights):
            x_ND = torch.cat([torch.tanh(x_ND) if index else x_ND, x_ND.new_ones(len(x_ND), 1)], dim=1)
            inputs.append(x_ND.detach())
            x_ND = (x_ND @ W_OI.T).requires_grad_()
            outputs.append(x_ND)
        return torch.log_softmax(x_ND, dim=1), inputs, outputs

    def rows(self, x_ND: Tensor, y_N: Tensor) -> list[Rows]:
        """Return the rows of each layer for the labels of the data."""
        log_p, inputs, outputs = self.forward(x_ND)
        found = torch.autograd.grad(log_p.gather(1, y_N[:, None]).sum(), outputs)
        return list(zip(inputs, found, strict=True))

    def loss(self, x_ND: Tensor, y_N: Tensor) -> float:
        """Return the mean cross-entropy in nats."""
        return float(-self.forward(x_ND)[0].detach().gather(1, y_N[:, None]).mean())


def minibatches(seed: int, num_epochs: int) -> Iterator[Tensor]:
    """Yield the rows of each minibatch."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        yield from torch.randperm(NUM_TRAIN, generator=random).split(MINIBATCH)


def train(data: Rows, seed: int, lr: float, num_epochs: int, dims: tuple[int, ...] = (64, 48, 48, 10), *,
          rescales: Callable[[Tensor, Tensor], Tensor] = lambda present, previous: present) -> Network:
    """Train by online natural gradient; `rescales` chooses from the present and previous gamma."""
    x_ND, y_N = data
    network = Network(dims, seed)
    sides = [[ngsgd.OnlineNaturalGradient(rank=min(20, dim - 1), update_period=4) for dim in (W.shape[1], W.shape[0])]
             for W in network.weights]
    previous: list[Tensor | None] = [None] * len(sides)
    for chosen in minibatches(seed, num_epochs):
        for layer, (rows, estimates) in enumerate(zip(network.rows(x_ND[chosen], y_N[chosen]), sides, strict=True)):
            (x, scale_x), (g, scale_g) = (one.precondition(side) for one, side in zip(estimates, rows, strict=True))
            gamma = scale_x * scale_g
            before = previous[layer]
            scale = rescales(gamma, gamma if before is None else before)
            network.weights[layer] += lr * scale * (g.T @ x)
            previous[layer] = gamma
    return network


def exact_fisher(network: Network, x_ND: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Fisher matrix (O I, O I) of a layer over all classes, and its factors."""
    log_p, inputs, outputs = network.forward(x_ND)
    x_NI, num_classes = inputs[layer], log_p.shape[1]
    fisher, factor = (torch.zeros(size, size, dtype=torch.float64) for size in (x_NI.shape[1] * outputs[layer].shape[1],
                                                                                outputs[layer].shape[1]))
    for one in range(num_classes):
        (g_NO,) = torch.autograd.grad(log_p[:, one].sum(), outputs[layer], retain_graph=True)
        weighted = log_p[:, one].detach().exp().sqrt()[:, None] * g_NO
        rows = (weighted[:, :, None] * x_NI[:, None, :]).flatten(1)
        fisher, factor = fisher + rows.T @ rows / len(x_ND), factor + weighted.T @ weighted / len(x_ND)
    return fisher, x_NI.T @ x_NI / len(x_ND), factor


def spread(fisher: Tensor, change: Tensor) -> tuple[float, float]:
    """Return largest / mean eigenvalue of C F, and the standard deviation of the logarithms.

    Eigenvalues below 1e-6 of the mean are rounding errors and do not enter the second.
    """
    L = torch.linalg.cholesky(change)
    values = torch.linalg.eigvalsh(L.T @ fisher @ L)
    kept = values[values > 1e-6 * values.mean()]
    return float(values[-1] / values.mean()), float(kept.log().std())


def online_change(rows: list[Rows], rank: int, alpha: float) -> Tensor:
    """Return C_out (x) C_in of estimates that have seen these minibatches."""
    def matrix(side: int) -> Tensor:
        dim = rows[0][side].shape[1]
        estimate = ngsgd.OnlineNaturalGradient(rank=min(rank, dim - 1), alpha=alpha)
        for one in rows:
            estimate.precondition(one[side])
        factors = estimate.factors
        assert factors is not None
        return torch.eye(dim, dtype=torch.float64) - factors[0].T @ factors[1]
    C = torch.kron(matrix(1), matrix(0))
    return (C + C.T) / 2


def inverse(factor: Tensor) -> Tensor:
    """Return the inverse with damping of 1e-4 of the mean eigenvalue."""
    damping = 1e-4 * factor.diagonal().mean()
    inverted: Tensor = torch.linalg.inv(factor + damping * torch.eye(len(factor), dtype=factor.dtype))
    return inverted


def eigenvalue_table(data: Rows) -> str:
    """5.1: the middle layer of 64-24-24-10, by epochs of training."""
    epochs, dims, seeds = (0, 1, 3, 10, 30), (64, 24, 24, 10), (0, 1, 2)
    x_ND, y_N = data[0][:NUM_TRAIN], data[1][:NUM_TRAIN]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for num_epochs, seed in itertools.product(epochs, seeds):
        network = train(data, seed, 0.002, num_epochs, dims)
        rows = [network.rows(x_ND[chosen], y_N[chosen])[1] for chosen in minibatches(seed + 100, 5)]
        fisher, A, B = exact_fisher(network, x_ND, 1)
        changes = {"none": torch.eye(len(fisher), dtype=torch.float64),
                   **{f"NG-SGD, rank {rank}, alpha {alpha:g}": online_change(rows, rank, alpha)
                      for alpha, rank in ((4.0, 20), (4.0, 12), (1.0, 20), (0.25, 20), (0.0625, 20))},
                   "exact Kronecker factors": torch.kron(inverse(B), inverse(A))}
        for name, change in changes.items():
            found.setdefault((name, num_epochs), []).append(spread(fisher, change))
    head = [f"| change of variables | {' | '.join(f'{one} epochs' for one in epochs)} |", "|---" * (len(epochs) + 1) + "|"]
    return "\n".join(head + [f"| {name} | " + " | ".join(
        "{:.0f}; {:.2f}".format(*map(statistics.fmean, zip(*found[name, one], strict=True))) for one in epochs) + " |"
        for name in changes])


def rescaling_table(data: Rows) -> str:
    """5.2: validation loss with gamma of the present and of the previous minibatch."""
    x_ND, y_N = data
    rates, seeds, num_epochs = tuple(0.0005 * 2.0 ** k for k in range(7)), range(1, 11), 6
    rules = {"present minibatch (38)": lambda present, previous: present, "previous minibatch": lambda present, previous: previous}

    def loss(rule: str, lr: float, seed: int) -> float:
        found = train(data, seed, lr, num_epochs, rescales=rules[rule]).loss(x_ND[NUM_TRAIN:], y_N[NUM_TRAIN:])
        return found if math.isfinite(found) else math.inf
    best = {rule: min((loss(rule, lr, 0), lr) for lr in rates)[1] for rule in rules}
    losses = {rule: [loss(rule, best[rule], seed) for seed in seeds] for rule in rules}
    p = stats.ttest_rel(*losses.values()).pvalue
    rows = [f"| {rule} | {best[rule]:g} | {statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f}) |"
            for rule, values in losses.items()]
    return "\n".join(["| gamma of the | best rate | validation loss, ten seeds |", "|---|---|---|", *rows,
                      f"| paired difference | | p = {p:.2g} |"])


def fixed_point_table() -> str:
    """5.3: distance of the estimate from the best one of its form, for a known covariance."""
    dim, rank, checks = 50, 10, (10, 30, 100, 300, 1000)
    random = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(dim, dim, generator=random, dtype=torch.float64))
    values = torch.arange(1, dim + 1, dtype=torch.float64) ** -1.5
    root = values.sqrt()[:, None] * basis.T
    rows = ["| rows | figure | " + " | ".join(f"{one} updates" for one in checks) + " |", "|---" * (len(checks) + 2) + "|"]
    for name in ("exact covariance", "128 samples"):
        estimate = ngsgd.OnlineNaturalGradient(rank=rank, num_minibatches_history=16.0)
        figures = []
        for update in range(1, checks[-1] + 1):
            sample_ND = torch.randn(128, dim, generator=random, dtype=torch.float64) @ root
            estimate.precondition(sample_ND if name == "128 samples" else dim ** 0.5 * root)
            if update in checks:
                state = estimate.state
                assert state is not None
                R = torch.nn.functional.normalize(state.W_RD, dim=1)
                overlap = float((R @ basis[:, :rank]).square().sum() / rank)
                of_d = max(abs((torch.from_numpy(state.d_R) + state.rho) / values[:rank] - 1.0).tolist())
                figures.append((f"{1.0 - overlap:.1e}", f"{of_d:.1e}", f"{state.rho / float(values[rank:].mean()) - 1.0:+.1e}"))
        for figure, cells in zip(("part of the top 10 eigenvectors missed", "largest error of d + rho, relative",
                                  "error of rho, relative"), zip(*figures, strict=True), strict=True):
            rows.append(f"| {name} | {figure} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("benchmarks/paper/UNDONE.md"))
    page = parser.parse_args().page
    data = digits()
    tables = {"5.1": eigenvalue_table(data), "5.2": rescaling_table(data), "5.3": fixed_point_table()}
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
        text = between(text, name, table)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
