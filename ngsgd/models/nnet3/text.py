"""nnet3 raw models in Kaldi's text form: lines that say how components are joined, then the components with their numbers.

    <Nnet3>
    input-node name=ivector dim=100
    input-node name=input dim=40
    component-node name=affine1 component=affine1 input=Append(Offset(input, -1), input, ReplaceIndex(ivector, t, 0))
    ...
    output-node name=output input=output.log-softmax objective=linear

    <NumComponents> 5
    <ComponentName> affine1 <NaturalGradientAffineComponent> ... </NaturalGradientAffineComponent>
    ...
    </Nnet3>

Numbers are written with nine digits, so that float32 comes back bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.config import OptimizerConfig
from ngsgd.errors import DataError
from ngsgd.models.nnet3.network import Affine, Array, Layer, Network

_AFFINE = ("NaturalGradientAffineComponent", "AffineComponent", "FixedAffineComponent")
_IVECTOR = "ReplaceIndex(ivector, t, 0)"   # one for all frames of an example
_EPSILON = 1e-3   # of batch normalisation, here as in Kaldi


# Writing --------------------------------------------------------------------------------------------------------------


def to_text(network: Network) -> str:
    """The whole model; its input nodes are "input" and, where it has i-vectors, "ivector"; its output node is "output"."""
    nodes, components = [f"input-node name=input dim={network.feature_dim}"], []
    if network.side_dim:
        nodes.insert(0, f"input-node name=ivector dim={network.side_dim}")
    before = "input"
    for name, offsets, component in _components(network):
        nodes.append(f"component-node name={name} component={name} input="
                     f"{_descriptor(before, offsets, has_ivector=before == 'input' and network.side_dim > 0)}")
        components.append(f"<ComponentName> {name} {component}\n")
        before = name
    nodes.append(f"output-node name=output input={before} objective=linear")
    return "".join(["<Nnet3> \n", "\n".join(nodes), f"\n\n<NumComponents> {len(components)} \n", *components, "</Nnet3> "])


def vector_to_text(values: npt.NDArray[np.floating]) -> str:
    """As Kaldi writes vectors, such as priors."""
    return f" [ {' '.join(_number(value) for value in values)} ]\n"


def _components(network: Network) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, frames that it sees, text) in order."""
    if network.transform:
        yield "lda", network.transform.offsets, _tagged("FixedAffineComponent", _numbers(network.transform))
    for number, layer in enumerate(network.layers, start=1):
        prefix = f"tdnn{number}." if network.is_tdnn else ""
        suffix = "" if network.is_tdnn else str(number)
        yield f"{prefix}affine{suffix}", layer.affine.offsets, _affine(layer.affine)
        outputs, dim = len(layer.affine.bias), len(layer.affine.bias) // layer.group
        if layer.nonlinearity == "relu":
            yield f"{prefix}relu{suffix}", (0,), _nonlinear("RectifiedLinearComponent", outputs)
        else:
            yield f"{prefix}pnorm{suffix}", (0,), _tagged("PnormComponent", f"<InputDim> {outputs} <OutputDim> {dim} ")
        if layer.normalize == "renormalize":
            yield f"{prefix}renorm{suffix}", (0,), _tagged("NormalizeComponent",
                                                           f"<InputDim> {dim} <TargetRms> 1 <AddLogStddev> F ")
        else:
            yield f"{prefix}batchnorm{suffix}", (0,), _batchnorm(layer, dim)
    yield "output.affine", (0,), _affine(network.output)
    if network.has_softmax:
        yield "output.log-softmax", (0,), _nonlinear("LogSoftmaxComponent", len(network.output.bias))


def _affine(affine: Affine) -> str:
    o = OptimizerConfig()
    settings = (f"<RankIn> {o.rank_in} <RankOut> {o.rank_out} <UpdatePeriod> {o.update_period} "
                f"<NumSamplesHistory> {o.num_samples_history:g} <Alpha> {o.alpha:g} ")
    return _tagged("NaturalGradientAffineComponent",
                   f"<MaxChange> {o.max_change:g} <LearningRate> 0.001 {_numbers(affine)}{settings}")


def _numbers(affine: Affine) -> str:
    rows = "\n  ".join(" ".join(map(_number, row)) for row in affine.weight)
    return f"<LinearParams>  [\n  {rows} ]\n<BiasParams> {vector_to_text(affine.bias)}"


