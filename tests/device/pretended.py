"""A pretended accelerator on a CPU: tensors whose device is `pretended:0` and whose values are
real.

torch lets Python stand in for a backend (PrivateUse1).  A tensor of the device wraps a CPU tensor,
and each operator runs on the wrapped ones.  `Watch` sees each operator and

- raises WrongDevice where an operator mixes CPU tensors with those of the device (a CPU number of
  no dimension is allowed, as on a GPU) or makes a CPU tensor inside a step,
- counts the kernels that a GPU would launch,
- counts the places where the host waits for the device.

The registration holds for the complete process, so tests call this in a separate process.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ngsgd.ops.device import triton_kernels

_NAME = "pretended"
_ROOT = Path(__file__).parents[2]
_aten = torch.ops.aten

# the host reads a number of the device, or the shape of the result depends on it
_WAITS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave.Tensor", "_linalg_eigh", "linalg_qr",
    "_linalg_svd", "linalg_cholesky", "linalg_inv", "_linalg_solve_ex", "linalg_eig",
    "bincount", "histc",
}
# work of the host: the plan of a batch, from the lengths of its sequences; once, a search for
# products of the CPU; once per estimate, its start; once per value, constants
_ON_HOST = {"in ngsgd/ops/tensors.py, __call__", "in ngsgd/sequence/forward_backward.py, of", "in ngsgd/ops/gemm.py, is_there",
            "in ngsgd/ops/natural_gradient.py, initial_state"}
# no kernel: only sizes, strides or memory
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "view", "_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "resize_", "set_",
    "record_stream",
}


class WrongDevice(AssertionError):
    """An operator got tensors of two devices, or made one on the CPU inside a step."""


class PretendedTensor(Tensor):
    """A tensor of the pretended device; `raw` has its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> PretendedTensor:
        made = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=device(), requires_grad=requires_grad)
        made.raw = raw
        return made

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any,  # type: ignore[override]
                           args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Generator(torch.Generator):
    """Of the device, too: its random numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


def register() -> None:
    """Make the device known to torch, once in a process."""
    _setup_privateuseone_for_python_backend(_NAME)
    triton_kernels.DEVICES.add(_NAME)
    torch.Generator = _Generator  # type: ignore[misc]


def device() -> torch.device:
    return torch.device(_NAME, 0)


def _is_ours(thing: Any) -> bool:
    return isinstance(thing, PretendedTensor)


def _is_sparse(thing: Any) -> bool:
    return isinstance(thing, Tensor) and thing.layout is not torch.strided


def _is_device(thing: Any) -> bool:
    return isinstance(thing, torch.device) and thing.type == _NAME


def _leaves(things: Iterable[Any]) -> Iterator[Any]:
    """The values of the arguments of an operator, which nest in lists and tuples alone.

    Several times as fast as torch's functions for any tree, which took most of the time.
    """
    for thing in things:
        if isinstance(thing, (list, tuple)):
            yield from _leaves(thing)
        else:
            yield thing


def _mapped(function: Callable[[Any], Any], thing: Any) -> Any:
    """The argument or result of an operator, with `function` applied to each value."""
    if isinstance(thing, (list, tuple)):
        found = [_mapped(function, value) for value in thing]
        return found if isinstance(thing, list) else tuple(found)
    return function(thing)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """The operator on the wrapped tensors."""
    def raw(thing: Any) -> Any:
        if _is_ours(thing):
            return thing.raw
        return torch.device("cpu") if _is_device(thing) else thing

    to_cpu = function is _aten._to_copy.default and str(kwargs.get("device", _NAME)) == "cpu"
    found = function(*_mapped(raw, args), **{key: _mapped(raw, value) for key, value in kwargs.items()})
    # an operator that writes into its argument returns that argument
    written = {id(thing.raw): thing for thing in _leaves((args, *kwargs.values())) if _is_ours(thing)}

    def wrapped(thing: Any) -> Any:
        if not isinstance(thing, Tensor) or to_cpu or _is_sparse(thing):
            return thing
        return written.get(id(thing)) if id(thing) in written else PretendedTensor(thing)

    return _mapped(wrapped, found)


class Watch(TorchDispatchMode):
    """Runs operators of the device and writes down what a GPU would do; see the module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = Counter[str]()
        self.waits = Counter[str]()  # place in the project -> times
        self.inside_step = False

    @contextmanager
    def step(self) -> Iterator[Watch]:
        """Counts again; inside, no tensor may be made on the CPU."""
        self.launches.clear()
        self.waits.clear()
        self.inside_step = True
        try:
            yield self
        finally:
            self.inside_step = False

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    def __enter__(self) -> Watch:
        self._functions = _Numbers(self)
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        # nodes run in this thread, where the modes are
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._one_thread.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._one_thread.__exit__(*error)
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = list(_leaves((args, *kwargs.values())))
        # sparse tensors have no wrapper; the cases make none but for the device
        ours = [thing for thing in flat if _is_ours(thing) or _is_sparse(thing)]
        name = function.overloadpacket.__name__
        if not ours and not any(_is_device(thing) for thing in flat):
            return self._on_cpu(function, name, args, kwargs)
        copies = name in ("_to_copy", "copy_", "copy")
        others = [thing for thing in flat if isinstance(thing, Tensor) and not _is_ours(thing)
                  and not _is_sparse(thing)]
        if not copies and any(other.ndim for other in others):
            raise WrongDevice(f"{function} mixes the device with CPU tensors {_place()}")
        found = _run(function, args, kwargs)
        if self.inside_step:
            self._note(function, name, args, kwargs, found)
        return found

    def _on_cpu(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("_pin_memory", "pin_memory"):
            return args[0]
        is_factory = not any(isinstance(thing, Tensor) for thing in _leaves((args, *kwargs.values())))
        found = function(*args, **kwargs)
        # `torch.zeros(3)` and `torch.zeros(3, device="cpu")` look the same here
        if (self.inside_step and is_factory and isinstance(found, Tensor) and found.ndim
                and _place() not in _ON_HOST):
            raise WrongDevice(f"{function} makes a tensor without a device {_place()}")
        return found

    def _note(self, function: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            pass
        elif name in ("index", "index_put_", "_index_put_impl_") and any(
                isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
            self.waits[f"index by truth values {_place()}"] += 1
        elif name in _WAITS or str(function).removeprefix("aten.") in _WAITS:
            self.waits[f"{name} {_place()}"] += 1
        elif name == "_to_copy" and not _is_ours(found):
            self.waits[f"copy to the host {_place()}"] += not kwargs.get("non_blocking", False)
        elif name == "copy_" and not (_is_ours(args[0]) and _is_ours(args[1])):
            self.waits[f"copy between host and device {_place()}"] += not (
                len(args) > 2 and args[2])
        elif name == "_to_copy" and not _is_ours(args[0]):
            self.waits[f"copy to the device {_place()}"] += not kwargs.get("non_blocking", False)
        number = _num_kernels(function, name, args)
        if number:
            self.launches[name] += number


class _Numbers(TorchFunctionMode):
    """`torch.tensor` of numbers on the host, a copy that no operator sees."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            return function(*args, **{**kwargs, "pin_memory": False})
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.tolist and _is_ours(args[0]):
            if self._watch.inside_step:
                self._watch.waits[f"tolist {_place()}"] += 1
            return args[0].raw.tolist()
        to = kwargs.get("device")
        if function not in (torch.tensor, torch.as_tensor) or to is None or not _is_device(
                torch.device(to)) or _is_ours(args[0]):
            return function(*args, **kwargs)
        if self._watch.inside_step:
            self._watch.waits[f"torch.tensor {_place()}"] += 1
            self._watch.launches["torch.tensor"] += 1
        return PretendedTensor(function(*args, **{**kwargs, "device": "cpu"}))


def _num_kernels(function: Any, name: str, args: Any) -> int:
    """Kernels of an operator: none for views, one for each result of a backward pass or a list."""
    if name in _FREE or _is_view(function):
        return 0
    if name == "convolution_backward":
        return sum(args[-1])
    if name == "native_layer_norm_backward":
        return 1 + any(args[-1][1:])
    return 1


def _is_view(function: Any) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _place() -> str:
    """The innermost line of the project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT / "ngsgd"):
            return f"in {path.relative_to(_ROOT)}, {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the project"


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers on the device, in place."""
    for child in module.modules():
        for name, p in child._parameters.items():
            if p is not None:
                child._parameters[name] = torch.nn.Parameter(
                    PretendedTensor(p.detach().clone()), requires_grad=p.requires_grad)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = PretendedTensor(buffer.clone())
    return module


def host(thing: Any) -> Any:
    """Copies of tensors of the device as CPU tensors, in any nest."""
    def plain(value: Any) -> Any:
        return value.raw.clone() if _is_ours(value) else value

    return tree_map(plain, thing)
