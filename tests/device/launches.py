"""Count the launches of a step of the benchmark networks on the pretended device, as JSON lines.

    python -m tests.device.launches [NET ...]
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ngsgd
from benchmarks import nets
from tests.device import pretended
from tests.device.pretended import PretendedTensor, moved

# The first 11 minibatches update every Fisher estimate; then every fourth does.
WARM_UP, PERIOD = 16, 4
# a network, and the shape of its minibatch
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (nets.mlp, (4, 360)), "tdnn": (nets.tdnn, (2, 40, 29)), "gpt": (partial(nets.Gpt, nets.SelfAttention), (2, 64)),
    "resnet14": (nets.resnet14, (4, 3, 32, 32)), "3c3d": (nets.conv_net_3c3d, (2, 3, 32, 32))}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "NGSGD": lambda model: ngsgd.NGSGD(model, 1e-3, loss_reduction="sum", momentum=0.9),
    "torch.optim.SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=True)}


def count(make: Callable[[], nn.Module], shape: tuple[int, ...], optimizer_of: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Launches of each step of a period, and the places where the host waited."""
    torch.manual_seed(0)
    x = torch.randint(100, shape) if make == NETS["gpt"][0] else torch.randn(shape)
    watch, launches, waits = pretended.Watch(), [], list[str]()
    with watch:
        model = moved(make())
        optimizer = optimizer_of(model)
        x_device = PretendedTensor(x)
        y = PretendedTensor(torch.arange(model(x_device).shape[0]) % 10)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x_device), y, reduction="sum")
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(WARM_UP):
            step()
        for _ in range(PERIOD):
            with watch.step():
                step()
            launches.append(watch.num_launches)
            waits += watch.waits
    return {"launches": launches, "waits": sorted(set(waits))}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pretended.register()
    for name in sys.argv[1:] or NETS:
        found = {kind: count(*NETS[name], make) for kind, make in OPTIMIZERS.items()}
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