def _nonlinear(kind: str, dim: int) -> str:
    """With empty statistics."""
    empty = " [ ]\n"
    return _tagged(kind, f"<Dim> {dim} <ValueAvg> {empty}<DerivAvg> {empty}<Count> 0 <OderivRms> {empty}<OderivCount> 0 "
                   "<NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 ")


def _batchnorm(layer: Layer, dim: int) -> str:
    return _tagged("BatchNormComponent",
                   f"<Dim> {dim} <BlockDim> {dim} <Epsilon> {_EPSILON:g} <TargetRms> 1 <TestMode> T <Count> {layer.count} "
                   f"<StatsMean> {vector_to_text(layer.mean)}<StatsVar> {vector_to_text(layer.variance)}")


def _tagged(kind: str, inside: str) -> str:
    return f"<{kind}> {inside}</{kind}> "


def _descriptor(name: str, offsets: tuple[int, ...], *, has_ivector: bool) -> str:
    parts = [f"Offset({name}, {offset})" if offset else name for offset in offsets] + ([_IVECTOR] if has_ivector else [])
    return parts[0] if len(parts) == 1 else f"Append({', '.join(parts)})"


def _number(value: np.floating | float) -> str:
    return f"{float(value):.9g}"


# Reading --------------------------------------------------------------------------------------------------------------


def from_text(text: str) -> Network:
    """The network of a raw model; raises DataError for components and descriptors that have no counterpart here."""
    head, found, body = text.partition("<NumComponents>")
    if not head.strip().startswith("<Nnet3>") or not found or "</Nnet3>" not in body:
        raise DataError("This is not an nnet3 raw model in text form; make one with: nnet3-copy --binary=false MODEL.raw -, "
                        "or from a model with transitions: nnet3-am-copy --raw=true --binary=false MODEL.mdl -")
    chain, inputs = _chain(head)
    components = {component.name: component for component in _parsed(text, len(text) - len(body))}
    if missing := [node.component for node in chain if node.component not in components]:
        raise DataError(f"The component {missing[0]} is named in the nnet3 model, but is not in it; check that the file is whole.")
    network = _assembled(inputs["input"], [(components[node.component], node.offsets) for node in chain])
    return replace(network, side_dim=inputs.get("ivector", 0))


def vector_from_text(text: str) -> Array:
    """A vector as Kaldi writes it in text form; its numbers are finite."""
    try:
        return _finite([text.strip().removeprefix("[").removesuffix("]").split()]).reshape(-1)
    except ValueError as error:
        raise DataError(f"This is no vector in Kaldi's text form ({error}); it looks like [ 0.1 0.2 0.7 ].") from error


@dataclass(frozen=True)
class _Node:
    name: str
    component: str
    before: str
    offsets: tuple[int, ...]
    has_ivector: bool = False


@dataclass(frozen=True)
class _Component:
    name: str
    kind: str
    values: dict[str, str]     # numbers between brackets, or a single word, by token
    line: int = 0              # of the file, from 1

    def __str__(self) -> str:
        return f"The component {self.name} of the nnet3 model (line {self.line})"

    def array(self, token: str) -> Array:
        try:
            return _finite([row.split() for row in self.values[token].strip("\n").split("\n")])
        except (KeyError, ValueError) as error:
            raise DataError(f"{self} has no sound <{token}> ({error}); check the file, or export the model again.") from error

    def number(self, token: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        """A single number within limits."""
        text = self.values.get(token, str(default))
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and low <= found <= high):
            raise DataError(f"{self} has <{token}> {text[:40]}, which is not a plausible number; check the file, or export the "
                            "model again.")
        return found

    def vector(self, token: str) -> Array:
        return self.array(token).reshape(-1)

    def word(self, token: str, default: str) -> str:
        return self.values.get(token, default)


def _finite(rows: list[list[str]]) -> Array:
    """A float32 matrix; raises ValueError for what float32 has no finite number for."""
    with np.errstate(over="ignore"):
        found = np.array(rows, np.float64).astype(np.float32)
    if not np.isfinite(found).all():
        bad = np.argwhere(~np.isfinite(found))[0]
        raise ValueError(f"{rows[bad[0]][bad[1]][:20]} in row {bad[0] + 1} is not a finite number")
    return found


