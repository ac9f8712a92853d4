"""The networks that curvature is measured on: BackPACK's two and two acoustic models."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


def conv_net_3c3d() -> nn.Sequential:
    """3C3D of DeepOBS, on 32 x 32 images of 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def all_cnn_c() -> nn.Sequential:
    """All-CNN-C (Springenberg et al. 2015), on 32 x 32 images of 100 classes, without dropout."""
    layers: list[nn.Module] = []
    for num_in, num_out, kernel, stride, padding in ((3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1), (96, 192, 3, 1, 1),
                                                     (192, 192, 3, 1, 1), (192, 192, 3, 2, 1), (192, 192, 3, 1, 0),
                                                     (192, 192, 1, 1, 0), (192, 100, 1, 1, 0)):
        layers += [nn.Conv2d(num_in, num_out, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten())


def mlp() -> nn.Sequential:
    """A feed-forward acoustic model: 360 inputs, four hidden layers of 1024, 2000 states."""
    dims = [360, 1024, 1024, 1024, 1024]
    hidden = [part for pair in itertools.pairwise(dims) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 2000))


def small_mlp() -> nn.Sequential:
    """Two hidden layers of 512 and 100 classes, small enough for what sends a vector for each class."""
    return nn.Sequential(nn.Linear(360, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))


def tdnn() -> nn.Sequential:
    """A TDNN of dilated convolutions over time, 3.0 million parameters, one target for a window of 29 frames."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = 40
    for index, dilation in enumerate((1, 1, 3, 3, 3), start=1):
        layers[f"tdnn{index}"], layers[f"relu{index}"] = nn.Conv1d(width, 384, 3, dilation=dilation), nn.ReLU()
        width = 384
    layers["flatten"], layers["output"] = nn.Flatten(), nn.Linear(384 * 7, 1000 // 3)
    return nn.Sequential(layers)


@dataclass(frozen=True)
class Net:
    """A network and the minibatch that it is measured on."""

    build: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    num_classes: int
    batch: int


NETS = {
    "3c3d": Net(conv_net_3c3d, (3, 32, 32), 10, 16),
    "allcnnc": Net(all_cnn_c, (3, 32, 32), 100, 8),
    "mlp": Net(mlp, (360,), 2000, 512),
    "tdnn": Net(tdnn, (40, 29), 333, 32),
    "smallmlp": Net(small_mlp, (360,), 100, 64),
}
