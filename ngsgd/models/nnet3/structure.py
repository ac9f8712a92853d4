"""Conversion of nodes and components of an nnet3 raw model to a `Network`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError
from ngsgd.models.nnet3.network import AffineParameters, Array, Layer, Network

EPSILON = 1e-3  # of batch normalization, as in Kaldi
_AFFINE = ("NaturalGradientAffineComponent", "AffineComponent", "FixedAffineComponent")
_DROPOUT = ("DropoutComponent", "GeneralDropoutComponent")  # The identity outside training.
_MOST_NUMBERS = 1 << 27  # Limit for a fixed transform that is repeated for each frame.


def network_of(head: str, components: Iterable[Component]) -> Network:
    """Create a network from nodes and components; DataError for unsupported or unfitting ones."""
    chain, inputs = _chain(head)
    by_name = {component.name: component for component in components}
    if missing := [name for name, *_ in chain if name not in by_name]:
        raise DataError(f"The component {missing[0]} is used in the nnet3 model, but missing in "
                        "the file; check that the file is complete.")
    parts = [_Part(by_name[name], offsets, has_ivector) for name, offsets, has_ivector in chain]
    for part in parts:
        if part.component.kind in _DROPOUT and (part.offsets != (0,) or part.has_ivector):
            raise DataError(f"{part.component} is dropout of spliced frames; only dropout between two layers is supported.")
    parts = [part for part in parts if part.component.kind not in _DROPOUT]
    if not parts:
        raise DataError("The nnet3 model has no affine component.")
    taking = [at for at, part in enumerate(parts) if part.has_ivector]
    expected = [[0], [1]] if parts[0].is_of_one_frame else [[0]]
    if taking not in (expected if "ivector" in inputs else [[]]):
        raise DataError(f"The nnet3 model has the inputs {', '.join(inputs)} and uses an i-vector "
                        f"at {', '.join(parts[at].component.name for at in taking) or 'no node'}; "
                        "models here use one, if they have that input, after the frames of their "
                        f"first node, {parts[0].component.name}.")
    return _assembled(inputs["input"], inputs.get("ivector", 0), parts)


@dataclass(frozen=True)
class Component:
    """A component as in the file."""

    name: str
    kind: str
    # by token: an array, its text between brackets, or a single word
    values: Mapping[str, str | npt.NDArray[np.floating]]
    where: str = ""  # place in the file, such as "line 12"

    def __str__(self) -> str:
        return f"The component {self.name} of the nnet3 model ({self.where})"

    def array(self, token: str) -> Array:
        try:
            found = self.values[token]
            return finite([row.split() for row in found.strip("\n").split("\n")] if isinstance(found, str) else found)
        except (KeyError, ValueError) as error:
            raise DataError(f"{self} has no valid <{token}> ({error}); check the file, or export the model again.") from error

    def number(self, token: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a single number within limits."""
        text = self.word(token, str(default))
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and low <= found <= high):
            raise DataError(f"{self} has <{token}> {text[:40]}, which is not a plausible number; check the file, or export the "
                            "model again.")
        return found

    def word(self, token: str, default: str) -> str:
        found = self.values.get(token, default)
        return found if isinstance(found, str) else "an array"


