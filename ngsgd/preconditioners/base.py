"""Interface of all preconditioners, which replace the gradient g by P g before an optimizer step.

    preconditioner = KFAC(model, damping=1e-3)
    loss = preconditioner.evaluate(lambda: loss_fn(model(x), y))    # forward and backward pass
    preconditioner.step()                                           # p.grad <- P p.grad
    optimizer.step()

A method consists of two or three functions for one layer. `measure` maps rows or gradients to
statistics that can be averaged, `invert` maps statistics to the inverse, and `direction` applies
it. A method without layer statistics, such as Adam, overrides `update_curvature` and `apply`
instead. This class implements intervals, moving averages with bias correction, limits, and state.

Letters: O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor, nn

from ngsgd.curvature.layers import has_transposed_weight, upcast, without_autocast
from ngsgd.errors import ConfigError, OptimizerStateError, has_grown, warn
from ngsgd.ops import gemm
from ngsgd.ops.tensors import dense, refuse_sharded
from ngsgd.preconditioners import states, step_limits
from ngsgd.preconditioners.closures import differentiate
from ngsgd.preconditioners.distributed import ProcessGroupComm
from ngsgd.preconditioners.factored_grad import FactoredGrad, RowGradients, is_cheaper_by_rows, multiplied_right
from ngsgd.preconditioners.fisher_recorder import FisherRecorder, FisherSample, Rows
from ngsgd.preconditioners.options import FisherOptions, Options, is_due, make_options, signature_of
from ngsgd.preconditioners.states import OWN, Layout, State, kept, mean_state, own

# Fraction of parameters with plain gradient that triggers a warning.
_MUCH = 0.3
# Attributes of a parameter that estimates depend on.
_DECISIVE = operator.attrgetter("shape", "dtype", "device", "requires_grad")


class Preconditioner:
    """Base class of the preconditioners; each method documents its formula.

    Methods that need rows cannot treat normalizations, embeddings and grouped convolutions. These
    layers get the diagonal of their Fisher matrix: g / (F + damping). Parameters of skipped layers
    keep their gradient.

    Args:
        model: the module whose parameters' `.grad` are preconditioned.
        damping: added to the curvature of the mean loss per row; above 0, typically 1e-4 to 1.
            Default 1e-2.
        curvature_interval: steps between curvature updates: a number, ((from step, number), ..) or
            a function of the step. Default 1.
        inverse_interval: steps between inverses (roots, bases), as above. Default 1.
        ema_decay: decay of the moving average of the curvature, in [0, 1); 0 uses the last
            minibatch only. Default 0.95.
        kl_clip: limit on lr^2 <P g, g>, for which `step` needs lr; 0 = none (default). kfac-pytorch
            uses 1e-3.
        max_grad_norm: limit on the L2 norm of the preconditioned gradient; 0 = none (default).
        graft: "gradient" scales the direction of each layer to the norm of its plain gradient;
            default "none".
        skip: modules (by name, pattern or class) and parameters (by name or pattern) that keep
            their gradient.
        layer_options: damping and ema_decay of single layers by name or pattern, such as
            {"output*": {"damping": 0.1}}; later entries win.
        averaging: curvature after parameter averaging: "reset" (default), "keep" or "average".
        seed: seed of random samples. Default 0.

    Raises:
        ConfigError: an option is unknown or out of range, or parameters are sharded.
    """

    Options: ClassVar[type[Options]] = Options
    # The mean of the statistics of several workers is meaningful.
    has_mean: ClassVar[bool] = True
    # Weight and bias of an affine layer form one block.
    joins_bias: ClassVar[bool] = True
    # Statistics have a mean over ranks, and layers can be inverted separately.
    splits_work: ClassVar[bool] = False
    # Ranks that average their gradients agree without another exchange.
    agrees_over_ranks: ClassVar[bool] = False
    # Inverts layers one by one, from the statistics only.
    passes_on: ClassVar[bool] = False
    # Curvature updates do not need the gradient itself.
    looks_at_held: ClassVar[bool] = False
    # The direction uses the curvature of earlier steps.
    applies_first: ClassVar[bool] = False
    # Steps depend on the learning rate, which `step` must get.
    needs_lr: ClassVar[bool] = False
    # Start of the keys of a state that the method reads itself.
    other_keys: ClassVar[tuple[str, ...]] = ()
    # Estimates of one dtype are also right in another one.
    converts: ClassVar[bool] = True
    # The estimates of all layers belong together.
    is_joint: bool = False
    # Last sentence of the warning about minibatches that are not finite.
    after_skip: ClassVar[str] = "The optimizer still gets their gradient: call its step() only if the loss is finite."

    __signature__: ClassVar[inspect.Signature] = signature_of(Options)

    def __init_subclass__(cls) -> None:
        """Show the options of the method in help() and completion, with their defaults."""
        super().__init_subclass__()
        cls.__signature__ = signature_of(cls.Options)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__} takes the module, not {type(model).__name__}: it "
                            "needs the layers of the parameters")
        self.model = model
        self.options: Any = make_options(type(self).Options, type(self).__name__, options)
        if self.options.averaging == "average":
            self._require_mean()
        self.num_steps = 0
        # minibatches with non-finite values, which were excluded from the curvature
        self.num_skipped = 0
        # step of the last one, and their number in the last warning
        self._skipped_at, self._num_reported = -1, 0
        self._last: dict[str, int | None] = {"curvature": None, "inverse": None}
        # by weight: sums of the moving averages
        self.statistics: dict[str, State] = {}
        # their total weights, for the bias correction
        self.weights: dict[str, float] = {}
        self.inverses: dict[str, State] = {}     # inverses to apply
        # of the passes of this step
        self._watched: FisherRecorder | None = None
        self._signal: FisherSample | None = None
        self._holding: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._ranks: ProcessGroupComm | None = None
        # Whether a method may overwrite its arguments (a gradient, statistics).
        self._overwrites = False
        # learning rate of this step, for methods that need it
        self._lr = 0.0
        # by weight: factored gradients of this step
        self._held: dict[str, FactoredGrad] = {}
        # names of the layers of a matrix for several layers
        self._covered: tuple[str, ...] = ()
        device = require_parameters(model, type(self).__name__).device
        self.generator = torch.Generator(device).manual_seed(self.options.seed)
        # What estimates depend on, of each parameter; `_follow` notices a change.
        self._parameters: dict[str, nn.Parameter] = {}
        self._seen_parameters: list[tuple[Any, ...]] = []
        self._follow(dict(model.named_parameters()))
        # Set if DistributedDataParallel averages the gradients.
        self._is_replicated = False
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self._replicate(module.process_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or pickle, without the current minibatch, whose graph cannot
        be copied.
        """
        return {**vars(self), "_watched": None, "_signal": None, "_holding": contextlib.nullcontext(), "_held": {}}

    # parameters that change

    def _follow_known(self) -> None:
        """Run `_follow` if a known parameter has changed; a search for new ones takes too long."""
        if list(map(_DECISIVE, self._parameters.values())) != self._seen_parameters \
                and self._follow(dict(self.model.named_parameters())):
            self._last = dict.fromkeys(self._last)

    def _follow(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Adapt the estimates if parameters were replaced, converted, moved, frozen or unfrozen.

        Estimates follow the dtype and device of their parameter. Those of another shape start
        again.

        Returns:
            Whether parameters have no estimate now, and need a curvature update.
        """
        seen = list(map(_DECISIVE, parameters.values()))
        if seen == self._seen_parameters and parameters.keys() == self._parameters.keys():
            # Others of the same shapes, perhaps.
            self._parameters = parameters
            return False
        refuse_sharded(self.model, type(self).__name__)
        self._skipped = skipped_parameters(self.model, self.options.skip)
        require_supported(self.model, self._skipped, type(self).__name__)
        before = [(name, *one) for name, one in zip(self._parameters, self._seen_parameters, strict=True)]
        self._parameters, self._seen_parameters = parameters, seen
        self._find_layers()
        if not before:
            return False
        device = next(iter(parameters.values())).device
        if device != self.generator.device:
            self.generator = torch.Generator(device).manual_seed(self.options.seed)
        now = [(name, *one) for name, one in zip(parameters, seen, strict=True)]
        layers_differ = [(name, shape, is_trained) for name, shape, *_, is_trained in before] \
            != [(name, shape, is_trained) for name, shape, *_, is_trained in now]
        dropped = [name for name in {*self.statistics, *self.inverses, *self.weights}
                   if (self.is_joint and layers_differ) or not self._adapted(name, parameters.get(name))]
        for name in dropped:
            self.forget(name)
        trained = {name for name, *_, is_trained in before if is_trained}
        return bool(dropped) or any(name not in trained for name, *_, is_trained in now if is_trained)

    def _find_layers(self) -> None:
        """Read the layers of the model."""
        self._bias_of = _biases(self.model, self._skipped) if type(self).joins_bias else {}
        # weights of shape inputs x outputs
        self._transposed = {f"{name}.weight".lstrip(".") for name, module in self.model.named_modules()
                            if has_transposed_weight(module)}

    def _adapted(self, name: str, p: nn.Parameter | None) -> bool:
        """Convert the estimates of a parameter, and return whether they fit it."""
        entry = self._entry(name)
        if p is None or ((layout := self._layout_of(name, entry)) is not None and self._misfit(name, entry, layout, p)):
            return False
        for key, value in states.converted(entry, layout, p).items():
            group, _, short = key.partition(".")
            (self.statistics if group == "statistics" else self.inverses)[name][short] = value
        return True

    def forget(self, name: str) -> None:
        """Discard the estimates of a parameter."""
        for known in (self.statistics, self.inverses, self.weights):
            known.pop(name, None)
        self._covered = ()

    def _cover(self, names: Sequence[str]) -> None:
        """Start a matrix for several layers again if its layers have changed."""
        if self._covered != tuple(names):
            for name in self._covered:
                self.forget(name)
            self._covered = tuple(names)

    def _require_covered(self, names: Collection[str]) -> None:
        """Raise ConfigError if gradients are not those of the layers of the matrix."""
        if {*names} != {*self._covered}:
            differing = ", ".join(sorted({*names} ^ {*self._covered}))
            raise ConfigError(f"{type(self).__name__} has one matrix for all layers, and the gradients of this step are of "
                              f"other layers ({differing} only in one of them); use curvature_interval=1, or skip the layers "
                              "that some minibatches do not use.")

    # one step

    def evaluate(self, closure: Callable[[], Tensor], *, num_rows: int | None = None) -> Tensor:
        """Run the forward and backward pass of a minibatch; gradients are added to `.grad`.

        Methods that evaluate a minibatch again after the optimizer step keep the closure and call
        it once more. It must then return the same loss for the same parameters. Use autocast inside
        the closure.

        Args:
            closure: runs the model and returns the loss.
            num_rows: number of rows (frames, samples) that the loss is a mean over, for
                unrecognized losses; see `watch`.

        Returns:
            The loss.

        Raises:
            ConfigError: the closure returned no loss, or has called backward itself.
        """
        with self.watch(num_rows), torch.enable_grad():
            with self._holding:
                loss = closure()
            return differentiate(loss, self.backward)

    def evaluate_and_step(self, closure: Callable[[], Tensor], lr: float | None = None, *,
                          num_rows: int | None = None) -> Tensor:
        """Run `evaluate` and `step` together, with the same result in less time.

        Use it in loops that do not change gradients in between. For layers wider than the
        minibatch, rows are preconditioned first, and the gradient is formed once. This does not
        apply under DistributedDataParallel, which averages gradients.
        """
        if self._may_hold():
            self._holding = RowGradients(self.model, _biases(self.model, self._skipped),
                                         joined=type(self).joins_bias, wanted=self._is_held)
        try:
            loss = self.evaluate(closure, num_rows=num_rows)
            if isinstance(self._holding, RowGradients):
                self._held = self._holding.collect()
        finally:
            self._holding = contextlib.nullcontext()
        self.step(lr)
        return loss

    def _may_hold(self) -> bool:
        """Return whether gradients can stay factored.

        Methods that read gradients need the product, as do ranks that average them; kl_clip needs P
        g and g.
        """
        return not self.options.kl_clip and self._ranks is None and not self._is_replicated \
            and (type(self).looks_at_held or not self.is_due("curvature"))

    def _is_held(self, name: str, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        # The first forward pass may have detected replicas.
        if self._is_replicated:
            return False
        return any(is_cheaper_by_rows(num_rows, num_outputs, num_inputs)) \
            and (self.is_due("curvature") or self.can_hold(name, self.inverses.get(name, {})))

    @contextlib.contextmanager
    def watch(self, num_rows: int | None = None) -> Iterator[None]:
        """Record the forward and backward passes inside the context if a curvature update is due.

        With `num_rows` and `fisher="empirical"` the loss may be any function of the model output.
        It counts as a mean over this number of rows (frames, samples). Several passes before a step
        count as one mean over the sum of their `num_rows`. Divide a sum by its rows; do not scale
        the loss.
        """
        # Created before the model was sharded.
        if self._last["curvature"] is None:
            refuse_sharded(self.model, type(self).__name__)
        self._follow_known()
        noticed = None if self._is_replicated else self.model.register_forward_pre_hook(self._notice_replicas)
        try:
            with self._watching(num_rows):
                yield
        finally:
            if noticed is not None:
                noticed.remove()

    def _notice_replicas(self, *_: Any) -> None:
        """Detect in a forward pass whether DistributedDataParallel runs it."""
        around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if around is not None and not self._is_replicated:
            self._replicate(around.process_group)

    def _replicate(self, group: Any) -> None:
        """Split the work over the ranks of a data-parallel loop.

        Otherwise replicas would diverge.
        """
        method = type(self)
        if method.splits_work and self._ranks is None:
            self.split_work(group)
        elif not method.splits_work and not method.agrees_over_ranks:
            raise ConfigError(f"{method.__name__} does not support DistributedDataParallel: each "
                              "rank would use the curvature of its own rows, and the replicas "
                              "would diverge. Choose KFAC, DiagonalNG, UnitWiseNG, LayerWiseNG, "
                              "Shampoo, SOAP or KLSOAP, which average it over the ranks.")
        self._is_replicated = True

    @contextlib.contextmanager
    def _watching(self, num_rows: int | None) -> Iterator[None]:
        if not isinstance(self.options, FisherOptions) or not self.is_due("curvature"):
            yield
            return
        self._watched = self._watched or FisherRecorder(
            self.model, fisher=self.options.fisher, num_draws=self.options.num_draws,
            generator=self.generator, skipped=self._skipped)
        # Several passes before a step belong to one minibatch.
        self._watched.give_rows(num_rows)
        with self._watched:
            yield
        self._signal = self._watched.signal()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss; some methods also take second derivatives here."""
        loss.backward()

    def is_due(self, what: str) -> bool:
        """Return whether this step updates the "curvature" or the "inverse"."""
        return is_due(getattr(self.options, f"{what}_interval"), self.num_steps, self._last[what])

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Replace `.grad` of every parameter by the preconditioned gradient.

        Args:
            lr: learning rate of the optimizer; kl_clip, MuonH and ScaledAdam need it.

        Raises:
            ConfigError: the learning rate is needed, and it is missing, negative or not finite.
        """
        if type(self).needs_lr:
            if lr is None or not 0.0 <= float(lr) < math.inf:
                raise ConfigError(f"{type(self).__name__} needs the learning rate of the optimizer, and it is {lr}: call "
                                  "step(lr=optimizer.param_groups[0][\"lr\"]).")
            self._lr = float(lr)
        with without_autocast(self.generator.device.type):
            self._step(lr)

    def _step(self, lr: float | None) -> None:
        parameters = dict(self.model.named_parameters())
        lacks_estimates = self._follow(parameters)
        held = self._held_alone(parameters)
        grads = {name: self.oriented(name, upcast(dense(p.grad))) for name, p in parameters.items()
                 if p.grad is not None and name not in self._skipped}
        if self._last["curvature"] is None:
            refuse_sharded(self.model, type(self).__name__)
            self._warn_of_ranks()
        directions = self.apply_all(grads, held) if type(self).applies_first else None
        if self.is_due("curvature") and self._look(grads):
            self._last["curvature"] = self.num_steps
            if self.is_due("inverse"):
                self.refresh()
                self._last["inverse"] = self.num_steps
        self._signal = self._watched = None
        for name in [name for name in held if not self.can_hold(name, self.inverses.get(name, {}))]:
            grads |= self.named(name, held.pop(name).product())
        # The plain gradient is not used again, so it may be overwritten; a new tensor costs another
        # pass over memory.
        self._overwrites = self.options.graft == "none" and not self.options.kl_clip
        try:
            directions = self.apply_all(grads, held) if directions is None else directions
        finally:
            self._overwrites = False
        found = self._limited(grads, held, directions, lr)
        for name, p in parameters.items():
            if name in found:
                _give(p, self.oriented(name, found[name]))
        if lacks_estimates and self._last["curvature"] != self.num_steps:
            self._last = dict.fromkeys(self._last)
        self.num_steps += 1

    def _held_alone(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, FactoredGrad]:
        """Return factored gradients that are complete.

        Multiply out the others and add them to `.grad`.
        """
        held, self._held = self._held, {}
        for name, rows in list(held.items()):
            block = self._block(name)
            if any(parameters[each].grad is not None for each in block):
                for each, part in zip(block, rows.product(), strict=False):
                    p = parameters[each]
                    if part is not None:
                        p.grad = part.to(p.dtype) if p.grad is None else p.grad.add_(part)
                del held[name]
        return held

    def _block(self, name: str) -> list[str]:
        """Return the parameters of the block of a weight."""
        bias = self._bias_of.get(name)
        return [name] if bias is None else [name, bias]

    def apply_all(self, grads: Mapping[str, Tensor], held: dict[str, FactoredGrad]) -> dict[str,
                                                                                            Tensor]:
        """Apply P to gradients, and to gradients that are held in factored form."""
        found = self.apply(grads)
        for name in list(held):
            # Layer by layer, so that their memory can be reused for P g.
            rows = held.pop(name) if self._overwrites else held[name]
            found |= self.named(name, self.direction_of_rows(name, self.inverses[name], rows))
        return found

    def named(self, name: str, parts: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
        """Return (weight part, bias part) by parameter name."""
        return {each: part for each, part in zip(self._block(name), parts, strict=False) if part is not None}

    def _look(self, grads: Mapping[str, Tensor]) -> bool:
        if isinstance(self.options, FisherOptions):
            if self._signal is None:
                if self._last["curvature"] is None:
                    raise ConfigError(f"{type(self).__name__} has not processed a minibatch; run "
                                      "its forward and backward pass inside `with "
                                      "preconditioner.watch():`.")
                return False
            if self._watched is not None:
                self._watched.forget()
            seen = {*self._signal.rows, *self._signal.squares}
            self.update_curvature(replace(self._signal, is_last=True))
            if self._last["curvature"] is None and seen:
                self._warn_of_plain(grads, {*seen, *(self._bias_of.get(name) for name in seen)})
        else:
            self.update_curvature(grads)
        return True

    def note_skipped(self) -> None:
        """Count the minibatch of this step, once, as excluded from the curvature; warn of it.

        Warn again when the number has grown tenfold.
        """
        if self._skipped_at == self.num_steps:
            return
        self._skipped_at = self.num_steps
        self.num_skipped += 1
        if has_grown(self.num_skipped, self._num_reported):
            self._num_reported = self.num_skipped
            warn(f"{type(self).__name__}: {self.num_skipped} of {self.num_steps + 1} minibatches were excluded "
                 "from the curvature, since a value was not finite; num_skipped counts them. "
                 f"{self.after_skip}")

    def _warn_of_ranks(self) -> None:
        """Warn at the first step, because averaging of gradients in the loop cannot be detected."""
        method, distributed = type(self), torch.distributed
        if method.agrees_over_ranks or self._ranks is not None or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (size := distributed.get_world_size()) > 1:
            remedy = "call split_work(group)" if method.splits_work else "choose a method that splits its work, such as KFAC"
            warn(f"{method.__name__} uses the curvature of the rows of this process only, "
                 f"and torch.distributed has {size} processes; if the loop averages "
                 f"gradients over them, {remedy}, or the copies of the model diverge.")

    def _warn_of_plain(self, grads: Mapping[str, Tensor], covered: Collection[str | None]) -> None:
        """Warn after the first update if much of the model keeps its plain gradient without being
        skipped.
        """
        sizes = {name: p.numel() for name, p in self.model.named_parameters() if p.requires_grad and name not in self._skipped}
        plain = [name for name in grads if name not in covered]
        share = sum(sizes.get(name, 0) for name in plain) / max(sum(sizes.values()), 1)
        if share > _MUCH:
            names = ", ".join([*plain[:5], "..."] if len(plain) > 5 else plain)
            warn(f"{type(self).__name__} does not precondition {100.0 * share:.0f} % of "
                 "the parameters, because the minibatch had no curvature for them: "
                 f"{names}; add their layers to skip= if this is intended.")

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
        if not type(self).splits_work:
            raise ConfigError(f"{type(self).__name__} cannot split its work over ranks; KFAC, DiagonalNG, UnitWiseNG, "
                              "LayerWiseNG, Shampoo, SOAP and KLSOAP can.")
        self._ranks = ProcessGroupComm(group, self.generator.device)

    # steps

    def update_curvature(self, seen: FisherSample | Mapping[str, Tensor]) -> None:
        """Update with the rows of a minibatch (Fisher methods) or its gradients (other methods)."""
        # With `split_work` these are already means over all ranks.
        if not isinstance(seen, FisherSample):
            for name, g in self._joined(seen).items():
                self._average(name, self.measure_gradient(name, g))
            return
        for name in seen.squares:
            # A separate block also in an affine layer, such as a weight tied to an embedding.
            self._bias_of.pop(name, None)
        squares: dict[str, State] = {name: {"squares": value} for name, value in seen.squares.items()}
        if self._ranks is None:
            for name, rows in seen.layers():
                self._bias_of[name] = rows.bias
                self.update_statistics(name, rows)
            measured = squares
        else:
            own_rows = {}
            for name, rows in seen.rows.items():
                self._bias_of[name] = rows.bias
                own_rows[name] = self.measure(name, rows)
            measured = self._ranks.mean(own_rows | squares, float(seen.num_rows))
        for name, new in measured.items():
            self._average(name, new)

    def update_statistics(self, name: str, rows: Rows) -> None:
        """Update with the rows of one layer."""
        new = self.measure(name, rows)
        if not self._is_passed_on(name):
            self._average(name, new)
        elif all(bool(value.sum().isfinite()) for value in new.values()):
            self._pass_on(name, new)
        else:
            self.note_skipped()

    def _pass_on(self, name: str, new: State) -> None:
        """Invert statistics, in their memory if the method supports it."""
        for kept_so_far in (self.inverses, self.statistics, self.weights):
            # Its memory is reused.
            kept_so_far.pop(name, None)
        self._overwrites = True
        try:
            self.inverses[name] = self._inverted(name, new)
        finally:
            self._overwrites = False

    def _is_passed_on(self, name: str) -> bool:
        """Return whether the statistics of a layer are unused after the inversion, and need not be
        kept.
        """
        return type(self).passes_on and self.option(name, "ema_decay") == 0.0 and self.options.averaging != "average" \
            and self.is_due("inverse")

    def _average(self, name: str, new: State) -> None:
        # One pass; elementwise isfinite() takes four.
        if not all(bool(value.sum().isfinite()) for value in new.values()):
            self.note_skipped()
            return
        decay = self.option(name, "ema_decay")
        if name not in self.statistics or decay == 0.0:
            self.statistics[name], self.weights[name] = {key: kept(value) for key, value in new.items()}, 1.0
            # The first minibatch gets the same weight as any other.
            if decay:
                self.weights[name] = 1.0 - decay
                torch._foreach_mul_(list(self.statistics[name].values()), 1.0 - decay)
            return
        for key, value in new.items():
            self.statistics[name][key].mul_(decay).add_(value, alpha=1.0 - decay)
        self.weights[name] = decay * self.weights[name] + 1.0 - decay

    def curvature(self, name: str) -> State:
        """Return the averaged statistics of a layer."""
        weight = self.weights[name]
        return {key: value if weight == 1.0 else value / weight for key, value in self.statistics[name].items()}

    def refresh(self) -> None:
        """Update the inverses from the averaged curvature.

        After `split_work` the ranks share the layers.
        """
        ranks = self._ranks
        if ranks is None:
            for name in self.statistics:
                self.inverses[name] = self._inverted(name, self.curvature(name))
            return
        # Inverting or decomposing a matrix takes D^3 operations.
        owners = ranks.owners({name: sum(float(value.numel()) * value.shape[-1] for value in known.values() if value.ndim > 1)
                               for name, known in self.statistics.items()})
        self.inverses |= ranks.exchanged({name: self._inverted(name, self.curvature(name)) for name, owner in owners.items()
                                          if owner == ranks.rank},
                                         {(name, key): value.shape for name, known in self.statistics.items()
                                          for key, value in known.items()})

    def _inverted(self, name: str, known: State) -> State:
        inverse = known if "squares" in known else self.invert(name, known)
        # The layout after a restart.
        return {key: value.contiguous() for key, value in inverse.items()}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P g by parameter name; parameters without curvature are unchanged."""
        found = dict(grads)
        biases = {bias for weight, bias in self._bias_of.items() if weight in grads}
        for name in grads:
            inverse = self.inverses.get(name)
            if inverse is None or name in biases:
                continue
            if "squares" in inverse:
                damped = inverse["squares"].view_as(grads[name]) + self.option(name, "damping")
                found[name] = grads[name] / damped
            else:
                found |= self.block_direction(name, inverse, grads)
        return found

    def block_direction(self, name: str, inverse: State, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P g of the parameters in the block of a weight."""
        factors = self.factors(inverse)
        if factors is None:
            return self._parted(name, self.direction(name, inverse, self._joined_one(name, grads)), grads)
        left_OO, right_II = factors
        block = self._block(name)
        bias = left_OO @ grads[block[1]] if len(block) > 1 else None
        parts = multiplied_right(gemm.mm(left_OO, grads[name].flatten(1)), bias, right_II)
        return {each: part.view_as(grads[each]) for each, part in zip(block, parts, strict=False) if part is not None}

    # methods override these

    def measure(self, name: str, rows: Rows) -> State:
        """Compute statistics of one layer in one minibatch from its rows."""
        raise NotImplementedError

    def measure_gradient(self, name: str, g: Tensor) -> State:
        """Compute statistics of one parameter from its gradient."""
        raise NotImplementedError

    def invert(self, name: str, known: State) -> State:
        """Compute the inverse that `direction` applies."""
        raise NotImplementedError

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        """Return P g of one layer."""
        raise NotImplementedError

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        """Return (L: O x O, R: I x I) if P g is L G R with symmetric factors.

        None otherwise or if unknown.
        """
        return None

    def can_hold(self, name: str, inverse: State) -> bool:
        """Return whether `direction_of_rows` supports the layer."""
        return self.factors(inverse) is not None

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        """Return P g of a factored gradient, (of the weight, of the bias)."""
        factors = self.factors(inverse)
        assert factors is not None
        return rows.preconditioned(*factors)

    # parameters and layers

    def oriented(self, name: str, x: Tensor) -> Tensor:
        """Convert between parameter and outputs-first layout; transposes Conv1D of Hugging Face."""
        return x.T.contiguous() if name in self._transposed else x

    def option(self, name: str, key: str) -> float:
        """Return a setting of the layer that owns the parameter."""
        value: float = getattr(self.options, key)
        layer = name.rpartition(".")[0]
        for pattern, settings in (self.options.layer_options or {}).items():
            if key in settings and fnmatchcase(layer, pattern):
                value = settings[key]
        return value

    def _joined(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by weight.

        O x I with the bias as last column for joint blocks, others unchanged.
        """
        biases = {bias for weight, bias in self._bias_of.items() if weight in grads}
        return {name: self._joined_one(name, grads) for name in grads if name in self._bias_of or name not in biases}

    def _joined_one(self, name: str, grads: Mapping[str, Tensor]) -> Tensor:
        if name not in self._bias_of:
            return grads[name]
        bias, g_OI = self._bias_of[name], grads[name].flatten(1)
        return g_OI if bias is None or bias not in grads else torch.cat([g_OI, grads[bias][:, None]], dim=1)

    def _parted(self, name: str, direction: Tensor, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        bias = self._bias_of.get(name)
        if bias is None or bias not in grads:
            return {name: direction.view_as(grads[name])}
        return {name: direction[:, :-1].reshape(grads[name].shape), bias: direction[:, -1].clone()}

    # limits

    def _limited(self, grads: Mapping[str, Tensor], held: Mapping[str, FactoredGrad],
                 found: dict[str, Tensor],
                 lr: float | None) -> dict[str, Tensor]:
        if self.options.graft == "gradient":
            biases = {bias for weight, bias in self._bias_of.items() if weight in found}
            blocks = {name: [each for each in self._block(name) if each in found] for name in found if name not in biases}
            norms = {name: held[name].norm() if name in held else step_limits.norm_of([grads[each] for each in block])
                     for name, block in blocks.items()}
            found = step_limits.grafted(found, blocks, norms)
        if self.options.kl_clip:
            found = step_limits.kl_clipped(found, grads, self.options.kl_clip, lr)
        if self.options.max_grad_norm and found:
            found = step_limits.norm_limited(found, self.options.max_grad_norm)
        return found

    # state

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout | None:
        """Return the shapes of the tensors of a parameter; None: they are not checked.

        Args:
            name: name of the parameter.
            entry: its tensors, for methods with several forms.
        """
        return None

    def _layout_of(self, name: str, entry: Mapping[str, Tensor]) -> Layout | None:
        if isinstance(self.options, FisherOptions) and any(key.endswith(".squares") for key in entry):
            return dict.fromkeys(("statistics.squares?", "inverse.squares?"), (self._shape(name).numel(),))
        return self.layout(name, entry)

    def _misfit(self, name: str, entry: Mapping[str, Tensor], layout: Layout, p: Tensor) -> str:
        """Return why the tensors of a parameter cannot be used; "" if they can."""
        if problem := states.misfit(entry, layout):
            return problem
        other = {value.dtype for value in entry.values()} - {states.working_dtype(p)}
        return f"is {', '.join(map(str, other))}, and the model {p.dtype}" if other and not type(self).converts else ""

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter with outputs first."""
        shape = self.model.get_parameter(name).shape
        return shape[::-1] if name in self._transposed else shape

    def _sides(self, name: str) -> tuple[int, int, int]:
        """Return (outputs, inputs with the 1 of the bias, inputs) of the block of a weight."""
        shape = self._shape(name)
        num_inputs = math.prod(shape[1:])
        return (shape[0] if shape else 1), num_inputs + (self._bias_of.get(name) is not None), num_inputs

    def _entry(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a parameter as in `state_dict`; they are not copied."""
        return {f"{group}.{key}": value for group, known in zip(states.GROUPS, (self.statistics, self.inverses), strict=True)
                for key, value in known.get(name, {}).items()}

    def counters(self) -> dict[str, Any]:
        """Return the part of the state that belongs to no layer."""
        last = {f"last_{key}": -1 if value is None else value for key, value in self._last.items()}
        covered = {"covered": states.packed_text("\n".join(self._covered))} if self.is_joint else {}
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, **last, "generator": self.generator.get_state(),
                "method": states.packed_text(type(self).__name__),
                "parameters": states.packed_text(states.shapes_text(self.model.named_parameters())), **covered}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the complete state by parameter.

        Statistics, weight, inverses; "" holds the counters, the method and the shapes of the model.
        """
        state: dict[str, dict[str, Any]] = {}
        for name in sorted({*self.statistics, *self.inverses}):
            state[name] = {key: value.clone() for key, value in self._entry(name).items()}
            if name in self.weights:
                state[name]["weight"] = self.weights[name]
        state[OWN] = {**self.counters(), "entries": states.packed_text(states.entries_text(state))}
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state; training continues bitwise identically.

        A state of another dtype is converted. Nothing is changed if the state does not fit.

        Raises:
            OptimizerStateError: the state is of another method or model, or incomplete.
        """
        self._follow(dict(self.model.named_parameters()))
        layers, weights = self._checked(state)
        self.statistics, self.inverses, self.weights = {}, {}, weights
        self._find_layers()
        for name, entry in layers.items():
            if "statistics.squares" in entry:
                self._bias_of.pop(name, None)
            for key, value in entry.items():
                group, _, short = key.partition(".")
                (self.statistics if group == "statistics" else self.inverses).setdefault(name, {})[short] = own(value)
        counters, self._skipped_at = state[OWN], -1
        self.num_steps, self.num_skipped = int(counters["num_steps"]), int(counters["num_skipped"])
        self._last = {key: None if int(counters[f"last_{key}"]) < 0 else int(counters[f"last_{key}"]) for key in self._last}
        self._covered = tuple(filter(None, states.unpacked_text(counters["covered"]).split("\n"))) if self.is_joint else ()
        self.generator.set_state(torch.as_tensor(counters["generator"]).to(torch.uint8).clone())

    def _checked(self, state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
        """Return (tensors by parameter, weights) of a state.

        Raises:
            OptimizerStateError: the state does not fit.
        """
        method, parameters = type(self).__name__, dict(self.model.named_parameters())
        states.require_counters(state, self.counters(), method, parameters)
        layers, weights = {}, {}
        covered = list(filter(None, states.unpacked_text(state[OWN]["covered"]).split("\n"))) if self.is_joint else []
        # Size of the matrix of several layers.
        total = sum(parameters[name].numel() for name in covered)
        for name, entry in state.items():
            if name == OWN:
                continue
            where = f"the state of {name}"
            tensors = {key: states.finite_tensor(value, f"{key} of {where}") for key, value in entry.items()
                       if not key.startswith(self.other_keys)}
            weight = tensors.pop("weight", None)
            if weight is not None and (weight.numel() != 1 or float(weight) < 0.0):
                raise OptimizerStateError(f"{where} has the weight {weight}; it must be a number of at least 0.")
            layout = self._layout_of(name, tensors)
            if layout is not None and covered:
                layout = {key: [total if size == "d" else size for size in shape] for key, shape in layout.items()}
            if unknown := [key for key in tensors if not key.startswith(("statistics.", "inverse."))]:
                raise OptimizerStateError(f"{where} has {unknown[0]}, which {method} does not store.")
            if layout is not None and (problem := self._misfit(name, tensors, layout, parameters[name])):
                raise OptimizerStateError(f"{where} {problem}; load the state of {method} with the same options and model.")
            layers[name] = states.converted(tensors, layout, parameters[name])
            if weight is not None:
                weights[name] = float(weight)
        return layers, weights

    def average(self, each: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Load the mean of the curvature of several workers.

        The next step updates curvature and inverses.
        """
        self._require_mean()
        if not each:
            raise ConfigError("average() was given no state; give the state_dict() of each worker.")
        for state in each:
            self._checked(state)
        self.load_state_dict(mean_state(each))

    def _require_mean(self) -> None:
        if not self.has_mean:
            raise ConfigError(f"{type(self).__name__}: rows or gradients of different workers have "
                              "no mean; choose averaging=\"reset\" or \"keep\".")


def skipped_parameters(model: nn.Module, skip: Sequence[str]) -> set[str]:
    """Return the names of the parameters that `skip` excludes.

    An entry is the name of a module, a pattern of such names, or a class name; it selects all
    parameters inside the module. It may also be the name of a parameter or a pattern of such names.

    Raises:
        ConfigError: an entry matches nothing.
    """
    modules = [(name, getattr(module, "plain_class", type(module)).__name__,
                {id(p) for p in module.parameters()})
               for name, module in model.named_modules(remove_duplicate=False)]
    # A tied parameter has several names.
    parameters = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    skipped: set[int] = set()
    problems = []
    for entry in skip:
        found = [inside for name, kind, inside in modules
                 if fnmatchcase(name, entry) or kind == entry]
        found += [{key} for name, key in parameters if fnmatchcase(name, entry)]
        if not found:
            known = {name for name, _ in parameters}
            known.update(*({name, kind} for name, kind, _ in modules))
            near = get_close_matches(entry, sorted(known), n=3, cutoff=0.5)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see named_parameters()."
            problems.append(f"skip has {entry!r}, which is no name of a module, a parameter or a "
                            f"class of the model; {remedy}")
        skipped.update(*found)
    if problems:
        raise ConfigError(problems)
    return {name for name, p in model.named_parameters() if id(p) in skipped}


def require_parameters(model: nn.Module, method: str) -> nn.Parameter:
    """Return the first parameter of a model; raise ConfigError if it has none."""
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigError(f"{type(model).__name__} has no parameters, so {method} has no gradient to "
                          "compute; give the module whose parameters the optimizer trains.")
    return first


def require_supported(model: nn.Module, skipped: Collection[str], method: str) -> None:
    """Raise ConfigError for trained parameters that are complex, or have no elements."""
    problems = []
    for name, p in model.named_parameters():
        if name in skipped or not p.requires_grad:
            continue
        if p.is_complex():
            problems.append(f"{method}: {name} is {p.dtype}, and estimates are real; train its real and imaginary part as two "
                            f"parameters, or exclude it by skip=({name!r},).")
        elif not p.numel():
            problems.append(f"{method}: {name} has the shape {tuple(p.shape)} and no elements; remove the layer, or exclude it by "
                            f"skip=({name.rpartition('.')[0] or name!r},).")
    if problems:
        raise ConfigError(problems)


def _give(p: nn.Parameter, direction: Tensor) -> None:
    """Set the gradient of a parameter in place, because an existing gradient may be a view of a
    buffer.
    """
    if p.grad is None or p.grad.layout is not torch.strided:
        p.grad = direction.to(p.dtype).view_as(p)
    elif p.grad is not direction:
        p.grad.copy_(direction)


def _biases(model: nn.Module, skipped: Collection[str]) -> dict[str, str | None]:
    """Map weight to bias for affine layers and for the GEMMs in recurrent and attention layers."""
    found: dict[str, str | None] = {}
    affine = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase | nn.MultiheadAttention
    for name, module in model.named_modules():
        is_affine = isinstance(module, affine) or has_transposed_weight(module)
        if not is_affine or getattr(module, "groups", 1) > 1:
            continue
        own = {key for key, p in module.named_parameters(recurse=False)
               if p.requires_grad and f"{name}.{key}".lstrip(".") not in skipped}
        for key in own:
            if "weight" in key:
                bias = key.replace("weight", "bias")
                found[f"{name}.{key}".lstrip(".")] = f"{name}.{bias}".lstrip(".") if bias in own else None
    return found
