"""Recording of input rows and derivative rows of every affine layer, scaled once for all methods.

F = 1/R sum_r g_r g_r^T over R rows of the loss, whatever its reduction, masks or scale:

    "empirical"  of the loss itself, from the ordinary backward pass
    "mc"         of `num_draws` Monte Carlo samples of the targets from the prediction
    "exact"      columns of the root of the loss Hessian: F is the generalized Gauss-Newton matrix
    "averages"   of KFRA: rows whose products add up to the factor of the outputs; they are not
                 those of the samples at their places

Letters: V vectors, N samples, T positions, R rows, I inputs (and 1 for the bias), O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.capture import Capture
from ngsgd.curvature.forms.grad_forms import OuterProduct, joined
from ngsgd.curvature.layers import Affine, Convolution, LayerCall, Record, UseShare
from ngsgd.curvature.losses import LossCalls
from ngsgd.curvature.samples import next_calls, probe
from ngsgd.curvature.second_order import factor_of, output_moment, recursion
from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import eigh
from ngsgd.ops.tensors import without_autocast

FISHERS = ("empirical", "mc", "exact")
# Columns of the loss root that are propagated together.
_CHUNK = 64
# of the matrix of an operation in the recursion of averages
_MAX_FLOATS = 1 << 26


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one affine layer: F = 1/R sum_vn g_vn g_vn^T with g_vn = sum_t e a^T."""

    weight: str
    bias: str | None
    # The last column is 1 if the layer has a bias.
    a_NTI: Tensor
    e_VNTO: Tensor
    num_rows: int       # R

    def shared(self, sharing: str) -> Rows:
        """Return the rows with positions as rows ("expand") or as one row."""
        if sharing == "expand" or self.a_NTI.shape[1] == 1:
            return self
        return replace(self, a_NTI=self.a_NTI.mean(dim=1, keepdim=True), e_VNTO=self.e_VNTO.sum(dim=2, keepdim=True))

    def individual(self) -> Tensor:
        """Return the gradient of every sample and vector, V N x O x I."""
        return torch.einsum("vnto,nti->vnoi", self.e_VNTO, self.a_NTI).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class FisherSample:
    """Curvature of a minibatch, layer by layer."""

    # By name of the weight; each access copies.
    rows: Mapping[str, Rows] = field(default_factory=dict)
    # diagonals of F for parameters outside affine layers
    squares: dict[str, Tensor] = field(default_factory=dict)
    num_rows: int = 0                                          # R
    # empirical: ratio of e to the derivatives of the loss itself
    scale: float = 1.0