def finite(rows: list[list[str]] | npt.NDArray[np.floating]) -> Array:
    """Return a float32 array; raises ValueError for numbers without a finite float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.array(rows, np.float64).astype(np.float32)
    if not np.isfinite(found).all():
        at = tuple(np.argwhere(~np.isfinite(found))[0].tolist())
        value = rows[at[0]][at[1]] if isinstance(rows, list) else rows[at]
        raise ValueError(f"{str(value)[:20]} in row {at[0] + 1 if len(at) == 2 else 1} is not a finite number")
    return found


def _chain(head: str) -> tuple[list[tuple[str, tuple[int, ...], bool]], dict[str, int]]:
    """Return (component, offsets, has_ivector) of each node in order, and the sizes of inputs."""
    lines, inputs = [], {}
    for number, text in enumerate(head.replace("<Nnet3>", "       ").splitlines(), start=1):
        if not text.strip():
            continue
        # the fields of a line by name; its first word has the name ""
        line = dict(re.findall(r"(?<![a-z-])([a-z-]+)=((?:[^=\s]|\s(?![a-z-]+=))+)", text))
        line[""] = text.split(maxsplit=1)[0]
        if missing := [name for name in _FIELDS.get(line[""], ()) if name not in line]:
            raise DataError(f"Line {number} of the nnet3 model, {text.strip()[:40]!r}, has no "
                            f"{missing[0]}; export the model again.")
        if line[""] == "input-node":
            dim = line["dim"].strip()
            if not re.fullmatch(r"[0-9]{1,6}", dim) or int(dim) == 0:
                raise DataError(
                    f"Line {number} of the nnet3 model gives the input {line['name']} the dim "
                    f"{dim[:40]}, which is not a number from 1 to 999999; export the model again.")
            inputs[line["name"]] = int(dim)
        lines.append(line)
    outputs = {line["name"]: line["input"].strip() for line in lines if line[""] == "output-node"}
    if inputs.keys() - {"ivector"} != {"input"}:
        raise DataError(f"The nnet3 model has the inputs {', '.join(inputs)}; models here have one named input, and may have one "
                        "named ivector.")
    if "output" not in outputs:
        raise DataError("The nnet3 model has no output node named output.")
    nodes = {}
    for line in lines:
        if line[""] == "component-node":
            # an i-vector after the frames is a flag
            written = line["input"].strip()
            rest = re.sub(r",\s*ReplaceIndex\(\s*ivector\s*,\s*t\s*,\s*0\s*\)\s*\)$", ")", written)
            before, offsets = _spliced(rest)
            nodes[line["name"]] = before, (line["component"], offsets, rest != written)
        elif line[""] not in ("input-node", "output-node"):
            raise DataError(f"The nnet3 model has a {line['']}, which is not supported.")
    chain: list[tuple[str, tuple[int, ...], bool]] = []
    name, _ = _spliced(outputs["output"])
    while name != "input":
        if name not in nodes or len(chain) > len(nodes):
            raise DataError(f"The node {name} of the nnet3 model is missing, or part of a cycle.")
        name, part = nodes[name]
        chain.insert(0, part)
    return chain, inputs


_FIELDS = {"input-node": ("name", "dim"), "output-node": ("name", "input"), "component-node": ("name", "component", "input")}


def _spliced(descriptor: str) -> tuple[str, tuple[int, ...]]:
    """Return (node, offsets) of a descriptor such as Append(Offset(input, -1), input)."""
    inside = re.fullmatch(r"Append\((.*)\)", descriptor)
    text, commas, depth = inside[1] if inside else descriptor, [-1], 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            commas.append(place)
    parts = [text[first + 1:last] for first, last in itertools.pairwise([*commas, len(text)])]
    found = [re.fullmatch(r"Offset\(\s*([\w.-]+)\s*,\s*(-?\d{1,4})\s*\)|([\w.-]+)", part.strip()) for part in parts]
    names = {match[1] or match[3] for match in found if match}
    if not all(found) or len(names) != 1:
        raise DataError(f"The descriptor {descriptor:.200} of the nnet3 model is not supported; use "
                        "only Append and Offset of one node.")
    offsets = tuple(int(match[2] or 0) for match in found if match)
    if list(offsets) != sorted(set(offsets)):
        raise DataError(f"The descriptor {descriptor:.200} of the nnet3 model has offsets that are not "
                        "ascending; only ascending ones are supported.")
    return names.pop(), offsets


@dataclass(frozen=True)
class _Part:
    component: Component
    offsets: tuple[int, ...]  # of its input
    has_ivector: bool

    @property
    def is_of_one_frame(self) -> bool:
        """Whether it is a fixed affine transform of single frames, such as an idct-layer."""
        return self.component.kind == "FixedAffineComponent" and self.offsets == (0,) and not self.has_ivector


def _assembled(feature_dim: int, side_dim: int, parts: list[_Part]) -> Network:
    names = [part.component.name for part in parts]
    has_softmax = parts[-1].component.kind == "LogSoftmaxComponent"
    rest = parts[:-1] if has_softmax else parts
    transform, rest = _transform(rest, side_dim)
    if len(rest) % 3 != 1 or not rest:
        raise DataError(f"The nnet3 model is the chain {' '.join(names)}; models here are affine, "
                        "nonlinearity and normalization layer by layer, and an affine output.")
    layers = tuple(_read_layer(rest[at], rest[at + 1].component, rest[at + 2].component) for at in range(0, len(rest) - 1, 3))
    if not layers:
        raise DataError("The nnet3 model has no hidden layer.")
    return Network(feature_dim, layers, _read_affine(rest[-1]), rest[0].component.name.startswith("tdnn"), transform, has_softmax,
                   side_dim)


def _transform(parts: list[_Part], side_dim: int) -> tuple[AffineParameters | None, list[_Part]]:
    if not parts or parts[0].component.kind != "FixedAffineComponent":
        return None, parts
    first, rest = _read_affine(parts[0]), parts[1:]
    if not (parts[0].is_of_one_frame and rest and (rest[0].offsets != (0,) or rest[0].has_ivector)):
        return first, rest
    # of single frames before splicing (idct-layer): a block for each spliced frame; a second one
    # (LDA) is multiplied with it, and the first remaining part has one frame as input
    blocks = _repeated(first, rest[0], side_dim if rest[0].has_ivector else 0)
    if rest[0].component.kind != "FixedAffineComponent":
        return blocks, [replace(rest[0], offsets=(0,), has_ivector=False), *rest[1:]]
    second = _read_affine(rest[0])
    weight = second.weight.astype(np.float64)
    product = (weight @ blocks.weight).astype(np.float32)
    bias = (weight @ blocks.bias + second.bias).astype(np.float32)
    return AffineParameters(product, bias, blocks.offsets), rest[1:]


def _repeated(of_frame: AffineParameters, splice: _Part, side_dim: int) -> AffineParameters:
    """Repeat the transform for each frame of `splice`; an i-vector after them is unchanged."""
    num, (rows, columns) = len(splice.offsets), of_frame.weight.shape
    inputs = _read_affine(splice).weight.shape[1]
    if num * rows + side_dim != inputs:
        raise DataError(f"The layers of this nnet3 model do not fit together: {splice.component} "
                        f"has {inputs} inputs, and {num * rows + side_dim} come from before; check that it is complete.")
    if inputs * (num * columns + side_dim) > _MOST_NUMBERS:
        raise DataError(f"{splice.component} splices {num} frames of a fixed transform of {rows} x "
                        f"{columns}, which is too large to be repeated for each; apply the "
                        "transform to the features instead.")
    weight = np.zeros((inputs, num * columns + side_dim), np.float32)
    for at in range(num):
        weight[at * rows:(at + 1) * rows, at * columns:(at + 1) * columns] = of_frame.weight
    weight[num * rows:, num * columns:] = np.eye(side_dim)
    bias = np.concatenate([*[of_frame.bias] * num, np.zeros(side_dim, np.float32)])
    return AffineParameters(weight, bias, splice.offsets)


def _read_affine(part: _Part) -> AffineParameters:
    component = part.component
    if component.kind not in _AFFINE:
        raise DataError(f"{component} is a {component.kind}; an affine component is expected.")
    affine = AffineParameters(component.array("LinearParams"), component.array("BiasParams").reshape(-1), part.offsets)
    if affine.weight.ndim != 2 or not affine.weight.size or len(affine.weight) != len(affine.bias):
        raise DataError(f"{component} has {len(affine.weight)} rows of <LinearParams> and {len(affine.bias)} <BiasParams>; check "
                        "that the file is complete.")
    return affine


def _read_layer(affine: _Part, nonlinearity: Component, norm: Component) -> Layer:
    read = _read_affine(affine)
    if nonlinearity.kind not in ("RectifiedLinearComponent", "PnormComponent"):
        raise DataError(f"{nonlinearity} is a {nonlinearity.kind}; only ReLU and p-norm are supported.")
    is_pnorm = nonlinearity.kind == "PnormComponent"
    outputs = nonlinearity.number("OutputDim", 1, 1, len(read.bias)) if is_pnorm else len(read.bias)
    if len(read.bias) % outputs:
        raise DataError(f"{nonlinearity} has <OutputDim> {outputs:g}, which does not divide its {len(read.bias)} inputs; export "
                        "the model again.")
    group = len(read.bias) // int(outputs)
    layer = Layer(read, "pnorm" if is_pnorm else "relu", group, "renormalize")
    if norm.number("TargetRms", 1) != 1.0 or norm.word("AddLogStddev", "F") != "F":
        raise DataError(f"{norm} has another target-rms than 1, or adds the log of the standard "
                        "deviation; neither is supported.")
    if norm.kind == "NormalizeComponent":
        return layer
    if norm.kind != "BatchNormComponent":
        raise DataError(f"{norm} is a {norm.kind}; a normalization is expected.")
    if norm.number("Epsilon", EPSILON) != EPSILON or norm.word("BlockDim", norm.word("Dim", "")) != norm.word("Dim", ""):
        raise DataError(f"{norm} has another epsilon than 0.001, or blocks; neither is supported.")
    mean, variance = (norm.array(token).reshape(-1) for token in ("StatsMean", "StatsVar"))
    if variance.min(initial=0.0) < 0.0 or not len(mean) == len(variance) == len(read.bias) // group:
        raise DataError(f"{norm} has {len(mean)} means and {len(variance)} variances, from {variance.min(initial=0.0):g} on, for "
                        f"{len(read.bias) // group} inputs; check that the file is complete.")
    return replace(layer, normalize="batchnorm", mean=mean, variance=variance, count=round(norm.number("Count", 0, 0, 2.0**53)))