def _chain(head: str) -> tuple[list[_Node], dict[str, int]]:
    """The component nodes from input to output, and the sizes of the inputs."""
    lines = [_config_line(line, number) for number, line in enumerate(head.replace("<Nnet3>", "       ").splitlines(), start=1)
             if line.strip()]
    inputs = {line["name"]: _dim(line) for line in lines if line[""] == "input-node"}
    outputs = {line["name"]: line["input"].strip() for line in lines if line[""] == "output-node"}
    if inputs.keys() - {"ivector"} != {"input"}:
        raise DataError(f"The nnet3 model has the inputs {', '.join(inputs)}; models here have one named input, and may have one "
                        "named ivector.")
    if "output" not in outputs:
        raise DataError("The nnet3 model has no output node named output.")
    nodes = {}
    for line in lines:
        if line[""] == "component-node":
            nodes[line["name"]] = _node(line["name"], line["component"], line["input"].strip())
        elif line[""] not in ("input-node", "output-node"):
            raise DataError(f"The nnet3 model has a {line['']}, which has no counterpart here.")
    chain: list[_Node] = []
    name, _ = _spliced(outputs["output"])
    while name != "input":
        if name not in nodes or len(chain) > len(nodes):
            raise DataError(f"The node {name} of the nnet3 model is not there, or leads round in a circle.")
        chain.insert(0, nodes[name])
        name = nodes[name].before
    _check_ivector(chain, inputs)
    return chain, inputs


_FIELDS = {"input-node": ("name", "dim"), "output-node": ("name", "input"), "component-node": ("name", "component", "input")}


def _config_line(line: str, number: int) -> dict[str, str]:
    """The fields of a line by name; its first word has the name ""."""
    found = dict(re.findall(r"([a-z-]+)=((?:[^=\s]|\s(?![a-z-]+=))+)", line)) | {"": line.split(maxsplit=1)[0], "line": str(number)}
    if missing := [name for name in _FIELDS.get(found[""], ()) if name not in found]:
        raise DataError(f"Line {number} of the nnet3 model, {line.strip()[:40]!r}, has no {missing[0]}; export the model again.")
    return found


def _dim(line: dict[str, str]) -> int:
    text = line["dim"].strip()
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise DataError(f"Line {line['line']} of the nnet3 model gives the input {line['name']} the dim {text[:40]}, which is not "
                        "a number from 1 to 999999; export the model again.")
    return int(text)


def _node(name: str, component: str, descriptor: str) -> _Node:
    """An i-vector behind the frames is told apart."""
    rest = re.sub(r",\s*ReplaceIndex\(\s*ivector\s*,\s*t\s*,\s*0\s*\)\s*\)$", ")", descriptor)
    return _Node(name, component, *_spliced(rest), has_ivector=rest != descriptor)


def _check_ivector(chain: list[_Node], inputs: dict[str, int]) -> None:
    taking = [node.name for node in chain if node.has_ivector]
    if taking != [node.name for node in chain[:1] if "ivector" in inputs]:
        raise DataError(f"The nnet3 model has the inputs {', '.join(inputs)} and takes an i-vector at "
                        f"{', '.join(taking) or 'no node'}; models here take one, if they have that input, behind the frames of "
                        f"their first node, {chain[0].name}.")


def _spliced(descriptor: str) -> tuple[str, tuple[int, ...]]:
    """(node, offsets) of a descriptor such as Append(Offset(input, -1), input)."""
    inside = re.fullmatch(r"Append\((.*)\)", descriptor)
    parts = re.split(r",\s*(?![^(]*\))", inside[1] if inside else descriptor)
    found = [re.fullmatch(r"Offset\(\s*([\w.-]+)\s*,\s*(-?\d{1,4})\s*\)|([\w.-]+)", part.strip()) for part in parts]
    names = {match[1] or match[3] for match in found if match}
    if not all(found) or len(names) != 1:
        raise DataError(f"The descriptor {descriptor} of the nnet3 model has no counterpart here: only Append and Offset of one "
                        "node can be read.")
    offsets = tuple(int(match[2] or 0) for match in found if match)
    if list(offsets) != sorted(set(offsets)):
        raise DataError(f"The descriptor {descriptor} of the nnet3 model has offsets that do not rise; only rising ones can be "
                        "read.")
    return names.pop(), offsets


