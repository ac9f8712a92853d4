"""A second reader of nnet3 raw models in text form, their outputs in float64, and a writer of their
binary form.

It shares no code with `ngsgd.models.nnet3`. It takes tokens one by one, in the order in which the
Read functions of Kaldi's components expect them, and refuses any other.

Letters: N rows, D feature dimension, S dimension of the i-vector.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Component = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """Nodes by name: input (dim), component (component, descriptor), output (descriptor)."""

    input_dims: dict[str, int]
    nodes: dict[str, tuple[str, str]]
    output: str
    components: dict[str, Component]


class Tokens:
    """Tokens between white space."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self) -> str:
        match = re.compile(r"\s*(\S+)").match(self.text, self.at)
        if not match:
            raise ValueError("the text ends too early")
        self.at = match.end()
        return match[1]

    def peek(self) -> str:
        at, token = self.at, self.take()
        self.at = at
        return token

    def expect(self, token: str) -> None:
        if (found := self.take()) != token:
            raise ValueError(f"{token} was expected, not {found}")

    def after(self, token: str, read: Callable[[], Any]) -> Any:
        self.expect(token)
        return read()

    def integer(self) -> int:
        return int(self.take())

    def real(self) -> float:
        return float(self.take())

    def boolean(self) -> bool:
        return {"T": True, "F": False}[self.take()]

    def _numbers(self) -> list[list[float]]:
        self.expect("[")
        end = self.text.index("]", self.at)
        rows = [[float(word) for word in line.split()] for line in self.text[self.at:end].split("\n") if line.strip()]
        self.at = end + 1
        return rows

    def vector(self) -> Array:
        rows = self._numbers()
        if len(rows) > 1:
            raise ValueError("a vector has several lines")
        return np.array(rows[0] if rows else [])

    def matrix(self) -> Array:
        return np.array(self._numbers())


def read(text: str) -> Model:
    """The model; raises ValueError or KeyError for what Kaldi would not read."""
    head, _, body = text.partition("\n\n")
    first, *lines = head.split("\n")
    if first != "<Nnet3> ":
        raise ValueError("no <Nnet3>")
    dims, nodes, output = {}, {}, ""
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "input-node":
            name, dim = re.fullmatch(r"name=(\S+) dim=(\d+)", rest).groups()  # type: ignore[union-attr]
            dims[name] = int(dim)
        elif kind == "component-node":
            name, component, descriptor = re.fullmatch(r"name=(\S+) component=(\S+) input=(.*)", rest).groups()  # type: ignore[union-attr]
            nodes[name] = component, descriptor
        elif kind == "output-node":
            [output] = re.fullmatch(r"name=output input=(.*) objective=linear", rest).groups()  # type: ignore[union-attr]
        else:
            raise ValueError(f"the line {line!r}")
    tokens = Tokens(body)
    components = {}
    for _ in range(tokens.after("<NumComponents>", tokens.integer)):
        name = tokens.after("<ComponentName>", tokens.take)
        kind = tokens.take().strip("<>")
        components[name] = {"kind": kind, **_READERS[kind](tokens)}
        tokens.expect(f"</{kind}>")
    tokens.expect("</Nnet3>")
    return Model(dims, nodes, output, components)


def _updatable(t: Tokens) -> Component:
    """Kaldi's UpdatableComponent::ReadUpdatableCommon."""
    found = {"LearningRateFactor": 1.0, "MaxChange": 0.0, "L2Regularize": 0.0}
    for token in found:
        if t.peek() == f"<{token}>":
            found[token] = t.after(f"<{token}>", t.real)
    return {**found, "LearningRate": t.after("<LearningRate>", t.real)}


def _affine(t: Tokens) -> Component:
    return {**_updatable(t), **_fixed_affine(t)}


def _natural_affine(t: Tokens) -> Component:
    reads = {"RankIn": t.integer, "RankOut": t.integer, "UpdatePeriod": t.integer, "NumSamplesHistory": t.real, "Alpha": t.real}
    return {**_affine(t), **{token: t.after(f"<{token}>", read) for token, read in reads.items()}}


def _fixed_affine(t: Tokens) -> Component:
    return {"LinearParams": t.after("<LinearParams>", t.matrix), "BiasParams": t.after("<BiasParams>", t.vector)}


def _nonlinear(t: Tokens) -> Component:
    reads = {"Dim": t.integer, "ValueAvg": t.vector, "DerivAvg": t.vector, "Count": t.real, "OderivRms": t.vector,
             "OderivCount": t.real, "NumDimsSelfRepaired": t.real, "NumDimsProcessed": t.real}
    return {token: t.after(f"<{token}>", read) for token, read in reads.items()}