class FisherRecorder:
    """Record the signals of the forward and backward passes inside; all count as one minibatch."""

    def __init__(self, model: nn.Module, *, fisher: str, num_draws: int, generator: torch.Generator | None,
                 skipped: Collection[str] = ()) -> None:
        self._fisher, self._num_draws, self._generator = fisher, num_draws, generator
        self._capture = Capture(model, without=skipped, arrived=self._arrived, left_out_by="skip")
        self._mode = LossCalls(self._noted, self._noted_other)
        # differentiated losses with unknown weights of rows
        self._others: list[str] = []
        # differentiated evaluations of a loss, minus one
        self._pass = -1
        # evaluations of a loss
        self._num_noted = 0
        self._total_weight, self._num_rows = 0.0, 0
        # num_rows given by the user: of all passes, and of the current ones
        self._given_rows, self._given_now = 0, 0
        # (backward pass, call of the model) -> group of samples
        self._groups: dict[tuple[int, int], int] = {}
        # per call, output elements that losses of this pass use
        self._seen: dict[LayerCall, Tensor] = {}
        # the backward pass, and whether it has several losses
        self._task, self._several = -1, False
        # Whether layers ran in the last context without a backward pass after them.
        self._is_open = False
        # by (backward pass, call of the model) and evaluation (0: empirical)
        self._records: dict[tuple[tuple[int, int], int], list[Record]] = defaultdict(list)

    def give_rows(self, num_rows: int | None) -> None:
        """Declare the losses of the next passes means over this number of rows; None: detect it."""
        if num_rows is not None and self._fisher != "empirical":
            raise ConfigError("num_rows requires fisher=\"empirical\"; fisher is "
                              f"{self._fisher!r}, which needs the second derivative of the loss: "
                              "call cross-entropy, mean squared error or binary cross-entropy "
                              "with logits of torch.")
        if num_rows is not None and num_rows < 1:
            raise ConfigError(f"num_rows is {num_rows}; give the number of rows that the loss is a mean over, at least 1.")
        self._given_now = num_rows or 0
        self._given_rows += self._given_now

    def __enter__(self) -> FisherRecorder:
        self._before = set(self._records), self._pass, self._total_weight, self._num_rows, self._num_noted, list(self._others)
        self._capture.__enter__()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_open = bool(self._capture.open_calls)
        self._capture.close()
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._mode.forget()
        # A failed pass must not contribute to the minibatch of the next one.
        if error is not None:
            known, self._pass, self._total_weight, self._num_rows, self._num_noted, self._others = self._before
            for key in self._records.keys() - known:
                del self._records[key]
            self._given_rows -= self._given_now

    def forget(self) -> None:
        """Remove hooks and rows now: reference cycles would keep them until garbage collection."""
        self._records.clear()
        self._seen.clear()
        self._capture.forget_listeners()

    @torch.no_grad()
    def signal(self) -> FisherSample:
        """Return the recorded curvature, scaled."""
        if self._is_open and not self._records:
            raise ConfigError("the layers of the model ran inside watch(), and no backward pass followed before it ended. Call "
                              "preconditioner.backward(loss) inside `with preconditioner.watch():`, or run both passes "
                              "with evaluate(closure).")
        if self._pass < 0 and not self._given_rows:
            raise ConfigError("the preconditioner found no supported loss. Inside watch(), call cross-entropy, mean squared "
                              "error or binary cross-entropy with logits from torch, and backward(). Or give the number "
                              "of rows that the loss is a mean over: evaluate(closure, num_rows=) or watch(num_rows=), "
                              "with fisher=\"empirical\".")
        if self._pass >= 0 and self._given_rows:
            raise ConfigError("num_rows was given for some of the passes before this step; give it for all of them or for none.")
        if self._others:
            raise ConfigError(f"the loss has a part from {self._others[0]}, whose curvature and row weights are unknown. Give "
                              "the number of rows that the loss is a mean over (num_rows= of evaluate or watch, with "
                              "fisher=\"empirical\"). For distillation, use cross-entropy with soft targets, which has "
                              "the gradient of kl_div. Or call backward() for the other part outside watch(), or use a "
                              "method that needs gradients only (Shampoo, SOAP, PSGD, Muon).")
        R, W = (self._given_rows, 1.0) if self._given_rows else (self._num_rows, self._total_weight)
        # Every row is masked.
        if not W > 0.0:
            return FisherSample()
        scale = R / W if self._fisher == "empirical" else (R / W) ** 0.5
        parts: dict[str, list[list[Record]]] = defaultdict(list)
        squares: dict[str, Tensor] = {}
        self._seen.clear()
        joined_records: dict[tuple[int, int], list[Record]] = defaultdict(list)
        for (call_of_model, number), records in self._records.items():
            joined_records[self._groups[call_of_model], number].extend(records)
        for records in joined_records.values():
            sizes: dict[int, int] = {}
            for one in records:
                sizes[one.call.forward] = max(sizes.get(one.call.forward, 0), one.num_samples)
            if len(set(sizes.values())) > 1:
                raise ConfigError(f"a loss compares outputs of {len(sizes)} calls of the model, which had "
                                  f"{sorted(set(sizes.values()))} samples; call the model on minibatches of one size, or "
                                  "compute separate losses.")
            affine, others = _of_pass(records, scale, R)
            for name, uses in affine.items():
                parts[name].append(uses)
            for name, found in others.items():
                squares[name] = squares[name] + found if name in squares else found
        return FisherSample(_LayerByLayer(parts, scale, R), squares, R, scale)

    def _noted(self, loss: losses.LossCall, output: Tensor, value: Tensor) -> None:
        if value.requires_grad and not self._capture.is_paused:
            number = None
            if self._fisher != "empirical":
                loss.require_fixed()
                number = self._mode.add(value)
            self._num_noted += 1
            value.register_hook(lambda upstream: self._differentiated(number, loss, output, upstream))

    def _noted_other(self, name: str, output: Tensor, value: Tensor) -> None:
        edge = get_gradient_edge(output)

        def differentiated(upstream: Tensor) -> None:
            calls = self._capture.open_calls
            # Exclude losses of parameters only, such as penalties.
            if not self._capture.is_paused and calls and next_calls(edge, calls):
                self._others.append(name)
        if not self._capture.is_paused and not self._given_now:
            value.register_hook(differentiated)

    def _differentiated(self, number: int | None, loss: losses.LossCall, output: Tensor, upstream: Tensor) -> None:
        if self._capture.is_paused or not self._capture.open_calls:
            return
        # A function of a loss has the gradients of the loss times a factor, and other curvature;
        # another function of the outputs has curvature that is not known.
        if number is not None:
            self._mode.require_term(number, self._capture.open_calls.values())
        with torch.no_grad(), without_autocast(output.device.type):
            self._begin(output, loss.target)
            if self._given_now:
                return
            view = loss.evaluation(output, upstream)
            self._pass += 1
            self._total_weight += float(view.weight_R.sum())
            # A row of an elementwise loss is one vector of elements.
            width = output.shape[-1] if output.ndim > 1 else 1
            counts = view.weight_R if view.classes else view.weight_R.view(-1, width).amax(dim=1)
            self._num_rows += self._count_new(view, int((counts > 0).sum()))
            if self._fisher == "mc":
                self._send(view, [view.sampled(self._num_draws, self._generator)])
            elif self._fisher == "exact":
                N = self._capture.num_samples_seen(view.output)
                self._send(view, list(view.columns(N, _CHUNK)))
            elif self._fisher == "averages":
                self._send_averages(view)

    def _begin(self, output: Tensor, target: Tensor) -> None:
        """Check the layers below a loss, and join the samples of model calls that it compares."""
        outputs = [get_gradient_edge(part) for part in (output, target) if part.requires_grad]
        if not outputs:   # a function of parameters only
            return
        self._capture.check_output(outputs[0], output)
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._several = task, self._num_noted - self._pass > 2
            self._seen.clear()
        calls = self._capture.open_calls
        if len({call.forward for call in calls}) > 1:
            forwards = sorted({call.forward for output in outputs for call in next_calls(output, calls)})
            groups = {self._group(task, forward) for forward in forwards}
            for key, group in self._groups.items():
                if group in groups:
                    self._groups[key] = min(groups)

    def _group(self, task: int, forward: int) -> int:
        """Return the group of the samples of a model call; those of several are concatenated."""
        return self._groups.setdefault((task, forward), len(self._groups))

    def _count_new(self, view: losses.LossEvaluation, num_rows: int) -> int:
        """Count the rows that no other loss of this backward pass used: only weights add up."""
        if not self._several or not num_rows or not view.output.requires_grad:
            return num_rows
        # Random, so that no sum of them is zero.
        rows = view.rows()
        u = probe(rows)
        counts_R = (view.weight_R > 0).to(rows.dtype)
        u_M = view.like_output(u * (counts_R[:, None] if view.classes else counts_R))[0]
        source = get_gradient_edge(view.output)
        if not (before := next_calls(source, self._capture.open_calls)):
            return num_rows
        with self._capture.paused():
            found = torch.autograd.grad([source], list(before.values()), [u_M], retain_graph=True, allow_unused=True)
        num_all, num_new = 0, 0
        for call, e_M in zip(before, found, strict=True):
            if e_M is not None:
                here = e_M != 0
                seen = self._seen.get(call)
                num_all += int(here.sum())
                num_new += int((here if seen is None else here & ~seen).sum())
                self._seen[call] = here if seen is None else here | seen
        return round(num_rows * num_new / num_all) if num_all else num_rows

    def _send(self, view: losses.LossEvaluation, blocks: list[Tensor]) -> None:
        found: dict[LayerCall, list[Tensor]] = defaultdict(list)
        for vectors_V in blocks:
            with torch.enable_grad():
                swept = self._capture.sweep(view.output, vectors_V)
            for call, e_VM in swept:
                found[call].append(e_VM)
        for call, es in found.items():
            self._keep(call, es[0] if len(es) == 1 else torch.cat(es))

    def _keep(self, call: LayerCall, e_VM: Tensor) -> None:
        self._group(self._task, call.forward)
        self._records[(self._task, call.forward), self._pass].append(self._capture.record(call, e_VM))

    def _send_averages(self, view: losses.LossEvaluation) -> None:
        capture, calls = self._capture, dict(self._capture.open_calls)
        N = capture.num_samples_seen(view.output)
        moment_DD = output_moment(view, N)
        # without eigenvalues: the minibatch is counted as skipped
        if not bool(moment_DD.isfinite().all()):
            for call in calls:
                self._keep(call, moment_DD.new_full((1, *call.output_shape), torch.nan))
            return
        with capture.paused():
            found = recursion(moment_DD, get_gradient_edge(view.output), calls, N, _MAX_FLOATS, capture.parameters)
        for call, G_DD in found.items():
            if not isinstance(call.kind, Affine | Convolution) or getattr(call.kind, "groups", 1) > 1:
                raise ConfigError(f"layer {call.layer} has no Kronecker factors for KFRA; add it to skip=, or choose KFAC.")
            values_O, U_OO = eigh(factor_of(call, G_DD, "expand"))
            M, O = call.output_shape[0], len(values_O)  # noqa: E741
            root_XO = nn.functional.pad((U_OO * values_O.clamp(min=0.0).sqrt()).T, (0, 0, 0, -O % M))
            e_VMOT = G_DD.new_zeros(len(root_XO) // M, M, O, call.output_shape.numel() // (M * O))
            e_VMOT[..., 0] = root_XO.view(-1, M, O)
            e_VM = e_VMOT if isinstance(call.kind, Convolution) else e_VMOT.mT.contiguous()
            self._keep(call, e_VM.view(-1, *call.output_shape))

    def _arrived(self, call: LayerCall, e_M: Tensor) -> None:
        if self._fisher == "empirical":
            task = torch._C._current_graph_task_id()
            self._group(task, call.forward)
            self._records[(task, call.forward), 0].append(self._capture.record(call, e_M[None]))
        else:
            # Another part of the objective may come before the loss.
            self._mode.require_known()


class _LayerByLayer(Mapping[str, Rows]):
    """Rows that are created on access, so that only one layer needs memory at a time."""

    def __init__(self, parts: dict[str, list[list[Record]]], scale: float, num_rows: int) -> None:
        self._parts, self._scale, self._num_rows = parts, scale, num_rows

    def __getitem__(self, name: str) -> Rows:
        parts = [_affine(name, records, self._scale, self._num_rows) for records in self._parts[name]]
        if len(parts) == 1:
            return parts[0]
        # The passes are concatenated into one minibatch.
        if len(lengths := {rows.a_NTI.shape[1] for rows in parts}) > 1:
            raise ConfigError(f"the minibatches of one step have samples of {sorted(lengths)} positions at {name}; pad them "
                              f"to one length, or call step() after each.")
        # A loss of fewer classes has fewer vectors; pad with zeros.
        V = max(len(rows.e_VNTO) for rows in parts)
        e_VNTO = [nn.functional.pad(rows.e_VNTO, (0, 0, 0, 0, 0, 0, 0, V - len(rows.e_VNTO))) for rows in parts]
        return Rows(name, parts[0].bias, torch.cat([rows.a_NTI for rows in parts]), torch.cat(e_VNTO, dim=1), self._num_rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _of_pass(records: list[Record], scale: float, num_rows: int) -> tuple[dict[str, list[Record]], dict[str, Tensor]]:
    """Return (affine layers by weight, squares of all other parameters, also embeddings)."""
    uses: dict[str, list[tuple[Record, UseShare]]] = defaultdict(list)
    for record in records:
        for name, share in record.shares().items():
            uses[name].append((record, share))
    affine = {name: [record for record, _ in each] for name, each in uses.items()
              if all(record.call.weight == name and isinstance(share, OuterProduct) and share.groups == 1
                     for record, share in each)}
    covered = {*affine, *(records[0].call.bias for records in affine.values())}
    squares = {name: joined([share for _, share in each]).sum_of_squares() * (scale * scale / num_rows)
               for name, each in uses.items() if name not in covered}
    return affine, squares


def _affine(name: str, records: list[Record], scale: float, num_rows: int) -> Rows:
    """Return the rows of one layer, with the positions of all its calls."""
    bias = records[0].call.bias
    a_parts, e_parts = ([record.input_rows() for record in records], [record.derivative_rows() for record in records])
    # torch.cat would copy a single tensor.
    a_NTI = a_parts[0] if len(records) == 1 else torch.cat(a_parts, dim=1)
    e_VNTO = e_parts[0] if len(records) == 1 else torch.cat(e_parts, dim=2)
    if bias is not None:
        a_NTI = torch.cat([a_NTI, a_NTI.new_ones(*a_NTI.shape[:2], 1)], dim=2)
    return Rows(name, bias, a_NTI, e_VNTO * scale, num_rows)