def _parsed(text: str, begin: int) -> Iterator[_Component]:
    """The components from position `begin` on."""
    line, counted = 1, 0
    for match in re.compile(r"<ComponentName>\s+(\S+)\s+<(\w+)>(.*?)</\2>", re.DOTALL).finditer(text, begin):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        values = {token: numbers if numbers is not None else word
                  for token, numbers, word in ((m[1], m[2], m[3]) for m in
                                               re.finditer(r"<(\w+)>\s*(?:\[([^\]]*)\]|([^\s<\[]+))", match[3]))}
        yield _Component(match[1], match[2], values, line)


def _assembled(feature_dim: int, parts: list[tuple[_Component, tuple[int, ...]]]) -> Network:
    """The layers of a chain of components."""
    names = [component.name for component, _ in parts]
    has_softmax = parts[-1][0].kind == "LogSoftmaxComponent"
    rest = parts[:-1] if has_softmax else parts
    transform = None
    if rest and rest[0][0].kind == "FixedAffineComponent":
        transform = _read_affine(*rest[0])
        rest = rest[1:]
    if len(rest) % 3 != 1 or not rest:
        raise DataError(f"The nnet3 model is the chain {' '.join(names)}; models here are affine, nonlinearity and normalisation "
                        "layer by layer, and an affine output.")
    layers = tuple(_read_layer(rest[at], rest[at + 1][0], rest[at + 2][0]) for at in range(0, len(rest) - 1, 3))
    if not layers:
        raise DataError("The nnet3 model has no hidden layer.")
    return Network(feature_dim, layers, _read_affine(*rest[-1]), names[1 if transform else 0].startswith("tdnn"), transform,
                   has_softmax)


def _read_affine(component: _Component, offsets: tuple[int, ...]) -> Affine:
    if component.kind not in _AFFINE:
        raise DataError(f"{component} is a {component.kind} where an affine one belongs.")
    affine = Affine(component.array("LinearParams"), component.vector("BiasParams"), offsets)
    if not affine.weight.size or len(affine.weight) != len(affine.bias):
        raise DataError(f"{component} has {len(affine.weight)} rows of <LinearParams> and {len(affine.bias)} <BiasParams>; check "
                        "that the file is complete.")
    return affine


def _read_layer(affine: tuple[_Component, tuple[int, ...]], nonlinearity: _Component, norm: _Component) -> Layer:
    read = _read_affine(*affine)
    if nonlinearity.kind not in ("RectifiedLinearComponent", "PnormComponent"):
        raise DataError(f"{nonlinearity} is a {nonlinearity.kind}; ReLU and p-norm can be read.")
    is_pnorm = nonlinearity.kind == "PnormComponent"
    outputs = nonlinearity.number("OutputDim", 1, 1, len(read.bias)) if is_pnorm else len(read.bias)
    if len(read.bias) % outputs:
        raise DataError(f"{nonlinearity} has <OutputDim> {outputs:g}, which does not divide its {len(read.bias)} inputs; export "
                        "the model again.")
    group = len(read.bias) // int(outputs)
    layer = Layer(read, "pnorm" if is_pnorm else "relu", group, "renormalize")
    if norm.number("TargetRms", 1) != 1.0 or norm.word("AddLogStddev", "F") != "F":
        raise DataError(f"{norm} has another target-rms than 1, or adds the log of the "
                        "standard deviation; neither can be read.")
    if norm.kind == "NormalizeComponent":
        return layer
    if norm.kind != "BatchNormComponent":
        raise DataError(f"{norm} is a {norm.kind} where a normalisation belongs.")
    if norm.number("Epsilon", _EPSILON) != _EPSILON or norm.word("BlockDim", norm.word("Dim", "")) != norm.word("Dim", ""):
        raise DataError(f"{norm} has another epsilon than 0.001, or blocks; neither "
                        "can be read.")
    mean, variance = norm.vector("StatsMean"), norm.vector("StatsVar")
    if variance.min(initial=0.0) < 0.0 or not len(mean) == len(variance) == len(read.bias) // group:
        raise DataError(f"{norm} has {len(mean)} means and {len(variance)} variances, from {variance.min(initial=0.0):g} on, for "
                        f"{len(read.bias) // group} inputs; check that the file is complete.")
    return replace(layer, normalize="batchnorm", mean=mean, variance=variance, count=round(norm.number("Count", 0, 0, 2.0**53)))
