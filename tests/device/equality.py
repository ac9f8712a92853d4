"""Runs of both devices in parallel, and mistakes that the watch must see; one JSON object on each
line.

    python -m tests.device.equality [CASE ...]
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ngsgd
from tests.device import pretended
from tests.device.pretended import PretendedTensor, Watch, WrongDevice, device, host, moved

STEPS, N, D, CLASSES = 30, 24, 20, 10
CE = nn.functional.cross_entropy
_ON_HOST = torch.ones(4)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.relu(self.a(x)))))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
                         nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def _frozen() -> nn.Module:
    model = _mlp()
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    model[4].weight.requires_grad_(False)  # type: ignore[index]
    return model


def _hooked() -> nn.Module:
    """A hook of a parameter sees its gradient in the backward pass."""
    model = _mlp()
    model[0].weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[index]
    return model


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 10)), nn.Conv1d(2, 16, 3, padding=1), nn.ReLU(),
                         nn.Conv1d(16, 16, 3, padding=1, bias=False), nn.Flatten(),
                         nn.Linear(160, CLASSES))


def _norms() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, CLASSES))
    # its estimate never begins
    model[3].bias.requires_grad_(False)
    return model


def _images() -> nn.Module:
    """Convolutions with and without bias and groups; normalizations of channels; some frozen."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm(80), nn.Linear(80, CLASSES))
    for frozen in (model[7].bias, model[8].weight):
        frozen.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers of one shape": (_mlp, {}), "a layer used twice": (_Twice, {}),
    "frozen parameters": (_frozen, {}), "convolutions": (_convolutions, {}),
    "normalization": (_norms, {}), "images": (_images, {}), "loss is a mean": (_mlp, {"loss_reduction": "mean", "lr": 0.02}),
    "momentum": (_mlp, {"momentum": 0.5}), "masked rows": (_mlp, {"ignore_zero_rows": True}),
    "limit of rows": (_mlp, {"max_change_per_sample": 0.01}),
    "raise": (_mlp, {"on_nonfinite": "raise"}), "cosines": (_mlp, {"cosine_period": 3}),
    "accumulation": (_mlp, {}), "hook": (_hooked, {}),
}


def _train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, number: int, *,
           accumulates: bool, reduction: str) -> None:
    if not accumulates or number % 2 == 0:
        optimizer.zero_grad()
    CE(model(x), y, reduction=reduction).backward()
    if not accumulates or number % 2 == 1:
        optimizer.step()


def differences(name: str) -> tuple[float, float]:
    """Of parameters and of Fisher matrices after training, relative to their norms."""
    make, options = MODELS[name]
    torch.manual_seed(0)
    here = make()
    there = moved(copy.deepcopy(here))
    if name == "hook":
        there[0].weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[index]
    x_SND, y_SN = torch.randn(STEPS, N, D), torch.randint(0, CLASSES, (STEPS, N))
    watch, options = Watch(), {"lr": 0.01, **options}
    train = partial(_train, accumulates=name == "accumulation",
                    reduction=options.get("loss_reduction", "sum"))
    # as on the device
    of_cpu = ngsgd.NGSGD(here, update="polar", **options)
    with watch:
        of_device = ngsgd.NGSGD(there, **options)
    for number, (x, y) in enumerate(zip(x_SND, y_SN, strict=True)):
        train(here, of_cpu, x, y, number)
        with watch:
            train(there, of_device, PretendedTensor(x.clone()), PretendedTensor(y), number)
    with watch:
        states = host(of_device.state_dict()["natural_gradient"])
    own = of_cpu.state_dict()["natural_gradient"]
    # rows of W may change sign; W^T W may not
    return (max(_difference(p.detach(), q.raw) for p, q in zip(  # type: ignore[attr-defined]
        here.parameters(), there.parameters(), strict=True)),
        max(_difference(own[side]["W"].T @ own[side]["W"], states[side]["W"].T @ states[side]["W"])
            for side in own if "W" in own[side]))


def _difference(expected: Tensor, found: Tensor) -> float:
    return float((expected - found).norm() / expected.norm().clamp(min=1e-9))


MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "mixes devices": lambda x: x + _ON_HOST,
    "no device": lambda x: torch.zeros(4),
    "item": lambda x: x.sum().item(),
    "copy": lambda x: x.cpu(),
    "copy back": lambda x: _ON_HOST.to(device()),
    "truth values": lambda x: x[x > 0.0],
    "tolist": lambda x: x.tolist(),
}


def mistake(name: str) -> str | int:
    """The error that the watch raises, or how often it saw the host wait."""
    watch = Watch()
    with watch:
        x = PretendedTensor(torch.ones(4))
        with watch.step():
            try:
                MISTAKES[name](x)
            except WrongDevice as error:
                return f"{type(error).__name__}: {error}"
    return watch.waits.total()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pretended.register()
    for name in sys.argv[1:] or MODELS:
        found = mistake(name) if name in MISTAKES else differences(name)
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
