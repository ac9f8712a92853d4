"""Generalized model averaging (C.4 of arXiv 1410.7455): a weight per model and layer, by L-BFGS.

Kaldi: nnet2/combine-nnet-fast.cc. A layer is a module with direct trainable parameters. Letters: K
models, L layers, P entries of a parameter vector, N rows (frames), M = K L weights; C Cholesky
factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.data.reader import Minibatch
from ngsgd.pipeline.combination import lbfgs
from ngsgd.pipeline.combination.held_out import HeldOut
from ngsgd.pipeline.combination.records import Candidate, Combined, best, require_some
from ngsgd.tasks.frame_scores import summed_loss
from ngsgd.training.parameter_vector import Vector

Array = npt.NDArray[np.float64]

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
    not change get the plain mean. All K models are in memory at once. One evaluation reads all of
    them twice; the preconditioner once per `scatter_frames` frames.

    Args:
        models: newest first.
        held_out: scores parameters.
        max_evaluations: budget of L-BFGS.
        memory: history size of L-BFGS.
        first_improvement: expected gain of the first step, nats per frame.
        scatter_frames: frames per gradient of the preconditioner.

    Returns:
        The combined model.
    """
    require_some(models)
    models_KP = _stacked(models, held_out.layout.size)
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


def _stacked(models: Sequence[Candidate], size: int) -> npt.NDArray[np.float32]:
    models_KP = np.empty((len(models), size), np.float32)
    for row_P, model in zip(models_KP, models, strict=True):
        row_P[:] = model.parameters(size)
    return models_KP


def _optimum(weighted: WeightedLayers, start_KL: Array, scatter_frames: int, max_evaluations: int, memory: int,
             first_improvement: float) -> Array:
    """Optimize the weights in the space where the scatter of their gradients is the identity."""
    C_MM = preconditioner(weighted.scatter(start_KL, scatter_frames))

    def weights(x_M: Array) -> Array:
        return np.asarray(np.linalg.solve(C_MM.T, x_M)).reshape(start_KL.shape)  # w = C^-T x

    def function(x_M: Array) -> tuple[float, Array]:
        objf, gradient_KL = weighted.objf_and_gradient(weights(x_M))
        return objf, np.asarray(np.linalg.solve(C_MM, gradient_KL.reshape(-1)))  # C^-1 g

    found = lbfgs.maximise(function, C_MM.T @ start_KL.reshape(-1), max_evaluations=max_evaluations, memory=memory,
                           first_improvement=first_improvement)
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
    """Module name -> names of its direct trainable parameters.

    Shared parameters belong to the first module.
    """
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
                g_P = gradient.double().cpu().numpy().reshape(-1)
                dots_KL[:, index] += _times(self.models_KP[:, self.held_out.layout.part(name)], g_P)
        return dots_KL


def _weighted_sum(weights_K: Array, models_KP: npt.NDArray[np.float32]) -> Array:
    sum_P = np.empty(models_KP.shape[1])
    for part in _chunks(len(sum_P)):
        sum_P[part] = weights_K @ models_KP[:, part].astype(np.float64)
    return sum_P


def _times(models_KP: npt.NDArray[np.float32], vector_P: Array) -> Array:
    product_K = np.zeros(len(models_KP))
    for part in _chunks(len(vector_P)):
        product_K += models_KP[:, part].astype(np.float64) @ vector_P[part]
    return product_K


def _chunks(size: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK_ELEMENTS) for first in range(0, size, CHUNK_ELEMENTS))
