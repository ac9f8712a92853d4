"""Networks, batch sizes and optimizers of the timings: `step` is a complete training step without a
host synchronization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import nets
from benchmarks.gpu.measurement import Skipped
from ngsgd import NGSGD
from ngsgd.preconditioners import KFAC

# past the first updates of the Fisher estimates, which come at every step
WARM_UP = 13
# between two updates of the Fisher estimates, and of K-FAC's factors
PERIOD = 4
_LR = 1e-4


@dataclass(frozen=True)
class Workload:
    """A network, its input and its batch sizes; a target per row of the output."""

    build: Callable[[], nn.Module]
    # of one example
    inputs: Callable[[int], Tensor]
    num_classes: int
    targets_per_example: int
    # examples
    batches: tuple[int, int, int]
    # examples in a dry run
    dry_batch: int

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(inputs, targets), seeded."""
        torch.manual_seed(1)
        x, y = (
            self.inputs(size),
            torch.randint(self.num_classes, (size * self.targets_per_example,)),
        )
        return x.to(device), y.to(device)


def _of(name: str, batches: tuple[int, int, int], dry_batch: int) -> Workload:
    net = nets.NETS[name]
    return Workload(
        net.build,
        lambda size: torch.randn(size, *net.input_shape),
        net.num_classes,
        1,
        batches,
        dry_batch,
    )


_SMALL = _of("smallmlp", (128, 512, 2048), 2)
WORKLOADS = {
    "mlp": _of("mlp", (128, 512, 2048), 2),
    "tdnn": _of("tdnn", (128, 512, 2048), 4),
    "3c3d": _of("3c3d", (128, 512, 2048), 4),
    "resnet14": Workload(
        nets.resnet14, lambda size: torch.randn(size, 3, 32, 32), 10, 1, (128, 512, 2048), 4
    ),
    "gpt": Workload(
        lambda: nets.Gpt(nets.SelfAttention),
        lambda size: torch.randint(100, (size, 64)),
        100,
        64,
        (8, 32, 128),
        2,
    ),
}

# on a CPU three small networks suffice to run all the code
DRY_WORKLOADS = {"mlp": _SMALL, "resnet14": WORKLOADS["resnet14"], "gpt": WORKLOADS["gpt"]}


class TrainingStep:
    """A network, its optimizer and one minibatch that stays on the device."""

    def __init__(
        self,
        workload: Workload,
        size: int,
        optimizer: str,
        device: torch.device,
        *,
        capturable: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = workload.build().to(device)
        self.x, self.y = workload.batch(size, device)
        self.optimizers = OPTIMIZERS[optimizer](self.model, capturable)
        # K-FAC, which computes gradients itself
        self.maker = (
            KFAC(self.model, damping=1e-3, curvature_interval=PERIOD, inverse_interval=PERIOD)
            if optimizer == "K-FAC"
            else None
        )

    def __call__(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.maker is None:
            self._loss().backward()
        else:
            self.maker.evaluate_and_step(self._loss)
        for optimizer in self.optimizers:
            optimizer.step()

    def repeat(self, count: int) -> None:
        for _ in range(count):
            self()

    def _loss(self) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(self.model(self.x), self.y)
        return loss


def _muon(model: nn.Module, capturable: bool) -> list[torch.optim.Optimizer]:
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise Skipped(f"torch {torch.__version__} has no torch.optim.Muon")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        muon(matrices, lr=_LR),
        torch.optim.AdamW(others, lr=_LR, capturable=capturable, fused=True),
    ]


def _sgd(model: nn.Module, _: bool) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), _LR, momentum=0.9, foreach=True)]


OPTIMIZERS: dict[str, Callable[[nn.Module, bool], list[torch.optim.Optimizer]]] = {
    "SGD": _sgd,
    "NG-SGD": lambda model, _: [
        NGSGD(model, _LR, loss_reduction="mean", momentum=0.9, update_period=PERIOD)
    ],
    "AdamW": lambda model, capturable: [
        torch.optim.AdamW(model.parameters(), _LR, capturable=capturable, fused=True)
    ],
    "Muon": _muon,
    "K-FAC": _sgd,
}