def _pnorm(t: Tokens) -> Component:
    return {"InputDim": t.after("<InputDim>", t.integer), "OutputDim": t.after("<OutputDim>", t.integer)}


def _normalize(t: Tokens) -> Component:
    return {"InputDim": t.after("<InputDim>", t.integer), "TargetRms": t.after("<TargetRms>", t.real),
            "AddLogStddev": t.after("<AddLogStddev>", t.boolean)}


def _batchnorm(t: Tokens) -> Component:
    reads = {"Dim": t.integer, "BlockDim": t.integer, "Epsilon": t.real, "TargetRms": t.real, "TestMode": t.boolean,
             "Count": t.real, "StatsMean": t.vector, "StatsVar": t.vector}
    return {token: t.after(f"<{token}>", read) for token, read in reads.items()}


_READERS: dict[str, Callable[[Tokens], Component]] = {
    "NaturalGradientAffineComponent": _natural_affine, "AffineComponent": _affine, "FixedAffineComponent": _fixed_affine,
    "RectifiedLinearComponent": _nonlinear, "LogSoftmaxComponent": _nonlinear, "PnormComponent": _pnorm,
    "NormalizeComponent": _normalize, "BatchNormComponent": _batchnorm,
}


def outputs(model: Model, frames_NWD: Array, left_context: int, ivector_NS: Array | None = None) -> Array:
    """N x P: the output for the frame at `left_context` of each row's window, in test mode."""
    def of_node(name: str, t: int) -> Array:
        if name == "input":
            return frames_NWD[:, t + left_context]
        component, descriptor = model.nodes[name]
        return _propagated(model.components[component], of_descriptor(descriptor, t))

    def of_descriptor(descriptor: str, t: int) -> Array:
        inside = re.fullmatch(r"Append\((.*)\)", descriptor)
        parts = re.findall(r"ReplaceIndex\(ivector, t, 0\)|Offset\([^()]*\)|[\w.-]+", inside[1] if inside else descriptor)
        values = []
        for part in parts:
            if part.startswith("ReplaceIndex"):
                assert ivector_NS is not None
                values.append(ivector_NS)
            elif offset := re.fullmatch(r"Offset\(([\w.-]+), (-?\d+)\)", part):
                values.append(of_node(offset[1], t + int(offset[2])))
            else:
                values.append(of_node(part, t))
        return np.concatenate(values, axis=1)
    return of_descriptor(model.output, 0)


def _propagated(c: Component, x: Array) -> Array:
    if "LinearParams" in c:
        return np.asarray(x @ c["LinearParams"].T + c["BiasParams"])
    if c["kind"] == "RectifiedLinearComponent":
        return np.maximum(x, 0.0)
    if c["kind"] == "PnormComponent":
        return np.asarray(np.sqrt(np.square(x.reshape(len(x), c["OutputDim"], -1)).sum(axis=2)))
    if c["kind"] == "NormalizeComponent":
        return np.asarray(c["TargetRms"] * x / np.sqrt(np.maximum(np.square(x).mean(axis=1, keepdims=True), 2.0**-66)))
    if c["kind"] == "BatchNormComponent":
        return np.asarray(c["TargetRms"] * (x - c["StatsMean"]) / np.sqrt(c["StatsVar"] + c["Epsilon"]))
    assert c["kind"] == "LogSoftmaxComponent"
    top = x.max(axis=1, keepdims=True)
    return np.asarray(x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True)))


def to_binary(model: Model, text: str) -> bytes:
    """The model as the Write functions of Kaldi write it; `text` gives the lines of nodes."""
    lines = text[len("<Nnet3> \n"):text.index("\n\n")]
    written = [b"\0B<Nnet3> \n", lines.encode(), b"\n\n<NumComponents> ", _integer(len(model.components))]
    for name, component in model.components.items():
        written.append(f"<ComponentName> {name} <{component['kind']}> ".encode())
        for token, value in component.items():
            if token != "kind" and (token, value if isinstance(value, float) else None) not in _UNWRITTEN:
                written += [f"<{token}> ".encode(), _value(token, value)]
        written.append(f"</{component['kind']}> ".encode())
    return b"".join([*written, b"</Nnet3> "])


_UNWRITTEN = {("LearningRateFactor", 1.0), ("MaxChange", 0.0), ("L2Regularize", 0.0)}
_DOUBLES = {"Count", "OderivCount", "NumDimsSelfRepaired", "NumDimsProcessed"}


def _integer(value: int) -> bytes:
    return b"\4" + struct.pack("<i", value)


def _value(token: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"\10" + struct.pack("<d", value) if token in _DOUBLES else b"\4" + struct.pack("<f", value)
    array: Array = value
    sizes = b"".join(map(_integer, array.shape))
    return (b"FM " if array.ndim == 2 else b"FV ") + sizes + array.astype("<f4").tobytes()
