"""Interface of all preconditioners, which replace the gradient g by P g before an optimizer step.

`measure` maps rows or gradients of a layer to statistics that can be averaged, `invert` maps them
to the inverse, `direction` applies it, and `layout` describes the stored tensors. A method without
them, such as Adam, overrides `update_curvature` and `apply`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import upcast
from ngsgd.errors import ConfigError
from ngsgd.ops import gemm
from ngsgd.ops.tensors import dense, refuse_sharded, without_autocast
from ngsgd.preconditioners.blocks import affine_biases
from ngsgd.preconditioners.estimates import Estimates
from ngsgd.preconditioners.factored_grad import FactoredGrad, RowGradients, is_cheaper_by_rows, multiplied_right
from ngsgd.preconditioners.replicas import Replicas
from ngsgd.preconditioners.states import State

# below every meaningful norm
_TINY = 1e-30


class Preconditioner(Estimates):
    """Base class of the preconditioners; each method documents its formula.

    Methods that need rows cannot treat normalizations, embeddings and grouped convolutions. These
    layers get the diagonal of their Fisher matrix: g / (F + damping). Parameters of skipped layers
    keep their gradient.

    Args:
        model: the module whose parameters' `.grad` are preconditioned.
        damping: added to the curvature of the mean loss per row; typically 1e-4 to 1. Default 1e-2.
        curvature_interval: steps between curvature updates: a number, ((from step, number), ..) or
            a function of the step. Default 1.
        inverse_interval: steps between inverses (roots, bases), as above. Default 1.
        ema_decay: decay of the moving average of the curvature, in [0, 1); 0 uses the last
            minibatch only. Default 0.95.
        kl_clip: limit on lr^2 <P g, g>, for which `step` needs lr; 0 = none (default).
        graft: "gradient" gives each layer's direction the norm of its gradient; default "none".
        skip: modules (by name, pattern or class) and parameters (by name or pattern) that keep
            their gradient.
        layer_options: damping and ema_decay of single layers by name or pattern, such as
            {"output*": {"damping": 0.1}}; later entries win.
        averaging: curvature after parameter averaging: "reset" (default), "keep" or "average".
        seed: seed of random samples. Default 0.

    Raises:
        ConfigError: an option is out of range, or parameters are sharded.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # Whether a method may overwrite its arguments (a gradient, statistics).
        self.overwrites = False
        # of the passes of this step, with its factored gradients by weight
        self._holding: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._held: dict[str, FactoredGrad] = {}
        self.replicas = Replicas(self.model, type(self).__name__, self.traits)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the minibatch, whose graph cannot be copied."""
        return {**vars(self), "_holding": contextlib.nullcontext(), "_held": {}}

    def measure(self, name: str, seen: Any) -> State:
        """Compute statistics of one layer in one minibatch, from its rows or its gradient."""
        raise NotImplementedError

    def invert(self, name: str, known: State) -> State:
        """Compute the inverse that `direction` applies."""
        raise NotImplementedError

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        """Return P g of one layer."""
        raise NotImplementedError

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        """Return (L: O x O, R: I x I) if P g is L G R with symmetric factors; None otherwise."""
        return None

    def can_hold(self, name: str, inverse: State) -> bool:
        """Return whether `direction_of_rows` supports the layer."""
        return self.factors(inverse) is not None

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        """Return P g of a factored gradient, (of the weight, of the bias)."""
        factors = self.factors(inverse)
        assert factors is not None
        return rows.preconditioned(*factors)

    def evaluate(self, closure: Callable[[], Tensor], *, num_rows: int | None = None) -> Tensor:
        """Run the forward and backward pass, add gradients to `.grad`, and return the loss.

        Methods that evaluate a minibatch again after the optimizer step call the closure once more.
        It must then return the same loss for the same parameters. Use autocast inside it.

        Args:
            closure: runs the model and returns the loss.
            num_rows: number of rows (frames, samples) of a mean, for unrecognized losses; see
                `watch`.

        Raises:
            ConfigError: the closure returned no loss, or has called backward itself.
        """
        with self.watch(num_rows), torch.enable_grad():
            with self._holding:
                loss = closure()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                kind = type(loss).__name__ if not isinstance(loss, Tensor) else "a tensor without gradient" \
                    if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"
                raise ConfigError(f"the closure of evaluate() returned {kind}; return the loss that the "
                                  "model computed, one number, without calling backward() or detach().")
            try:
                self.backward(loss)
            except RuntimeError as error:
                # Torch has no separate class for this error.
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ConfigError("the graph of the loss was differentiated before: evaluate() calls backward itself, so the "
                                  "closure returns the loss without loss.backward(). Call detach() on a state that is "
                                  "kept from an earlier minibatch.") from error
            return loss.detach()

    def evaluate_and_step(self, closure: Callable[[], Tensor], lr: float | None = None, *, num_rows: int | None = None) -> Tensor:
        """Run `evaluate` and `step` together, with the same result in less time.

        Use it in loops that do not change gradients in between. For layers wider than the
        minibatch, rows are preconditioned first, and the gradient is formed once. This does not
        apply under DistributedDataParallel, which averages gradients.
        """
        # Methods that read gradients need the product, as do ranks that average them; kl_clip needs
        # P g and g.
        if not self.kl_clip and not self.replicas.average_gradients \
                and (self.traits.measures_rows_only or not self.is_due("curvature")):
            # Asked at each call, since the first forward pass may detect replicas.
            self._holding = RowGradients(
                self.model, affine_biases(self.model, self.skipped), joined=self.traits.joins_bias,
                wanted=lambda name, *sizes: not self.replicas.average_gradients and any(is_cheaper_by_rows(*sizes))
                and (self.is_due("curvature") or self.can_hold(name, self.inverses.get(name, {}))))
        try:
            loss = self.evaluate(closure, num_rows=num_rows)
            if isinstance(self._holding, RowGradients):
                self._held = self._holding.collect()
        finally:
            self._holding = contextlib.nullcontext()
        self.step(lr)
        return loss

    @contextlib.contextmanager
    def watch(self, num_rows: int | None = None) -> Iterator[None]:
        """Record the forward and backward passes inside the context if a curvature update is due.

        With `num_rows` and `fisher="empirical"` the loss may be any function of the model output.
        It counts as a mean over this number of rows (frames, samples). Several passes before a step
        count as one mean over the sum of their `num_rows`. Divide a sum by its rows; do not scale
        the loss.
        """
        # Created before the model was sharded.
        if self.last["curvature"] is None:
            refuse_sharded(self.model, type(self).__name__)
        self.follow_known()
        with self.replicas.noticed(), self.watching(num_rows):
            yield

    @contextlib.contextmanager
    def watching(self, num_rows: int | None) -> Iterator[None]:
        """Record what `update_curvature` needs besides gradients."""
        yield

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss; some methods also take second derivatives here."""
        loss.backward()

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Replace `.grad` of every parameter by P g; only kl_clip needs the learning rate."""
        with without_autocast(self.generator.device.type):
            self._step(lr)

    def _step(self, lr: float | None) -> None:
        parameters = dict(self.model.named_parameters())
        lacks_estimates = self.follow(parameters)
        held = self.held_alone(parameters)
        grads = {name: self.blocks.oriented(name, upcast(dense(p.grad))) for name, p in parameters.items()
                 if p.grad is not None and name not in self.skipped}
        if self.last["curvature"] is None:
            refuse_sharded(self.model, type(self).__name__)
            self.replicas.warn_of_ranks()
        directions = self.apply_all(grads, held) if self.traits.applies_first else None
        if self.is_due("curvature") and self.observe(grads):
            self.last["curvature"] = self.num_steps
            if self.is_due("inverse"):
                self.refresh()
                self.last["inverse"] = self.num_steps
        for name in [name for name in held if not self.can_hold(name, self.inverses.get(name, {}))]:
            grads |= self.blocks.named(name, held.pop(name).product())
        # The plain gradient is not used again, so it may be overwritten; a new tensor costs another
        # pass over memory.
        self.overwrites = self.graft == "none" and not self.kl_clip
        try:
            directions = self.apply_all(grads, held) if directions is None else directions
        finally:
            self.overwrites = False
        found = self._limited(grads, held, directions, lr)
        for name, p in parameters.items():
            if name in found:
                direction = self.blocks.oriented(name, found[name])
                # In place, because an existing gradient may be a view of a buffer.
                if p.grad is None or p.grad.layout is not torch.strided:
                    p.grad = direction.to(p.dtype).view_as(p)
                elif p.grad is not direction:
                    p.grad.copy_(direction)
        if lacks_estimates and self.last["curvature"] != self.num_steps:
            self.renew()
        self.num_steps += 1

    def held_alone(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, FactoredGrad]:
        """Return factored gradients that are complete; add the others to `.grad`."""
        held, self._held = self._held, {}
        for name, rows in list(held.items()):
            if any(parameters[each].grad is not None for each in self.blocks.names(name)):
                for each, part in self.blocks.named(name, rows.product()).items():
                    p = parameters[each]
                    p.grad = part.to(p.dtype) if p.grad is None else p.grad.add_(part)
                del held[name]
        return held

    def apply_all(self, grads: Mapping[str, Tensor], held: dict[str, FactoredGrad]) -> dict[str, Tensor]:
        """Apply P to gradients, and to gradients that are held in factored form."""
        found = self.apply(grads)
        for name in list(held):
            # Layer by layer, so that their memory can be reused for P g.
            rows = held.pop(name) if self.overwrites else held[name]
            found |= self.blocks.named(name, self.direction_of_rows(name, self.inverses[name], rows))
        return found

    def observe(self, grads: Mapping[str, Tensor]) -> bool:
        """Update the curvature of this step; False if the minibatch was not recorded."""
        self.update_curvature(grads)
        return True

    def split_work(self, group: Any) -> None:
        """Split the work over the ranks of a `torch.distributed` process group.

        The curvature is averaged over their minibatches, weighted by rows. Each inverse is computed
        by one rank and sent to the others. Use it in loops that average gradients over the ranks
        before `step` and in which all ranks step together. Under DistributedDataParallel it is
        called in the first forward pass.

        Raises:
            ConfigError: the curvature of the method has no mean over ranks, or its work cannot be
                split.
        """
        self.replicas.split(group)

    def update_curvature(self, seen: Any) -> None:
        """Update with the gradients of a minibatch, or what else the method records."""
        # With `split_work` these are already means over all ranks.
        for name, g in self.blocks.joined(seen).items():
            self.average_in(name, self.measure(name, g))

    def average_in(self, name: str, new: State) -> None:
        """Add the statistics of this minibatch to the moving average, if they are finite."""
        if not self.statistics.add(name, new, self.option(name, "ema_decay")):
            self.note_skipped()

    def mean_statistics(self, name: str) -> State:
        """Return the averaged statistics of a layer."""
        return self.statistics.mean(name)

    def refresh(self) -> None:
        """Update the inverses from the averaged curvature; ranks of `split_work` share layers."""
        if self.replicas.comm is not None:
            self.inverses |= self.replicas.comm.inverted(
                self.statistics, lambda name: self.inverted(name, self.mean_statistics(name)))
            return
        for name in self.statistics:
            self.inverses[name] = self.inverted(name, self.mean_statistics(name))

    def inverted(self, name: str, known: State) -> State:
        """Return the result of `invert`, in the layout after a restart."""
        return {key: value.contiguous() for key, value in self.invert(name, known).items()}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P g by parameter name; parameters without curvature are unchanged."""
        found = dict(grads)
        for name in self.blocks.weights_of(grads.keys()):
            if (inverse := self.inverses.get(name)) is not None:
                found |= self.block_direction(name, inverse, grads)
        return found

    def block_direction(self, name: str, inverse: State, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P g of the parameters in the block of a weight."""
        if (factors := self.factors(inverse)) is None:
            return self.blocks.parted(name, self.direction(name, inverse, self.blocks.joined_one(name, grads)), grads)
        left_OO, right_II = factors
        block = self.blocks.names(name)
        bias = left_OO @ grads[block[1]] if len(block) > 1 else None
        parts = multiplied_right(gemm.mm(left_OO, grads[name].reshape(len(left_OO), -1)), bias, right_II)
        return {each: part.view_as(grads[each]) for each, part in zip(block, parts, strict=False) if part is not None}

    def option(self, name: str, key: str) -> float:
        """Return a setting of the layer that owns the parameter."""
        value: float = getattr(self, key)
        layer = name.rpartition(".")[0]
        for pattern, settings in (self.layer_options or {}).items():
            if key in settings and fnmatchcase(layer, pattern):
                value = settings[key]
        return value

    def _limited(self, grads: Mapping[str, Tensor], held: Mapping[str, FactoredGrad], found: dict[str, Tensor],
                 lr: float | None) -> dict[str, Tensor]:
        if self.graft == "gradient":
            # The learning rate then has the meaning that it has for SGD.
            plain, found = found, dict(found)
            for name in self.blocks.weights_of(plain.keys()):
                block = [each for each in self.blocks.names(name) if each in plain]
                own = _norm_of([plain[each] for each in block])
                norm = held[name].norm() if name in held else _norm_of([grads[x] for x in block])
                numbers = torch.finfo(norm.dtype)
                # A zero direction stays zero.
                scale = (norm / own.clamp(min=numbers.tiny)).clamp(max=numbers.max)
                for each in block:
                    found[each] = plain[each] * scale
        if self.kl_clip:
            if lr is None:
                raise ConfigError("kl_clip needs the learning rate: call step(lr=...) with the learning rate of the optimizer.")
            change = lr * lr * sum(float((found[name] * g).sum()) for name, g in grads.items())
            factor = min(1.0, (self.kl_clip / max(abs(change), _TINY)) ** 0.5)
            found = {name: value * factor for name, value in found.items()}
        return found


class DirectMethod(Preconditioner):
    """Base of methods whose `apply` updates the state and applies it directly."""

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the state."""

    def refresh(self) -> None:
        """Do nothing; there are no inverses."""


def _norm_of(parts: Sequence[Tensor]) -> Tensor:
    norms: list[Tensor] = [torch.linalg.vector_norm(part) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
