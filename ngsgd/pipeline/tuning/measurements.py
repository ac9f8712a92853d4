"""Cost of a tuning proxy, and accuracy of its hypergradient compared with finite differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.pipeline.tuning.proxy import Proxy

if TYPE_CHECKING:
    from ngsgd.hypergrad import HypergradientReport

# A unit or a clipping that switches between the two points affects wide differences, and rounding
# affects narrow ones; the nearest result counts. Logarithms of hyperparameters, in float64.
_DIFFERENCES = (1e-6, 1e-4, 1e-2)


@dataclass(frozen=True)
class ProxyCost:
    """Time and memory of one hypergradient of a proxy, from one measured job.

    Attributes:
        report: the measured hypergradient.
        is_reversed: whether the job was reversed exactly; otherwise checkpoints were used.
        reversal_bits: bits stored per parameter and step for the reverse pass.
        ratio: time of a hypergradient over that of a training run.
        run_s: seconds of a training run of the complete proxy.
        num_parameters: size of the model.
        store_bytes: memory with every step stored.
        reversible_bytes: memory with exactly reversible steps.
        engine: the engine that `auto` chooses.
        reason: reason for the choice.
        num_threads: threads of torch.
    """

    report: HypergradientReport
    is_reversed: bool
    reversal_bits: float
    ratio: float
    run_s: float
    num_parameters: int
    store_bytes: float
    reversible_bytes: float
    engine: str
    reason: str
    num_threads: int


def measure_cost(proxy: Proxy, config: RunConfig, num_steps: int) -> ProxyCost:
    """Measure one job of `num_steps` minibatches, and extrapolate to the proxy of `config`."""
    import torch

    from ngsgd.hypergrad import choose_engine
    from ngsgd.hypergrad.gradient import hypergradient
    from ngsgd.hypergrad.training_task import Flat

    tune, gradients = config.tune, proxy.gradients()
    space = replace(proxy.space, num_steps=num_steps, num_jobs=1, num_outer_iters=1)
    plan = space.build(space.center())
    is_reversed = gradients is None and bool((plan.momentum_TG > 0).all())
    engine = "reversible" if is_reversed else "checkpoint"
    report = hypergradient(proxy.task, plan, engine, gradients=gradients).report

    whole_space = replace(proxy.space, num_steps=tune.proxy.steps)
    whole = whole_space.build(whole_space.center())
    all_steps = whole_space.num_steps * whole_space.num_jobs
    size = Flat.of(proxy.task).size
    element = next(iter(proxy.task.start.values())).element_size()
    choice = choose_engine(whole, size, element, can_reverse=gradients is None)
    # bits that a division by the momentum loses
    bits = -float(whole.momentum_TG.clamp(min=2.0 ** -64).log2().mean())
    per_parameter = 16 * proxy.space.num_outer_iters + bits * whole_space.num_steps / 8
    return ProxyCost(
        report, is_reversed, reversal_bits=8 * report.spill_bytes / size / num_steps,
        ratio=1.0 + report.seconds_reverse / report.seconds_forward,
        run_s=report.seconds_forward * all_steps / num_steps, num_parameters=size,
        store_bytes=2.0 * element * size * all_steps,
        reversible_bytes=size * proxy.space.num_jobs * per_parameter,
        engine=choice.engine, reason=choice.why, num_threads=torch.get_num_threads())


@dataclass(frozen=True)
class Slope:
    """Slope of the loss along one part of the space, such as the learning rates."""

    part: str
    hypergradient: float
    finite_differences: float

    @property
    def relative_difference(self) -> float:
        measured = self.finite_differences
        return abs(self.hypergradient - measured) / max(abs(measured), 1e-12)


def check_gradient(proxy: Proxy) -> tuple[HypergradientReport, list[Slope]]:
    """Compare the hypergradient in float64 with finite differences of the loss, part by part."""
    import torch

    from ngsgd.hypergrad import final_value
    from ngsgd.hypergrad.gradient import hypergradient

    proxy.task.double()
    space = proxy.space
    theta_D = space.center().requires_grad_()
    plan, gradients = space.build(theta_D), proxy.gradients()
    engine = "store" if gradients is None else "checkpoint"
    found = hypergradient(proxy.task, plan, engine, gradients=gradients)
    slope_D = found.by(plan, theta_D)

    def difference(where: slice, step: float) -> float:
        step_D = torch.zeros_like(slope_D)
        step_D[where] = step
        ends = [final_value(proxy.task, space.build((theta_D + sign * step_D).detach()),
                            gradients=gradients) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2.0 * step)

    slopes = []
    for part, where in space.slices.items():
        ours = float(slope_D[where].sum())
        nearest = min((difference(where, step) for step in _DIFFERENCES),
                      key=lambda value: abs(value - ours))
        slopes.append(Slope(part, ours, nearest))
    return found.report, slopes
