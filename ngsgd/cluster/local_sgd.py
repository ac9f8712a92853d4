"""Local SGD for custom training loops: ranks of torch.distributed that average parameters.

B is the model that ranks start a round from, W the model to evaluate; see `ngsgd.optim.outer`.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ngsgd.arguments import checked, checks_arguments, require_state
from ngsgd.cluster.fingerprint import why_no_kernels
from ngsgd.cluster.replicas import exchanged_tensors as exchanged
from ngsgd.cluster.replicas.outer_parts import OptimizerReset, Part, clear_not_finite, parts_of, require_like
from ngsgd.cluster.replicas.rank_group import LostRankError, RankGroup
from ngsgd.errors import ArgumentError, ClusterError, ConfigError, DivergenceError, has_grown, warn
from ngsgd.ops.kernels.native import print_line, use_torch_operations
from ngsgd.optim.outer.rules import Average, Bmuf, DiLoCo, OuterInfo, OuterRule

_RULES = {"average": Average, "bmuf": Bmuf, "diloco": DiLoCo}
# number of rounds passed to rules whose momentum depends on the length of the run
_LONG_RUN = 1_000_000_000
_MAX_SAMPLES = 2**53  # integers that float64 holds


@dataclass
class _Round:
    """What this rank brings to an average."""

    tensors: list[exchanged.Exchanged] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    # bits of the tensors that are followed, before the average, and those that it changes
    marks: dict[str, int] = field(default_factory=dict)
    written: list[exchanged.Exchanged] = field(default_factory=list)
    bad: str = ""  # a tensor of this rank that is not finite
    is_bad: bool = False
    problem: ConfigError | None = None

    @property
    def followed(self) -> list[exchanged.Exchanged]:
        return [one for one in self.tensors if one.kind == "followed"]


class LocalSGD:
    """Average the parameters of all ranks every `sync_every` optimizer steps.

    Between two averages every rank trains alone. Ranks are weighted by the number of samples that
    they trained on. The constructor makes all parameters and buffers equal. At an average, running
    means and variances are pooled, and other floating-point buffers and frozen parameters are
    averaged if a rank changed them. Integer buffers, such as counters, stay those of the rank.

    With an optimizer of this package on the CPU, all ranks use C++ kernels, or none does.

    A rank whose parameters are not finite is excluded from the average, named in a warning, and
    continues with the average of the others. A layer that is unfrozen is averaged; the outer rule
    starts with its second average.

    If a rank dies, the samples of its round are lost: the other ranks form a new group and
    continue. This requires a live process of the rendezvous store (rank 0, or the agent of
    torchrun). With NCCL, which has run with one rank only, a dead rank is detected after
    `timeout_s`, and `init_process_group` must not get a `device_id`. A rank that starts later loads
    `state_dict()` of a rank. All ranks then form a new process group, as after an elastic restart
    of torchrun.

    Args:
        model: the module that the optimizer trains. Its parameters and buffers are set to those of
            the lowest rank.
        optimizer: any optimizer of the model.
        sync_every: optimizer steps between two averages, at least 1.
        outer: "average", "bmuf", "diloco", or a rule of `ngsgd.optim.outer` without `center`,
            such as DiLoCo(lr=0.5). Default: "bmuf".
        process_group: ranks that train together, such as one dimension of a device mesh; None for
            all ranks.
        reset_optimizer: start each round with a new optimizer state (momentum, Fisher estimates),
            as `ngsgd train` does. Learning rates and other settings stay. Default: False.
        timeout_s: maximum time that a rank waits for the others at an average, in seconds. Default:
            60.

    Raises:
        ConfigError: torch.distributed is not initialized, an argument is wrong, the models of the
            ranks differ, or a tensor cannot be exchanged (FSDP, DTensor, meta, sparse).
        ClusterError: a rank does not create LocalSGD within `timeout_s`.

    Example:
        One process; with `torchrun`, `dist.init_process_group()` connects several.

        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        >>> local = LocalSGD(model, optimizer, sync_every=2, outer="diloco")
        >>> for x in torch.ones(4, 8, 3):
        ...     optimizer.zero_grad()
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     is_averaged = local.step(num_samples=len(x))
        >>> is_averaged, local.num_rounds
        (True, 2)
        >>> local.finish()
        >>> dist.destroy_process_group()
    """

    @checks_arguments()
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, sync_every: int, outer: str | OuterRule = "bmuf",
                 process_group: dist.ProcessGroup | None = None, reset_optimizer: bool = False, timeout_s: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("LocalSGD needs torch.distributed; call torch.distributed.init_process_group first.")
        if sync_every < 1:
            raise ConfigError(f"sync_every is {sync_every}; set it to at least 1.")
        if isinstance(outer, type) or (outer not in _RULES if isinstance(outer, str) else not hasattr(outer, "coefficients")):
            raise ConfigError(f"outer is {outer!r}; choose {', '.join(_RULES)}, or pass a rule of "
                              "ngsgd.optim.outer, such as DiLoCo(lr=0.5).")
        if not isinstance(outer, str) and hasattr(outer, "center"):
            raise ConfigError(f"{type(outer).__name__} needs the parameters of every rank, but ranks exchange only their "
                              f"mean; choose {', '.join(_RULES)}, or a rule of ngsgd.optim.outer without `center`.")
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(f"the {type(optimizer).__name__} has no parameter of the model, so LocalSGD would "
                              "average a model that nobody trains; create the optimizer from the same "
                              "model, after the last change of its layers.")
        device = next(model.parameters()).device
        if dist.get_backend(process_group) == "nccl" and device.type == "cpu":
            raise ConfigError("the process group uses NCCL, but the model is on the CPU; move the model, or use gloo.")
        self.model, self.optimizer, self.sync_every = model, optimizer, sync_every
        self.rule = _RULES[outer]() if isinstance(outer, str) else outer
        self._reset = OptimizerReset(optimizer) if reset_optimizer else None
        self.num_steps = self.num_rounds = self._num_samples = 0
        self._numbers: dict[str, float] = {}
        self._excluded, self._reported = Counter[int](), Counter[int]()
        self._parts: list[Part] = []
        # parameters that are equal on all ranks at the start
        self._known: dict[int, nn.Parameter] | None = None
        # of the followed tensors after the last average: bits, and how many values are not finite
        self._counts: dict[str, tuple[int, int]] = {}
        uses_kernels = type(optimizer).__module__.startswith("ngsgd.") and device.type == "cpu"
        # compiled before other ranks wait for this one
        no_kernels = why_no_kernels(print_line) if uses_kernels else ""
        self._group = self._joined(process_group, timeout_s, device, no_kernels)
        self._group.start()

    @torch.no_grad()
    def _joined(self, process_group: dist.ProcessGroup | None, timeout_s: float, device: torch.device, no_kernels: str
                ) -> RankGroup:
        """Return the group of all ranks, which have equal models now."""
        try:
            group = self._group = RankGroup(process_group, timeout_s, device)
            own = _Round()
            try:
                own.tensors = exchanged.planned(self.model)
            except ConfigError as problem:
                own.problem = problem
            try:
                self._agree(own)
                group.equalize(own.tensors, group.ranks[0])
                reasons = zip(group.ranks, group.gather_texts(no_kernels), strict=True)
                lacking = [f"rank {rank}: {reason}" for rank, reason in reasons if reason]
                if lacking:
                    use_torch_operations()
                if lacking and group.rank == group.ranks[0]:
                    warn(f"all ranks use torch operations instead of C++ kernels ({'; '.join(lacking)}); install a C++ "
                         "compiler there, or set NGSGD_KERNELS=torch on all ranks.")
            except ConfigError:
                group.leave()
                raise
        except LostRankError as error:
            raise ClusterError(f"a rank did not create LocalSGD within {timeout_s} s ({error}); create it on all ranks "
                               "of the process group, in the same order.") from error
        self._parts = parts_of(own.tensors, self.rule.buffers, None)
        self._known = {id(one.tensor): one.tensor for one in own.tensors if isinstance(one.tensor, nn.Parameter)}
        self._count(own.followed, exchanged.marks_of(own.followed))
        return group

    @property
    def num_ranks(self) -> int:
        """Number of live ranks."""
        return len(self._group.ranks)

    @property
    def gain(self) -> float:
        """Total step of the model on a constant mean delta.

        The learning rate of a rank may be num_ranks / gain times as high.
        """
        return self.rule.gain(self.num_ranks, _LONG_RUN)

    def step(self, num_samples: int = 1) -> bool:
        """Count an optimizer step, and average if `sync_every` steps were counted.

        Args:
            num_samples: samples of the step on this rank, at least 0; the weight of the rank in the
                average. Default: 1.

        Returns:
            Whether parameters were averaged after the step.

        Raises:
            ArgumentError: `num_samples` is negative or no whole number.
            ClusterError: no other rank answers, or too few do.
            ConfigError: the models of the ranks differ, or a layer was replaced.
            DivergenceError: the parameters of all ranks are not finite.
        """
        is_plain = type(num_samples) is int and 0 <= num_samples < _MAX_SAMPLES
        self._num_samples += num_samples if is_plain else _checked_samples(num_samples)
        self.num_steps += 1
        if self.num_steps % self.sync_every:
            return False
        self.sync()
        return True

    @torch.no_grad()
    def sync(self) -> None:
        """Average now, and take the outer step.

        Raises:
            ClusterError: no other rank answers, or too few do.
            ConfigError: the models of the ranks differ, or a layer was replaced.
            DivergenceError: the parameters of all ranks are not finite.
        """
        while True:
            try:
                if self._average():
                    return
            except LostRankError as error:
                self._group.regroup(error)

    def finish(self) -> None:
        """End training: average the steps since the last average.

        Afterwards the module holds the model to evaluate and save (W).
        """
        self.sync()
        with contextlib.suppress(LostRankError):
            # a process that ends closes connections that the average of other ranks may still need
            self._group.barrier()
        self._group.stop()
        with torch.no_grad():
            for part in self._parts:
                part.load(part.arrays["model"])

    def state_dict(self) -> dict[str, Any]:
        """State of the last average; with model and optimizer states, training resumes bitwise."""
        return {"rule": type(self.rule).__name__, "layout": [one.layout for part in self._parts for one in part.tensors],
                "arrays": {part.dtype: {name: tensor.clone() for name, tensor in part.arrays.items()} for part in self._parts},
                "start": {part.dtype: part.start.clone() for part in self._parts}, "numbers": dict(self._numbers),
                "num_steps": self.num_steps, "num_rounds": self.num_rounds, "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a rank.

        Args:
            state: a result of `state_dict`.

        Raises:
            ConfigError: the state belongs to another rule or another model; nothing is changed.
        """
        require_state(state, tuple(self.state_dict()), "LocalSGD", ConfigError)
        require_like(state, self.state_dict())
        for part in self._parts:
            part.arrays = {name: tensor.to(part.sums, copy=True) for name, tensor in state["arrays"][part.dtype].items()}
            part.set_start(state["start"][part.dtype].to(part.sums, copy=True))
        self._numbers = dict(state["numbers"])
        self.num_steps, self.num_rounds = state["num_steps"], state["num_rounds"]
        self._num_samples = state["num_samples"]

    # Plan -----------------------------------------------------------------------------------------

    def _own_round(self) -> _Round:
        """Write the sums, and note what changed on this rank."""
        own = _Round()
        try:
            trained = {key for part in self._parts for key in part.slices()}
            own.tensors = exchanged.planned(self.model, trained, self._known)
            own.parts = parts_of(own.tensors, self.rule.buffers, self._parts)
            own.marks = exchanged.marks_of(own.followed)
        except ConfigError as problem:
            own.problem = problem
            return own
        for part in own.parts:
            if not exchanged.fill(part.sums, part.tensors, self._num_samples):
                own.is_bad, own.bad = True, exchanged.first_not_finite(part.tensors)
        for one in own.followed if self._num_samples else ():
            mark, count = self._counts.get(one.name, (0, 0))
            if own.marks[one.name] != mark and exchanged.num_not_finite(one) > count:
                own.is_bad, own.bad = True, one.name
        if own.is_bad:
            for part in own.parts:
                part.sums.zero_()
        return own

    def _count(self, followed: Sequence[exchanged.Exchanged], marks: Mapping[str, int]) -> None:
        """Note which values are not finite from now on, because a module needs them."""
        self._counts |= {one.name: (marks[one.name], exchanged.num_not_finite(one)) for one in followed
                         if self._counts.get(one.name, (None,))[0] != marks[one.name]}

    # Average --------------------------------------------------------------------------------------

    def _average(self) -> bool:
        """Average over the live ranks; return whether the round of this rank is complete."""
        own = self._own_round()
        headers = self._agree(own)
        rounds, samples, is_bad = ([header[index] for header in headers] for index in (2, 3, 4))
        if min(rounds) < max(rounds):
            return self._caught_up(rounds, own)
        counted = [index for index, count in enumerate(samples) if count and not is_bad[index]]
        bad = [self._group.ranks[index] for index, count in enumerate(samples) if count and is_bad[index]]
        if bad:
            self._name(bad, own, is_last=not counted)
        if not counted:
            return True
        for part in own.parts:
            self._group.all_reduce(part.sums)
        weight = float(sum(samples[index] for index in counted))
        means = self._means(own, counted, weight)
        self._group.succeeded()
        now = self.rule.coefficients(OuterInfo(self.num_rounds, _LONG_RUN, self.num_ranks - len(bad), 0.0), self._numbers)
        for part in own.parts:
            part.step(self.rule, now, weight)
        # parameters last, because a buffer can be a view of one
        for one, values in means:
            exchanged.write(one.tensor, values)
        for part in own.parts:
            part.load(part.start)
        self._numbers, self._num_samples = now, 0
        self.num_rounds += 1
        self._close(own)
        if self._reset is not None:
            self._reset.apply()
        elif self._group.rank in bad:
            clear_not_finite(self.optimizer)
        return True

    def _agree(self, own: _Round) -> list[list[int]]:
        """Exchange the plans of the ranks; raise ConfigError if they differ or one is impossible.

        Returns:
            Of each rank: digest of the plan, whether it has a problem, completed rounds, samples of
            this round, whether values are not finite.
        """
        rule = repr(self.rule) if is_dataclass(self.rule) else type(self.rule).__name__
        # fixed tensors may change in shape after the start
        lines = [f"rule {rule}", *(one.line for one in own.tensors if one.kind != "fixed" or self._known is None)]
        text = "\n".join(lines) if own.problem is None else str(own.problem)
        headers = self._group.gather(
            [exchanged.digest_of(text), own.problem is not None, self.num_rounds, self._num_samples, own.is_bad])
        if any(header[1] for header in headers):
            texts = self._group.gather_texts(text if own.problem else "")
            raise own.problem or ConfigError([f"rank {rank}: {text}" for rank, text in zip(self._group.ranks, texts, strict=True)
                                              if text])
        if len({header[0] for header in headers}) > 1:
            texts = self._group.gather_texts(text)
            names = [f"rank {rank}" for rank in self._group.ranks]
            difference = exchanged.first_difference(dict(zip(names, texts, strict=True)))
            raise ConfigError(f"the models or outer rules of the ranks differ: {difference}. Create and change the model "
                              "in the same way on all ranks.")
        return headers

    def _means(self, own: _Round, counted: Sequence[int], weight: float) -> list[tuple[exchanged.Exchanged, Tensor]]:
        """Return the means of followed tensors that differ between ranks with samples, and
        equalize the others."""
        followed, index = own.followed, self._group.ranks.index(self._group.rank)
        if not followed:
            return []
        gathered = zip(*self._group.gather(list(own.marks.values())), strict=True)
        marks = dict(zip(own.marks, gathered, strict=True))
        mean_of = exchanged.means_of_variances(followed)
        differing = {name for name, numbers in marks.items() if len({numbers[rank] for rank in counted}) > 1}
        # variances of means that differ are larger, so both are pooled
        differing |= {name for name, mean in mean_of.items() if mean.name in differing}
        averaged = [one for one in followed if one.name in differing]
        restored = [one for one in followed if one.name not in differing and len(set(marks[one.name])) > 1]
        self._group.equalize(restored, self._group.ranks[counted[0]])
        own.written = averaged + restored
        means = dict[str, Tensor]()
        for dtype in dict.fromkeys(one.precision for one in averaged):
            own_dtype = [one for one in averaged if one.precision is dtype]
            device = own_dtype[0].tensor.device
            sums = torch.zeros(sum(one.size for one in own_dtype), dtype=dtype, device=device)
            parts = sums.split([one.size for one in own_dtype])
            for one, values in zip(own_dtype, parts, strict=True) if index in counted else ():
                values.copy_(exchanged.values_of(one.tensor, dtype))
                if one.name in mean_of:
                    # second moments have a mean, variances have none
                    values.add_(exchanged.values_of(mean_of[one.name].tensor, dtype).to(device).square())
                values.mul_(self._num_samples)
            self._group.all_reduce(sums)
            sums.div_(weight)
            means |= {one.name: values for one, values in zip(own_dtype, parts, strict=True)}
        for name, mean in mean_of.items():
            if name in means:
                center = means[mean.name] if mean.name in means else exchanged.values_of(mean.tensor, mean.precision)
                means[name].sub_(center.to(means[name].device).square()).clamp_(min=0.0)
        return [(one, means[one.name]) for one in averaged]

    def _close(self, own: _Round) -> None:
        """Keep the state of trainable parameters; layers frozen in the round have none."""
        self._parts = own.parts
        frozen = [one for one in own.tensors if one.kind == "trained" and not one.tensor.requires_grad]
        if frozen:
            ids = {id(one.tensor) for one in frozen}
            self._parts = parts_of([one for one in own.tensors if id(one.tensor) not in ids], self.rule.buffers, own.parts)
        self._count([*own.followed, *frozen], {**own.marks, **exchanged.marks_of([*own.written, *frozen])})

    def _caught_up(self, rounds: Sequence[int], own: _Round) -> bool:
        """Send the state of the last average to ranks that missed it; return True on these."""
        newest = max(rounds)
        index = rounds.index(newest)
        source = self._group.ranks[index]
        starts = [part.start.clone() for part in own.parts]
        for part, start in zip(own.parts, starts, strict=True):
            for tensor in (*part.arrays.values(), start):
                self._group.broadcast(tensor, source)
        numbers = json.loads(self._group.gather_texts(json.dumps(self._numbers))[index])
        self._group.equalize(own.followed, source)
        if self.num_rounds == newest:
            return False
        self.num_rounds, self._numbers, self._num_samples = newest, numbers, 0
        for part, start in zip(own.parts, starts, strict=True):
            part.set_start(start)
            part.load(start)
        own.written = own.followed
        self._close(own)
        if self._reset is not None:
            self._reset.apply()
        return True

    def _name(self, bad: Sequence[int], own: _Round, *, is_last: bool) -> None:
        """Warn of ranks that the average excludes."""
        texts = self._group.gather_texts(own.bad)
        named = ", ".join(f"rank {rank} ({texts[self._group.ranks.index(rank)] or 'too large'})" for rank in bad)
        advice = "Check the data and the learning rate of that rank, or skip steps whose loss is not finite"
        if is_last:
            raise DivergenceError(f"LocalSGD has nothing to average in round {self.num_rounds}: the parameters or statistics of "
                                  f"all ranks with samples are not finite: {named}. {advice}; restart from the last state_dict().")
        self._excluded.update(bad)
        if any(has_grown(self._excluded[rank], self._reported[rank]) for rank in bad):
            self._reported |= self._excluded
            warn(f"LocalSGD excluded {named} from average {self.num_rounds}, because parameters or statistics are not finite. It "
                 "receives the average of the other ranks, and tensors of its optimizer state that are not finite become 0. "
                 f"{advice}.")


def _checked_samples(num_samples: Any) -> int:
    """Return a number of samples; raise ArgumentError if it is none."""
    value = checked({"num_samples": num_samples}, {"num_samples": int}, "LocalSGD.step")["num_samples"]
    try:
        count = operator.index(value)
    except (RuntimeError, TypeError, ValueError):
        # arrays and tensors of other numbers
        count = -1
    if isinstance(num_samples, bool) or not 0 <= count < _MAX_SAMPLES:
        raise ArgumentError(f"LocalSGD.step: num_samples is {num_samples!r}; give the number of samples of the step, a whole "
                            "number of at least 0.")
    return count
