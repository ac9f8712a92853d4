"""Analytic comparison of synchronous training and averaging on nodes of 8 GPUs.

Letters: n nodes, g GPUs of a node, P bytes of the gradients or parameters, t seconds of a training
step without exchange, H steps between averagings. V, B bytes per second and direction inside a node
(of a GPU) and between nodes (of a node); L_V, L_B latencies.

A hierarchical all-reduce sums in the node, then among the nodes (each GPU its share of P), then
gathers in the node:

    inside    A_V = 2 (g - 1) (L_V + P / (g V))
    between   A_B = 2 (n - 1) (L_B + P / (n B))

    synchronous, at every step                       T = t + max(0, A_V + A_B - o t)
    averaging over all GPUs, every H steps           T = t + (A_V + A_B) / H
    a node sums, nodes average every H steps         T = t + max(0, A_V - o t) + A_B / H

o is the fraction of a step, its backward pass, that hides the exchange of gradients. The ratio of
the rate of averaging to that of synchronous training is the data factor m up to which averaging is
faster (`formulas.data_factor`). The model neglects stragglers, and that synchronous training has n
g times the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuNode:
    """A node with 8 H200 GPUs.

    Sources: NVIDIA H200 data sheet (SXM: 989 TFLOP/s of dense bfloat16; NVLink 900 GB/s and PCIe
    Gen5 128 GB/s, both directions together). Assumptions: 40 % of the peak in a training step, and
    1 ms for the launches of a step of a small network.
    """

    num_gpus: int = 8
    flops: float = 989e12
    # fraction of the peak that a step reaches
    utilization: float = 0.4
    # minimum duration of a step of a small network
    least_step_s: float = 1e-3
    # o: the backward pass is two thirds of a step
    hidden: float = 2 / 3

    def step_s(self, num_parameters: float, minibatch_size: int) -> float:
        """t: 6 FLOPs for each parameter and row of a minibatch, forward and backward together."""
        return max(
            self.least_step_s,
            6.0 * num_parameters * minibatch_size / (self.utilization * self.flops),
        )


@dataclass(frozen=True)
class Interconnect:
    """Bytes per second and direction, and seconds of latency, inside a node and between nodes."""

    inside: float
    inside_latency_s: float
    between: float
    between_latency_s: float
    source: str


INTERCONNECTS = {
    "infiniband": Interconnect(
        450e9,
        3e-6,
        400e9,
        5e-6,
        "NVLink; 8 ports of NDR InfiniBand, 400 Gb/s each (NVIDIA DGX H200 data sheet)",
    ),
    "ethernet-100": Interconnect(
        450e9, 3e-6, 12.5e9, 2e-5, "NVLink; one port of 100 Gb/s Ethernet, IEEE 802.3"
    ),
    "ethernet-10": Interconnect(
        450e9, 3e-6, 1.25e9, 1e-4, "NVLink; one port of 10 Gb/s Ethernet, IEEE 802.3"
    ),
    "ethernet-1": Interconnect(
        450e9, 3e-6, 1.25e8, 2e-4, "NVLink; one port of 1 Gb/s Ethernet, IEEE 802.3"
    ),
    "pcie": Interconnect(
        64e9,
        1e-5,
        12.5e9,
        2e-5,
        "PCIe Gen5 x16 (PCI-SIG: 64 GB/s per direction); 100 Gb/s Ethernet",
    ),
}


def all_reduce_s(num_members: int, num_bytes: float, bandwidth: float, latency_s: float) -> float:
    """A ring: 2 (N - 1) (L + P / (N B)); 0 for one member.

    >>> all_reduce_s(1, 1e9, 1e9, 1e-6)
    0.0
    """
    return 2.0 * (num_members - 1) * (latency_s + num_bytes / (num_members * bandwidth))


@dataclass(frozen=True)
class NodesRow:
    """A step on a number of nodes; fractions of the GPU time that is training, 0 to 1."""

    num_nodes: int
    step_s: float
    # of an all-reduce inside a node and between nodes
    inside_s: float
    between_s: float
    synchronous: float
    averaging: float
    # nodes sum their gradients internally, and average among each other
    groups: float

    @property
    def data_factor(self) -> float:
        """Data factor up to which the better averaging method is faster than synchronous
        training.
        """
        return max(self.averaging, self.groups) / self.synchronous


def rows(
    num_parameters: float,
    minibatch_size: int,
    steps_between: float,
    num_nodes: Sequence[int],
    link: Interconnect,
    node: GpuNode | None = None,
) -> list[NodesRow]:
    """Return one row per number of nodes.

    Args:
        num_parameters: of the model, exchanged in float32.
        minibatch_size: rows (frames, tokens) of a step of one GPU.
        steps_between: H, steps between two averagings.
        num_nodes: numbers of nodes.
        link: one of `INTERCONNECTS`.
        node: Default: 8 x H200.

    >>> [row] = rows(1e9, 4096, 500, [16], INTERCONNECTS["ethernet-10"])
    >>> row.averaging > 10 * row.synchronous
    True
    """
    node = node or GpuNode()
    step_s, num_bytes = node.step_s(num_parameters, minibatch_size), 4.0 * num_parameters
    hidden_s = node.hidden * step_s
    inside_s = all_reduce_s(node.num_gpus, num_bytes, link.inside, link.inside_latency_s)
    found = []
    for count in num_nodes:
        between_s = all_reduce_s(count, num_bytes, link.between, link.between_latency_s)
        in_group_s = step_s + max(0.0, inside_s - hidden_s) + between_s / steps_between
        found.append(
            NodesRow(
                count,
                step_s,
                inside_s,
                between_s,
                synchronous=step_s / (step_s + max(0.0, inside_s + between_s - hidden_s)),
                averaging=step_s / (step_s + (inside_s + between_s) / steps_between),
                groups=step_s / in_group_s,
            )
        )
    return found
