"""nnet3 raw models and vectors in Kaldi's text form (nine digits: exact) and its binary form.

    <Nnet3>
    input-node name=input dim=40
    component-node name=affine1 component=affine1 input=Append(Offset(input, -1), input)
    output-node name=output input=output.log-softmax objective=linear

    <NumComponents> 5
    <ComponentName> affine1 <NaturalGradientAffineComponent> ... </NaturalGradientAffineComponent>
    </Nnet3>

A binary model is "\\0B<Nnet3> ", the same lines, an empty line, and the components. A number is a
byte with its size and 4 or 8 bytes, integer or float by its token; T and F are one byte. Each size
is compared with the remaining bytes before memory is allocated.
"""

from __future__ import annotations

import io
import itertools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.config import OptimizerConfig
from ngsgd.data.kaldi_objects import KaldiFormatError, Source, read_float_object, read_object
from ngsgd.errors import DataError
from ngsgd.models.nnet3.network import AffineParameters, Array, Network
from ngsgd.models.nnet3.structure import EPSILON, Component, finite, network_of

_INTEGERS = ("Dim", "InputDim", "OutputDim", "BlockDim", "RankIn", "RankOut", "UpdatePeriod", "TimePeriod")
# of a component; the largest of Kaldi's has about 20
_MOST_TOKENS = 100


def model_from_bytes(content: bytes) -> Network:
    """Read a raw model, binary or text; raises DataError for a damaged or unsupported one."""
    if not content.startswith(b"\0B"):
        return from_text(_decoded(content, "nnet3 raw model"))
    source = Source(io.BytesIO(content), len(content))
    try:
        head = _head(source)
        components = list(_read_components(source))
    except KaldiFormatError as error:
        raise DataError(f"This binary nnet3 model cannot be read ({error}, near byte {source.position}); copy it again. Or make it "
                        "with: nnet3-copy MODEL.raw final.raw, or from a model with transitions: "
                        "nnet3-am-copy --raw=true MODEL.mdl final.raw") from error
    return network_of(head, components)


def vector_from_bytes(content: bytes) -> Array:
    """Read a vector of finite float32 or float64, binary or text, such as priors."""
    if not content.startswith(b"\0B"):
        return vector_from_text(_decoded(content, "vector"))
    try:
        source = Source(io.BytesIO(content), len(content))
        found = read_object(source)
        if found.ndim != 1 or found.dtype == np.int32 or source.left:
            raise KaldiFormatError("it is not one vector of floats")
        return finite(found)
    except ValueError as error:     # KaldiFormatError is one
        raise DataError(f"This is no vector in Kaldi's binary form ({error}); copy it again.") from error


