"""Generalized model averaging (C.4 of arXiv 1410.7455): a weight per model and layer, by L-BFGS.

Kaldi: nnet2/combine-nnet-fast.cc. A layer is a module with direct trainable parameters. Letters: K
models, L layers, P entries of a parameter vector, N rows (frames), M = K L weights; C Cholesky
factor.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.data.reader import Minibatch
from ngsgd.models import PNorm, Renormalize
from ngsgd.pipeline.combination.models import Candidate, Combined, HeldOut, best, require_some
from ngsgd.tasks.frame_scores import summed_loss
from ngsgd.training.parameter_vector import FlatLayout, Vector

Array = npt.NDArray[np.float64]
Function = Callable[[Array], tuple[float, Array]]  # x -> (value, gradient)

# elements; the float64 copies of K models stay in the cache
CHUNK_ELEMENTS = 1 << 16
# rows per backward pass, which keeps the activations of every layer
ROWS_AT_ONCE = 2048
# floor of the diagonal of the scatter, whose trace is its dimension: weights without effect
_FLOOR = 1e-20
# added to the diagonal: the scatter is singular if there are fewer minibatches than weights
_SMOOTHING = 0.01


def generalized(models: Sequence[Candidate], held_out: HeldOut, *, max_evaluations: int = 30, memory: int = 10,
                first_improvement: float = 0.01, scatter_frames: int = 64) -> Combined:
    """Combine `models` with the weights of highest held-out objf, starting from their mean.

    The result is the best of the optimum, the mean of all models and the newest model on the
    held-out frames; `chosen` names it. Weights need not sum to one. Statistics of batch
    normalization are fixed during the search and recomputed after it. Entries that training does
    not change get the plain mean. All K models are in memory at once.

    Args:
        models: newest first.
        held_out: scores parameters.
        max_evaluations: budget of L-BFGS.
        memory: history size of L-BFGS.
        first_improvement: expected gain of the first step, nats per frame.
        scatter_frames: frames per gradient of the preconditioner.
    """
    require_some(models)
    models_KP = np.empty((len(models), held_out.layout.size), np.float32)
    for row_P, model in zip(models_KP, models, strict=True):
        row_P[:] = model.parameters(held_out.layout.size)
    weighted = WeightedLayers(models_KP, held_out)
    mean_KL = np.full(weighted.shape, 1.0 / len(models))
    newest_KL = np.zeros_like(mean_KL)
    newest_KL[0] = 1.0
    newest = weighted.combined("newest", newest_KL, models_KP[0].copy())
    # leaves the statistics in the model
    mean = weighted.combined("mean", mean_KL, weighted.mean())
    optimum_KL = _optimum(weighted, mean_KL, scatter_frames, max_evaluations, memory, first_improvement)
    optimum = weighted.combined("generalized", optimum_KL, weighted.flat(optimum_KL))
    # the simplest of equals
    tried = (newest, mean, optimum)
    return replace(best(tried), mean_objf={len(models): mean.objf, 1: newest.objf})


def _optimum(weighted: WeightedLayers, start_KL: Array, scatter_frames: int, max_evaluations: int, memory: int,
             first_improvement: float) -> Array:
    """Optimize the weights in the space where the scatter of their gradients is the identity."""
    C_MM = preconditioner(weighted.scatter(start_KL, scatter_frames))

    def weights(x_M: Array) -> Array:
        return np.asarray(np.linalg.solve(C_MM.T, x_M)).reshape(start_KL.shape)  # w = C^-T x

    def function(x_M: Array) -> tuple[float, Array]:
        objf, gradient_KL = weighted.objf_and_gradient(weights(x_M))
        return objf, np.asarray(np.linalg.solve(C_MM, gradient_KL.reshape(-1)))  # C^-1 g

    found = maximize(function, C_MM.T @ start_KL.reshape(-1), max_evaluations=max_evaluations,
                     memory=memory, first_improvement=first_improvement)
    return weights(found.x_D)


def preconditioner(scatter_MM: Array) -> Array:
    """Lower triangular C with C C^T = scatter of weight gradients, normalized to trace M.

    The scatter is floored, and its diagonal is smoothed.
    """
    trace = float(np.trace(scatter_MM))
    F_MM = scatter_MM * (len(scatter_MM) / trace) if trace > 0.0 else scatter_MM.copy()
    F_MM[np.diag_indices_from(F_MM)] = np.maximum(F_MM.diagonal(), _FLOOR) * (1.0 + _SMOOTHING)
    return np.asarray(np.linalg.cholesky(F_MM))


def updatable_layers(model: nn.Module) -> dict[str, list[str]]:
    """Module name -> its direct trainable parameters; shared ones are in the first module."""
    layers: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


class WeightedLayers:
    """The combined model as a function of its weights (K x L), on held-out frames."""

    def __init__(self, models_KP: npt.NDArray[np.float32], held_out: HeldOut) -> None:
        self.models_KP, self.held_out = models_KP, held_out
        self.layers = updatable_layers(held_out.model)
        self.shape = (len(models_KP), len(self.layers))
        parameters = dict(held_out.model.named_parameters())
        self._parameters = [[parameters[name] for name in names] for names in self.layers.values()]

    def objf_and_gradient(self, weights_KL: Array) -> tuple[float, Array]:
        """Objf per frame and its gradient with respect to the weights; both sums are in float64."""
        self._apply(weights_KL)
        gradients = [[torch.zeros_like(p) for p in layer] for layer in self._parameters]
        objf = 0.0
        for part_of_frames in self.held_out.parts(ROWS_AT_ONCE):
            part_objf, part_gradients = self._backward(part_of_frames)
            objf += part_objf
            for total, part in zip(gradients, part_gradients, strict=True):
                torch._foreach_add_(total, part)
        return objf / self.held_out.total_weight, self._dots(gradients) / self.held_out.total_weight

    def scatter(self, weights_KL: Array, num_frames: int) -> Array:
        """Sum of g g^T (M x M), with the weight gradient g of each `num_frames` frames."""
        self._apply(weights_KL)
        scatter_MM = np.zeros((weights_KL.size, weights_KL.size))
        for part_of_frames in self.held_out.parts(num_frames):
            _, gradients = self._backward(part_of_frames)
            g_M = self._dots(gradients).reshape(-1)
            # the search does not need it, and one overflow would prevent the factorization
            if np.isfinite(g_M).all():
                scatter_MM += np.outer(g_M, g_M)
        return scatter_MM

    def mean(self) -> Vector:
        """The mean of all models, all entries."""
        ones_K = np.ones(len(self.models_KP))
        return (_weighted_sum(ones_K, self.models_KP) / len(ones_K)).astype(np.float32)

    def flat(self, weights_KL: Array) -> Vector:
        """The combined model."""
        self._apply(weights_KL)
        return self.held_out.layout.flatten(self.held_out.model.state_dict())

    def combined(self, chosen: str, weights_KL: Array, parameters: Vector) -> Combined:
        """Score the parameters."""
        objf, parameters = self.held_out(parameters)
        weights = {layer: tuple(weights_KL[:, index].tolist()) for index, layer in enumerate(self.layers)}
        return Combined(parameters, chosen, int(np.count_nonzero(weights_KL.any(axis=1))), objf, {}, weights)

    @torch.no_grad()
    def _apply(self, weights_KL: Array) -> None:
        """Set the updatable layers; the rest of the model is unchanged."""
        for weights_K, names, parameters in zip(weights_KL.T, self.layers.values(), self._parameters, strict=True):
            for name, parameter in zip(names, parameters, strict=True):
                sum_P = _weighted_sum(weights_K, self.models_KP[:, self.held_out.layout.part(name)])
                parameter.copy_(torch.from_numpy(sum_P).reshape(parameter.shape))

    def _backward(self, frames: Minibatch) -> tuple[float, list[list[Tensor]]]:
        """Objf summed over the frames, and its parameter gradients, layer by layer."""
        flat = [parameter for layer in self._parameters for parameter in layer]
        with torch.enable_grad():
            # logits in float64: the line search compares nearly equal sums
            objf = -summed_loss(self.held_out.model(frames.x_ND).double(), frames.pdf_N, frames.weight_N)
            gradients = iter(torch.autograd.grad(objf, flat, materialize_grads=True))
        return float(objf.detach()), [[next(gradients) for _ in layer] for layer in self._parameters]

    def _dots(self, gradients: list[list[Tensor]]) -> Array:
        """Inner products of every model with the gradient, per layer (K x L)."""
        dots_KL = np.zeros(self.shape)
        for index, (names, of_layer) in enumerate(zip(self.layers.values(), gradients, strict=True)):
            for name, gradient in zip(names, of_layer, strict=True):
                g_P = gradient.detach().double().cpu().numpy().reshape(-1)
                models_KP = self.models_KP[:, self.held_out.layout.part(name)]
                product_K = np.zeros(len(models_KP))
                for part in _chunks(len(g_P)):
                    product_K += models_KP[:, part].astype(np.float64) @ g_P[part]
                dots_KL[:, index] += product_K
        return dots_KL


def _weighted_sum(weights_K: Array, models_KP: npt.NDArray[np.float32]) -> Array:
    sum_P = np.empty(models_KP.shape[1])
    for part in _chunks(len(sum_P)):
        sum_P[part] = weights_K @ models_KP[:, part].astype(np.float64)
    return sum_P


def _chunks(size: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK_ELEMENTS) for first in range(0, size, CHUNK_ELEMENTS))


# L-BFGS -------------------------------------------------------------------------------------------
# Algorithm 7.4 and equation (7.20) of Nocedal and Wright, Numerical Optimization, 2nd edition, with
# the settings of OptimizeLbfgs in Kaldi (matrix/optimization.h), among them a first step with a
# given expected gain. Steps satisfy the weak Wolfe conditions. They are found by doubling, then
# bisection of the interval between too short and too long. Letters: x a point, g its gradient,
# s a step, y the decrease of the gradient over it; D dimensions.

_C1, _C2 = 1e-4, 0.9
# relative to the value: a smaller gain is lost in rounding
_PRECISION = 1e-10


class Point(NamedTuple):
    """An evaluation of the function."""

    x_D: Array
    value: float  # minus infinity if value or gradient is not finite
    g_D: Array


def maximize(function: Function, start_D: Array, *, max_evaluations: int = 40, memory: int = 10,
             first_improvement: float = 0.01) -> Point:
    """Return the best point of at most `max_evaluations` evaluations, including the start.

    The first step, along the gradient, would gain `first_improvement` if the function were linear.
    """
    budget = _Budget(function, max_evaluations)
    here = budget.evaluate(start_D)
    pairs: deque[tuple[Array, Array]] = deque(maxlen=memory)
    slope = float(here.g_D @ here.g_D)
    scale = first_improvement / slope if slope > 0.0 else 0.0
    while math.isfinite(here.value):
        there = _climb(budget, here, direction(here.g_D, pairs, scale))
        # the budget is used up, or the remaining gain is lost in rounding
        if there is None:
            break
        s_D, y_D = there.x_D - here.x_D, here.g_D - there.g_D
        # s^T y > 0 by the second Wolfe condition
        pairs.append((s_D, y_D))
        scale = float(s_D @ y_D / (y_D @ y_D))  # (7.20)
        here = there
    return budget.best


def direction(g_D: Array, pairs: Sequence[tuple[Array, Array]], scale: float) -> Array:
    """H g, with the inverse H of minus the Hessian estimated from (s, y) `pairs`, oldest first.

    This is algorithm 7.4 with H_0 = `scale` I.
    """
    q_D, alphas = g_D.copy(), []
    for s_D, y_D in reversed(pairs):
        alphas.append(s_D @ q_D / (s_D @ y_D))
        q_D -= alphas[-1] * y_D
    r_D = scale * q_D
    for (s_D, y_D), alpha in zip(pairs, reversed(alphas), strict=True):
        r_D += (alpha - y_D @ r_D / (s_D @ y_D)) * s_D
    return r_D


def _climb(budget: _Budget, here: Point, direction_D: Array) -> Point | None:
    """Find a point along `direction_D` that satisfies both Wolfe conditions."""
    slope = float(here.g_D @ direction_D)
    step, short, long = 1.0, 0.0, math.inf
    while budget.left and step * slope > _PRECISION * abs(here.value):
        there = budget.evaluate(here.x_D + step * direction_D)
        if there.value < here.value + _C1 * step * slope:
            long = step
        elif there.g_D @ direction_D > _C2 * slope:
            short = step
        else:
            return there
        step = 2.0 * step if long == math.inf else 0.5 * (short + long)
    return None


class _Budget:
    def __init__(self, function: Function, max_evaluations: int) -> None:
        self._function, self.left = function, max_evaluations
        self.best: Point

    def evaluate(self, x_D: Array) -> Point:
        self.left -= 1
        value, g_D = self._function(x_D)
        is_finite = math.isfinite(value) and bool(np.isfinite(g_D).all())
        point = Point(x_D, value if is_finite else -math.inf, g_D)
        if not hasattr(self, "best") or point.value > self.best.value:
            self.best = point
        return point


def normalize_stddev(parameters: Vector, model: nn.Module, stddev: float = 1.0) -> Vector:
    """Scale each scale-invariant layer so that its parameters have this standard deviation.

    The function of the network is unchanged. Weights of a generalized combination need not sum to
    one, so such a layer may have any scale, which affects the meaning of a learning rate or
    update-norm clipping in further training. The standard deviation is over weights and bias
    together, about their mean, as in Kaldi. The parameters of `model` itself are ignored.
    """
    layout = FlatLayout.of(model)
    state = layout.unflatten(parameters)
    for layer in scale_invariant_layers(model):
        own = [state[f"{layer}.{name}"] for name, _ in model.get_submodule(layer).named_parameters()]
        found = float(torch.cat([p.double().flatten() for p in own]).std(correction=0))
        if found > 0.0:
            for p in own:
                p.mul_(stddev / found)
    return layout.flatten(state)


def scale_invariant_layers(model: nn.Module) -> list[str]:
    """Names of affine layers before p-norm or ReLU followed by renormalization.

    Their scale, including the bias, does not change any output, except of rows whose root mean
    square is below 2^-33, the floor of renormalization. Only layers of a plain nn.Sequential are
    found; frozen and shared parameters are excluded. Kaldi supports only p-norm.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential) or type(parent).forward is not nn.Sequential.forward:
            continue
        children = list(parent.named_children())
        for (name, affine), (_, nonlinearity), (_, last) in zip(children, children[1:], children[2:], strict=False):
            if not (type(affine) is nn.Linear and isinstance(nonlinearity, (PNorm, nn.ReLU)) and isinstance(last, Renormalize)):
                continue
            if all(p.requires_grad and uses[id(p)] == 1 for p in affine.parameters()):
                found.append(f"{prefix}.{name}".lstrip("."))
    return found
