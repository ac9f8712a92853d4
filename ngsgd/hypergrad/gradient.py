"""Gradient of the validation loss with respect to all hyperparameters, through N averaged jobs.
Letters: P parameters, T steps, O outer iterations, N jobs, G layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ngsgd.hypergrad.hyperparameters import HyperGrad, HypergradientReport, HyperparameterPlan
from ngsgd.hypergrad.job_replay import ENGINES, JobSegment, Numbers, PlainGradients, SegmentGrad
from ngsgd.hypergrad.training_task import Flat, MinibatchIndex, ModuleTask, TrainingTask  # noqa: F401  (ModuleTask: for the doctest)
from ngsgd.ops.averaging import mean_of_chunk, shares_of
from ngsgd.ops.tensors import naming_missing


class LocalJobs:
    """Run jobs one after the other in this process."""

    def __init__(self, task: TrainingTask, plan: HyperparameterPlan, engine: str, kernels: str = "auto") -> None:
        self.task, self.plan, self.engine, self.kernels = task, plan, engine, kernels
        self.flat, self.dtype = Flat.of(task), next(iter(task.start.values())).dtype
        self.gradients = PlainGradients(task, self.flat)
        self.segments: dict[tuple[int, int], JobSegment] = {}

    def forward(self, outer_iter: int, start_P: Tensor) -> list[Tensor]:
        """Return the final weights of each job, in order."""
        return [self.run(outer_iter, job, start_P) for job in range(self.plan.num_jobs)]

    def run(self, outer_iter: int, job: int, start_P: Tensor) -> Tensor:
        """Run the steps of one job."""
        segment = JobSegment(self.gradients, self.flat, Numbers.of(self.plan, outer_iter),
                             MinibatchIndex(outer_iter, job, 0), self.engine, self.kernels)
        end_P = segment.forward(start_P, self.dtype)
        if self.engine != "none":
            self.segments[outer_iter, job] = segment
        return end_P

    def reverse(self, outer_iter: int, dw_NP: Sequence[Tensor]) -> list[tuple[Tensor, SegmentGrad]]:
        """Return the gradient with respect to the starts of jobs, and its other contributions."""
        return [self.segments.pop((outer_iter, job)).reverse(dw_P) for job, dw_P in enumerate(dw_NP)]

    def kept(self) -> tuple[int, int]:
        """Return (bytes of stored bits, bytes of reversal state) of all jobs that ran forward."""
        segments = self.segments.values()
        return sum(one.state.spill_bytes for one in segments), sum(one.state_bytes for one in segments)


@dataclass(frozen=True)
class Choice:
    """A reversal engine, and the reason for its choice."""

    engine: str
    why: str


def choose_engine(plan: HyperparameterPlan, num_parameters: int, element_size: int, *, memory_bytes: float = 1e9) -> Choice:
    """Choose "store" if it fits or a momentum is 0, else "reversible".

    Args:
        plan: the hyperparameters.
        num_parameters: P.
        element_size: bytes per parameter.
        memory_bytes: limit for "store". Default 1e9.

    Example:
        >>> plan = HyperparameterPlan.constant(num_steps=5, num_layers=1, lr=0.1)
        >>> choose_engine(plan, num_parameters=100, element_size=4).engine
        'store'
    """
    needed = 2 * element_size * num_parameters * plan.num_steps * plan.num_jobs
    size = f"weights and velocities of all steps take {needed:,} bytes"
    if needed <= memory_bytes:
        return Choice("store", f"{size}, which fits")
    if bool((plan.momentum_TG > 0.0).all()):
        return Choice("reversible", f"{size}, and momentum is above 0 everywhere")
    return Choice("store", f"a momentum is 0, so steps cannot be reversed; {size}")


def hypergradient(task: TrainingTask, plan: HyperparameterPlan, engine: str = "auto", *,
                  jobs: LocalJobs | None = None, memory_bytes: float = 1e9, kernels: str = "auto") -> HyperGrad:
    """Train with `plan`; return the validation loss and its gradient with respect to the plan.

    All engines return the same numbers. Costs about four ordinary runs. torch's random state is
    restored.

    Args:
        task: model, minibatches and losses; the loss needs second derivatives.
        plan: the hyperparameters.
        engine: "store", "reversible" or "auto" (`choose_engine`). "reversible" needs two integers
            per parameter and log2(1/momentum) bits per parameter and step, and a loss whose
            gradient is bitwise reproducible.
        jobs: runs the jobs; default: in this process.
        memory_bytes: limit of "store" under "auto".
        kernels: "auto", "eager" or "fused"; see `ExactMomentum`.

    Raises:
        ReversalError: the reverse pass does not reproduce the forward pass; names the step.
        DivergenceError: the run diverges.

    Source: arXiv 1502.03492.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(3, 2).double()
        >>> x, y = torch.randn(8, 3).double(), torch.randint(0, 2, (8,))
        >>> def loss(output, batch, data_weights):
        ...     return torch.nn.functional.cross_entropy(output, batch[1])
        >>> task = ModuleTask(module, lambda place: (x, y), loss, [(x, y)])
        >>> found = hypergradient(task, HyperparameterPlan.constant(num_steps=5, num_layers=1, lr=0.1))
        >>> found.lr_TG.shape
        torch.Size([5, 1])
    """
    return evaluate_hyperparameters(task, plan, engine, jobs=jobs, memory_bytes=memory_bytes, kernels=kernels).gradient()


def evaluate_hyperparameters(task: TrainingTask, plan: HyperparameterPlan, engine: str = "auto", *,
                             jobs: LocalJobs | None = None, memory_bytes: float = 1e9,
                             kernels: str = "auto") -> HypergradientRun:
    """Run the forward pass of `hypergradient`; the result offers an optional reverse pass."""
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"Invalid engine: {engine!r}; choose auto, {', '.join(ENGINES)}")
    plan, flat = plan.detached(), Flat.of(task)
    if plan.num_layers != len(flat.groups):
        raise ValueError(f"Invalid plan: it has {plan.num_layers} layers, and the task "
                         f"{len(flat.groups)}: {', '.join(flat.layer_names)}")
    first = next(iter(task.start.values()))
    choice = Choice(engine, "asked for") if engine != "auto" else choose_engine(
        plan, flat.size, first.element_size(), memory_bytes=memory_bytes)
    with torch.random.fork_rng(devices=[]):
        if jobs is None:
            jobs = LocalJobs(task, plan, choice.engine, kernels)
            if choice.engine == "reversible":
                jobs.gradients.probe(flat.flatten(list(task.start.values())), MinibatchIndex(0, 0, 0), plan.data_weights)
        return HypergradientRun(task, plan, flat, jobs, choice)


def final_value(task: TrainingTask, plan: HyperparameterPlan, *, kernels: str = "auto") -> float:
    """Return the validation loss of `plan`, by a forward pass with the same numbers."""
    plan = plan.detached()
    with torch.random.fork_rng(devices=[]):
        jobs = LocalJobs(task, plan, "none", kernels)
        return HypergradientRun(task, plan, jobs.flat, jobs, Choice("none", "")).value


class HypergradientRun:
    """A completed forward run, with its validation loss and, on request, its hypergradient."""

    def __init__(self, task: TrainingTask, plan: HyperparameterPlan, flat: Flat, jobs: LocalJobs, choice: Choice) -> None:
        self.task, self.plan, self.flat, self.jobs, self.choice = task, plan, flat, jobs, choice
        self.unscaled_P = flat.flatten([p.detach().double() for p in task.start.values()])
        self._ends: list[list[Tensor]] = []
        self._means: list[Tensor] = []
        began = time.perf_counter()
        w_P = self.unscaled_P * flat.spread(plan.init_scale_G)
        for outer_iter in range(plan.num_outer_iters):
            ends_NP = jobs.forward(outer_iter, w_P)
            # A single one is bitwise identical even if the product of share and weight would round.
            w_P = ends_NP[0] if len(ends_NP) == 1 else torch.from_numpy(
                mean_of_chunk([end_P.numpy() for end_P in ends_NP], self._shares(outer_iter), np.s_[:]))
            if choice.engine != "none" and plan.num_jobs > 1:
                self._ends.append(ends_NP)
                self._means.append(w_P)
        # the averaged final weights, float64
        self._end_P = w_P
        self._forward_s = time.perf_counter() - began
        with torch.no_grad():
            self.value = float(task.validation(_parameters(task, flat, self._end_P)))

    def gradient(self) -> HyperGrad:
        """Compute the hypergradient by the reverse pass, once: it consumes the stored state."""
        plan = self.plan
        spill_bytes, state_bytes = self.jobs.kept()
        state_bytes += sum(8 * len(end) for ends in self._ends for end in ends)
        began = time.perf_counter()
        parameters = {name: p.requires_grad_() for name, p in _parameters(self.task, self.flat, self._end_P).items()}
        whole = SegmentGrad.zero(plan.num_steps, plan.num_layers, plan.data_weights)
        averaging_ON = torch.zeros_like(plan.averaging_ON)
        with torch.random.fork_rng(devices=[]), naming_missing("a hypergradient"):
            loss = self.task.validation(parameters)
            by = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            given = [torch.zeros_like(p) if one is None else one for one, p in zip(by, parameters.values(), strict=True)]
            dw_P = self.flat.flatten(given).double()
            for outer_iter in reversed(range(plan.num_outer_iters)):
                shares_N = self._shares(outer_iter)
                if plan.num_jobs > 1:
                    # of the weight a_n in the mean sum a_n w_n / sum a: (w_n - mean) / sum a
                    ends_NP, mean_P = self._ends.pop(), self._means.pop()
                    averaging_ON[outer_iter] = torch.stack(
                        [torch.dot(dw_P, end_P - mean_P) for end_P in ends_NP]) / plan.averaging_ON[outer_iter].sum()
                found = self.jobs.reverse(outer_iter, [share * dw_P for share in shares_N])
                dw_P = torch.zeros_like(dw_P)
                first = outer_iter * plan.steps_per_iter
                for dw_of_job_P, part in found:
                    dw_P += dw_of_job_P
                    whole.lr_TG[first:first + len(part.lr_TG)] += part.lr_TG
                    whole.momentum_TG[first:first + len(part.lr_TG)] += part.momentum_TG
                    whole.l2_G += part.l2_G
                    whole.max_change_G += part.max_change_G
                    whole.max_param_change += part.max_param_change
                    if whole.data_weights is not None and part.data_weights is not None:
                        whole.data_weights += part.data_weights
        report = HypergradientReport(self.choice.engine, self.choice.why, adjoint_growth(whole.lr_TG * plan.lr_TG), spill_bytes,
                                     state_bytes, self._forward_s, time.perf_counter() - began)
        start_P = dw_P * self.flat.spread(plan.init_scale_G)
        return HyperGrad(float(loss.detach()), whole.lr_TG, whole.momentum_TG, whole.l2_G,
                         self.flat.products(dw_P, self.unscaled_P), whole.max_change_G,
                         whole.max_param_change, averaging_ON, whole.data_weights,
                         dict(zip(self.flat.names, self.flat.unflatten(start_P), strict=True)), report)

    def _shares(self, outer_iter: int) -> list[float]:
        return shares_of(self.plan.num_jobs, self.plan.averaging_ON[outer_iter].tolist())


def adjoint_growth(by_log_lr_TG: Tensor) -> float:
    """Return the ratio of sensitivities at early and late steps; a large ratio indicates chaos."""
    tenth = max(1, len(by_log_lr_TG) // 10)
    first, last = float(by_log_lr_TG[:tenth].norm()), float(by_log_lr_TG[-tenth:].norm())
    return first / last if last > 0.0 else float("inf") if first > 0.0 else 1.0


def _parameters(task: TrainingTask, flat: Flat, w_P: Tensor) -> dict[str, Tensor]:
    dtype = next(iter(task.start.values())).dtype
    return {name: part.to(dtype, copy=True) for name, part in zip(flat.names, flat.unflatten(w_P), strict=True)}