def _decoded(content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeError as error:
        raise DataError(f"This is not an {what}, binary or text ({error}); check the file.") from error


def _head(source: Source) -> str:
    """Return the lines up to the first empty one, without "<Nnet3>"."""
    source.take(2)
    if (first := source.word(64)) != b"<Nnet3>":
        what = "has transitions" if first == b"<TransitionModel>" else f"begins with {first[:20]!r}"
        raise KaldiFormatError(f"it {what} where <Nnet3> belongs")
    source.expect(b"\n")
    lines = []
    while (line := source.line()).strip():
        lines.append(line.decode(errors="replace"))
    # As in text, where the first line contains <Nnet3> only.
    return "\n" + "".join(lines)


def _read_components(source: Source) -> Iterator[Component]:
    source.expect(b"<NumComponents> ")
    for _ in range(source.int32()):
        source.expect(b"<ComponentName> ")
        where, name = source.position, source.word().decode(errors="replace")
        kind = source.word(64).decode(errors="replace")
        if not re.fullmatch(r"<\w+>", kind):
            raise KaldiFormatError(f"the component {name[:40]} has the kind {kind[:20]!r}")
        values: dict[str, str | npt.NDArray[np.floating]] = {}
        try:
            while (word := source.word(64)) != f"</{kind[1:-1]}>".encode():
                token = word.decode(errors="replace")
                if not re.fullmatch(r"<\w+>", token) or len(values) == _MOST_TOKENS:
                    raise KaldiFormatError(f"{word[:20]!r} is found instead of a token")
                values[token[1:-1]] = _value(source, token[1:-1])
        except KaldiFormatError as error:
            raise KaldiFormatError(f"{error}, in the component {name[:40]}, a {kind[1:-1]}") from error
        yield Component(name, kind[1:-1], values, f"byte {where}")
    source.expect(b"</Nnet3> ")


def _value(source: Source, token: str) -> str | npt.NDArray[np.floating]:
    head = source.peek(2)
    # A token without a value, such as <TestMode> of dropout.
    if head[:1] == b"<":
        return "T"
    if head[:1] in (b"T", b"F") and head[1:] == b"<":
        return source.take(1).decode()
    if head[:1] == b"\4":
        [value] = struct.unpack("<i" if token in _INTEGERS else "<f", source.take(5)[1:])
        # The shortest text of a float, such as 0.001.
        return str(value if token in _INTEGERS else np.float32(value))
    if head[:1] == b"\10":
        return str(struct.unpack("<d", source.take(9)[1:])[0])
    return read_float_object(source, source.word(16))


_IVECTOR = "ReplaceIndex(ivector, t, 0)"  # one for all frames of an example


@dataclass(frozen=True)
class Updates:
    """Settings with which nnet3-train updates an affine component."""

    learning_rate: float  # per frame, of one job, including the factor of the layer
    learning_rate_factor: float
    max_change: float
    l2_regularize: float
    is_natural: bool  # natural gradient; otherwise the settings below have no effect
    rank_in: int  # before limiting it to the size of the layer
    rank_out: int
    update_period: int
    num_samples_history: float
    alpha: float

    @classmethod
    def default(cls) -> Updates:
        """Return the defaults of a run; replace the learning rate by nnet3-copy --learning-rate."""
        o = OptimizerConfig()
        return cls(0.001, 1.0, o.max_change, o.weight_decay, True, o.rank_in, o.rank_out, o.update_period, o.num_samples_history,
                   o.alpha)


def to_text(network: Network, updates: Mapping[str, Updates] | None = None) -> str:
    """Write a raw model with the nodes "input", with i-vectors "ivector", and "output". Affine
    layers that `updates` does not name ("affine1", "output") have the default settings.
    """
    nodes, components = [f"input-node name=input dim={network.feature_dim}"], []
    if network.side_dim:
        nodes.insert(0, f"input-node name=ivector dim={network.side_dim}")
    before = "input"
    for name, offsets, component in _components(network, updates or {}):
        parts = [f"Offset({before}, {offset})" if offset else before for offset in offsets]
        if before == "input" and network.side_dim:
            parts.append(_IVECTOR)
        descriptor = parts[0] if len(parts) == 1 else f"Append({', '.join(parts)})"
        nodes.append(f"component-node name={name} component={name} input={descriptor}")
        components.append(f"<ComponentName> {name} {component}\n")
        before = name
    nodes.append(f"output-node name=output input={before} objective=linear")
    return "".join(["<Nnet3> \n", "\n".join(nodes), f"\n\n<NumComponents> {len(components)} \n", *components, "</Nnet3> "])


def vector_to_text(values: npt.NDArray[np.floating]) -> str:
    """Write a vector as Kaldi does, such as priors."""
    return f" [ {' '.join(_number(value) for value in values)} ]\n"


def _components(network: Network, updates: Mapping[str, Updates]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (name, input frames, text) in order."""
    if network.transform:
        yield "lda", network.transform.offsets, _tagged("FixedAffineComponent", _numbers(network.transform))
    for number, layer in enumerate(network.layers, start=1):
        prefix, suffix = (f"tdnn{number}.", "") if network.is_tdnn else ("", str(number))
        name = f"{prefix}affine{suffix}"
        yield name, layer.affine.offsets, _affine(layer.affine, updates.get(name))
        outputs, dim = len(layer.affine.bias), len(layer.affine.bias) // layer.group
        if layer.nonlinearity == "relu":
            yield f"{prefix}relu{suffix}", (0,), _nonlinear("RectifiedLinearComponent", outputs)
        else:
            yield f"{prefix}pnorm{suffix}", (0,), _tagged("PnormComponent", f"<InputDim> {outputs} <OutputDim> {dim} ")
        if layer.normalize == "renormalize":
            plain = f"<InputDim> {dim} <TargetRms> 1 <AddLogStddev> F "
            yield f"{prefix}renorm{suffix}", (0,), _tagged("NormalizeComponent", plain)
        else:
            # without test mode, so that nnet3-train uses minibatch statistics; nnet3-compute and
            # the decoders set test mode themselves
            yield f"{prefix}batchnorm{suffix}", (0,), _tagged(
                "BatchNormComponent",
                f"<Dim> {dim} <BlockDim> {dim} <Epsilon> {EPSILON:g} <TargetRms> 1 <TestMode> F <Count> {layer.count} "
                f"<StatsMean> {vector_to_text(layer.mean)}<StatsVar> {vector_to_text(layer.variance)}")
    yield "output.affine", (0,), _affine(network.output, updates.get("output"))
    if network.has_softmax:
        yield "output.log-softmax", (0,), _nonlinear("LogSoftmaxComponent", len(network.output.bias))


def _affine(affine: AffineParameters, updates: Updates | None) -> str:
    """Write an affine component; ranks are limited by the rule of Kaldi's configurations."""
    u = updates or Updates.default()
    common = "".join(f"<{token}> {_number(value)} " for token, value, is_default in (
        ("LearningRateFactor", u.learning_rate_factor, u.learning_rate_factor == 1.0),
        ("MaxChange", u.max_change, u.max_change == 0.0), ("L2Regularize", u.l2_regularize, u.l2_regularize == 0.0),
        ("LearningRate", u.learning_rate, False)) if not is_default) + _numbers(affine)
    if not u.is_natural:
        return _tagged("AffineComponent", common)
    rank_in, rank_out = (min(rank, (dim + 1) // 2) for rank, dim in ((u.rank_in, affine.weight.shape[1]),
                                                                    (u.rank_out, affine.weight.shape[0])))
    return _tagged("NaturalGradientAffineComponent",
                   f"{common}<RankIn> {rank_in} <RankOut> {rank_out} <UpdatePeriod> {u.update_period} "
                   f"<NumSamplesHistory> {_number(u.num_samples_history)} <Alpha> {_number(u.alpha)} ")


def _numbers(affine: AffineParameters) -> str:
    rows = "\n  ".join(" ".join(map(_number, row)) for row in affine.weight)
    return f"<LinearParams>  [\n  {rows} ]\n<BiasParams> {vector_to_text(affine.bias)}"


def _nonlinear(kind: str, dim: int) -> str:
    empty = " [ ]\n"
    return _tagged(kind, f"<Dim> {dim} <ValueAvg> {empty}<DerivAvg> {empty}<Count> 0 <OderivRms> {empty}<OderivCount> 0 "
                   "<NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 ")


def _tagged(kind: str, inside: str) -> str:
    return f"<{kind}> {inside}</{kind}> "


def _number(value: np.floating | float) -> str:
    return f"{float(value):.9g}"


def from_text(text: str) -> Network:
    """Read a raw model; raises DataError for unsupported components and descriptors."""
    head, found, body = text.partition("<NumComponents>")
    if not head.strip().startswith("<Nnet3>") or not found or "</Nnet3>" not in body:
        raise DataError("This is not an nnet3 raw model, binary or text; make one with: nnet3-copy MODEL.raw final.raw, "
                        "or from a model with transitions: nnet3-am-copy --raw=true MODEL.mdl final.raw")
    return network_of(head, _parsed(text, len(text) - len(body)))


def vector_from_text(text: str) -> Array:
    """Read a vector of finite numbers in Kaldi's text form."""
    try:
        return finite([text.strip().removeprefix("[").removesuffix("]").split()]).reshape(-1)
    except ValueError as error:
        raise DataError(f"This is not a vector in Kaldi's text form ({error}); an example is [ 0.1 0.2 0.7 ].") from error


def _parsed(text: str, begin: int) -> Iterator[Component]:
    line, counted = 1, 0
    begins = [found.start() for found in re.compile("<ComponentName>").finditer(text, begin)]
    component = re.compile(r"<ComponentName>\s+(\S+)\s+<(\w+)>(.*?)</\2>", re.DOTALL)
    # each one ends before the next one: the rest is not searched for the end of each
    for match in filter(None, (component.match(text, *part) for part in itertools.pairwise([*begins, len(text)]))):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        found = re.finditer(r"<(\w+)>\s*(?:\[([^\[\]]*)\]|([^\s<\[]+))", match[3])
        values = {token: numbers if numbers is not None else word for token, numbers, word in (m.groups() for m in found)}
        yield Component(match[1], match[2], values, f"line {line}")
