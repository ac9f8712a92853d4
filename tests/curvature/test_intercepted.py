"""Models in which rows are not samples, or not all uses: as a loop over samples, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from ngsgd.curvature import collect, samples
from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.preconditioners import KFAC, DiagonalNG
from tests.curvature.support import close
from tests.reference.curvature import ggn, gradients
from tests.wired import Wired

F = nn.functional
N, T, D, H, C = 6, 5, 4, 5, 3
# Its layers are `first`, `second` and `out`.
Step = Callable[[Any, Tensor], Tensor]
_loss = F.cross_entropy


class Situation(NamedTuple):
    """A model, its input, and the dimension of the samples in the input."""

    model: Any
    x: Tensor
    dim: int = 0


def _made(step: Step, *shape: int, dim: int = 0,
          changed: Callable[[Any], Any] = lambda model: None) -> Callable[[], Situation]:
    def make() -> Situation:
        torch.manual_seed(0)
        model = Wired(step, first=nn.Linear(D, H), second=nn.Linear(H, H),
                      out=nn.Linear(H, C)).double()
        x = torch.randn(*(shape or (N, D))).double()
        changed(model)
        return Situation(model, x, dim)
    return make


def _plain(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.out(torch.tanh(model.second(torch.tanh(model.first(x)))))
    return y


def _between(change: Callable[[Tensor], Tensor]) -> Step:
    """A change of the hidden rows."""
    return lambda m, x: m.out(torch.tanh(m.second(change(torch.tanh(m.first(x))))))


PERM, SWAP = torch.tensor([3, 0, 5, 1, 2, 4]), torch.tensor([1, 0, 2, 3, 4, 5])


def _rows_of(order: Tensor) -> Callable[[Tensor], Tensor]:
    # A loop over samples has one row.
    return lambda h: h[order] if len(h) == N else h


def _recurrent(kind: str, *, pooled: bool = True, length: int = T) -> Callable[[], Situation]:
    """Time first throughout, as torch's default."""
    def run(model: Any, x_TND: Tensor) -> Any:
        h = model.inner(x_TND)
        h = (model.core(h, h, h) if kind == "attention" else model.core(h))[0]
        return model.out(h.mean(0)) if pooled else model.out(h).movedim(0, 2)

    def make() -> Situation:
        torch.manual_seed(0)
        inner, out = nn.Linear(D, H), nn.Linear(H, C)
        core = nn.MultiheadAttention(H, 1) if kind == "attention" else getattr(nn, kind)(H, H)
        return Situation(Wired(run, inner=inner, out=out, core=core).double(),
                         torch.randn(length, N, D).double(), 1)
    return make


class OwnConv(nn.Conv1d):
    """Standardized weights, by a method that is not `forward`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = super()._conv_forward(x, weight - weight.mean(dim=1, keepdim=True), bias)
        return y


def _own_convolution() -> Situation:
    torch.manual_seed(0)
    model = nn.Sequential(OwnConv(D, H, 3), nn.Tanh(), nn.Flatten(), nn.Linear(H * 3, C))
    return Situation(model.double(), torch.randn(N, D, T).double())


def _of_a_token() -> Situation:
    """An embedding that is also the output layer, by hand."""
    torch.manual_seed(0)
    model = Wired(lambda m, index: F.linear(torch.tanh(m.inner(m.emb(index))), m.emb.weight),
                  emb=nn.Embedding(C, H), inner=nn.Linear(H, H))
    return Situation(model.double(), torch.arange(N) % C)


def _patch(model: Any) -> None:
    layer = model.second
    layer.forward = lambda x: F.linear(x, 2.0 * layer.weight, layer.bias)


def _tie(model: Any) -> None:
    model.out = nn.Linear(H, H).double()
    model.out.weight = model.second.weight


def _normalized_gradient(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm())
    return h


def _second_use(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    y: Tensor = m.out(torch.tanh(m.second(h)) + F.linear(h, m.second.weight))
    return y


def _by_hand(m: Any, x: Tensor) -> Tensor:
    """The weight of a module that is never called."""
    y: Tensor = m.out(torch.tanh(F.linear(torch.tanh(m.first(x)), m.second.weight / m.second.weight.norm(), m.second.bias)))
    return y


def _without_a_gradient(m: Any, x: Tensor) -> Tensor:
    """A first call that has no derivative."""
    h = torch.tanh(m.first(x))
    with torch.no_grad():
        m.second(h)
    y: Tensor = m.out(torch.tanh(m.second(h)) + m.second(h).detach())
    return y


def _flattened(m: Any, x: Tensor) -> Any:
    return m.out(torch.tanh(m.first(x)).flatten(0, 1)).unflatten(0, (-1, T)).mean(1)


def _views(m: Any, x: Tensor) -> Any:
    h = m.second(torch.cat([m.first(x), m.first(-x)])).tanh()
    return m.out(torch.cat(h.chunk(2), 1)[:, :H])


def _over_samples(m: Any, x: Tensor) -> Any:
    if len(x) == 1:
        return m.out(torch.tanh(m.first(x)))
    return _plain(m, x) + (m.second(m.first(x)).T @ x[:, :1]).T[:, :C]


# right or refused: (situation, whether it must be right)
SITUATIONS: dict[str, tuple[Callable[[], Situation], bool | None]] = {
    "plain": (_made(_plain), True),
    "frames": (_made(lambda m, x: _plain(m, x).mean(1), N, T, D), True),
    "in place on frames": (_made(lambda m, x: m.out(F.relu_(m.second(m.first(x).tanh_()))).mean(1), N, T, D), True),
    "output in place": (_made(lambda m, x: _plain(m, x).mul_(2.0)), True),
    "a layer twice": (_made(lambda m, x: m.out(torch.tanh(m.second(m.second(m.first(x)))))), True),
    "tied layers": (_made(lambda m, x: m.out(torch.tanh(m.second(torch.tanh(m.first(x)))))[:, :C], changed=_tie), True),
    "checkpointed": (_made(lambda m, x: checkpoint(_plain, m, x, use_reentrant=False)), True),
    "a call without gradient": (_made(_without_a_gradient), True),
    "frames as samples in between": (_made(_flattened, N, T, D), None),
    "pairs of views": (_made(_views), None),
    "repeated": (_made(_between(lambda h: h.repeat(2, 1).unflatten(0, (2, -1)).mean(0))), None),
    "repeated rows": (_made(lambda m, x: _plain(m, x.repeat(2, 1)).unflatten(0, (2, -1)).mean(0)), None),
    "interleaved rows": (_made(lambda m, x: _plain(m, x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).mean(1)), None),
    "shuffled": (_made(_between(_rows_of(PERM))), False),
    "two samples swapped": (_made(_between(_rows_of(SWAP))), False),
    "shuffled and back": (_made(_between(lambda h: _rows_of(PERM.argsort())(_rows_of(PERM)(h) * 2.0))), True),
    "swapped input, swapped back at the end": (_made(lambda m, x: _rows_of(SWAP)(_plain(m, _rows_of(SWAP)(x)))), False),
    "shuffled output": (_made(lambda m, x: _rows_of(SWAP)(_plain(m, x))), False),
    "rolled": (_made(_between(lambda h: h.roll(1, 0))), False),
    "flipped": (_made(_between(lambda h: h.flip(0))), False),
    "sorted": (_made(_between(lambda h: h.sort(dim=0).values)), False),
    "summed up": (_made(_between(lambda h: h.cumsum(0))), False),
    "centered": (_made(_between(lambda h: h - h.mean(0))), False),
    "softmax over samples": (_made(_between(lambda h: h.softmax(0))), False),
    "attention over samples": (_made(_between(lambda h: (h @ h.T).softmax(1) @ h)), False),
    "layer over samples": (_made(_over_samples), False),
    "normalized gradient": (_made(_between(_normalized_gradient)), False),
    "statistics of the output": (_made(lambda m, x: F.layer_norm(_plain(m, x).T, (len(x),)).T), False),
    "time first, pooled": (_made(lambda m, x: _plain(m, x).mean(0), T, N, D, dim=1), False),
    "time first, pooled, T equals N": (_made(lambda m, x: _plain(m, x).mean(0), N, N, D, dim=1), False),
    "time first, twice as long": (_made(lambda m, x: _plain(m, x).mean(0), 2 * N, N, D, dim=1), False),
    "time first, frames": (_made(lambda m, x: _plain(m, x).movedim(0, 2), T, N, D, dim=1), False),
    "samples last": (_made(lambda m, x: _plain(m, x.movedim(2, 0)).mean(1), T, D, N, dim=2), True),
    **{f"time-first {kind}{' over frames' * (not pooled)}{' of equal size' * (length == N)}":
       (_recurrent(kind, pooled=pooled, length=length), False)
       for kind in ("LSTM", "GRU", "RNN", "attention") for pooled in (True, False)
       for length in (T, N)},
    "second use": (_made(_second_use), False),
    "by hand": (_made(_by_hand), False),
    "tied by hand": (_of_a_token, False),
    "output hook": (_made(_plain, changed=lambda m: m.second.register_forward_hook(
        lambda module, args, y: 2.0 * y)), False),
    "last output hook": (_made(_plain, changed=lambda m: m.out.register_forward_hook(
        lambda module, args, y: y.square())), False),
    "input hook": (_made(_plain, changed=lambda m: m.second.register_forward_pre_hook(
        lambda module, args: (args[0] * 3.0,))), True),
    "gradient hook": (_made(_plain, changed=lambda m: m.second.register_full_backward_hook(
        lambda module, of_input, of_output: (of_input[0] * 2.0,))), None),
    "parameter hook": (_made(_plain, changed=lambda m: m.first.weight.register_hook(lambda g: g)), True),
    "patched forward": (_made(_plain, changed=_patch), False),
    "own convolution": (_own_convolution, False),
    "weight norm": (_made(_plain, changed=lambda m: nn.utils.parametrizations.weight_norm(m.second)), False),
    "old weight norm": (_made(_plain, changed=lambda m: nn.utils.weight_norm(m.second)), False),
    "spectral norm": (_made(_plain, changed=lambda m: nn.utils.parametrizations.spectral_norm(m.second)), False),
    "pruned": (_made(_plain, changed=lambda m: prune.l1_unstructured(m.second, "weight", 0.5)), False),
    "fewer samples": (_made(lambda m, x: m.out(m.first(x)) + F.pad(
        m.out(m.second(m.first(x)[:4])), (0, 0, 0, max(0, len(x) - 4)))), False),
    "one sample for all": (_made(_between(lambda h: h + h[:1])), False),
    "experts": (_made(lambda m, x: m.out(torch.where(x[:, :1] > 0, m.first(x), m.second(m.first(x))))), True),
}


def _of_sample(s: Situation, y: Tensor, n: int) -> tuple[Tensor, Tensor]:
    f = s.model(s.x.narrow(s.dim, n, 1))
    return f, y[n : n + 1]


def _outcome(name: str, quantity: str) -> str:
    """ "right", or "refused" by a typed error."""
    s = SITUATIONS[name][0]()
    with torch.no_grad():
        f = s.model(s.x)
    y = torch.arange(N * f[0, 0].numel()).view(N, *f.shape[2:]) % C
    try:
        with collect(s.model, quantity, loss_fn=F.cross_entropy) as q:
            _loss(s.model(s.x), y).backward()
    except NgsgdError:
        return "refused"
    if quantity == "batch_grad":
        wanted = gradients(s.model, [_loss(*_of_sample(s, y, n)) / N for n in range(N)])
    else:
        blocks = ggn(s.model, lambda n: _of_sample(s, y, n)[0],
                     lambda n, f: _loss(f if f.shape[0] == 1 else f[None], y[n : n + 1]) / N, N)
        wanted = {key: block_NPP.diagonal(dim1=1, dim2=2) for key, block_NPP in blocks.items()}
    for key, value in wanted.items():
        found = getattr(q[key], quantity)
        assert found.shape[0] == N
        close(found.flatten(1), value)
    return "right"


@pytest.mark.parametrize("quantity", ["batch_grad", "batch_diag_ggn"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_samples_are_those_of_a_loop_or_refused(name: str, quantity: str) -> None:
    must_be_right = SITUATIONS[name][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _outcome(name, quantity)
    if must_be_right is not None:
        assert outcome == ("right" if must_be_right else "refused")


@pytest.mark.entry("F20", "you use the weight of a layer outside the layer (`F.linear(h, "
                   "layer.weight)`, a tied output by hand, a penalty in the loss), or a hook, an "
                   "own method or a replaced `forward` changes the layer", "error", "`ConfigError` "
                   "names the parameter, from one comparison with autograd per model; "
                   "preconditioners compare, too. Call `backward()` for a penalty by itself. "
                   "Second-order quantities ignore penalties, as they are those of the loss.")
@pytest.mark.parametrize("name", ["second use", "by hand", "tied by hand", "output hook", "own convolution"])
@pytest.mark.parametrize("method", [KFAC, DiagonalNG])
def test_preconditioners_refuse_a_parameter_whose_rows_are_not_all(name: str, method: type[Any]) -> None:
    s = SITUATIONS[name][0]()
    layer = {"tied by hand": "emb", "own convolution": "0"}.get(name, "second")
    y = torch.arange(N) % C
    for fisher in ("empirical", "exact", "mc"):
        with pytest.raises(ConfigError, match=rf"{layer}\.weight.*skip="):
            method(s.model, fisher=fisher).evaluate(lambda: _loss(s.model(s.x), y))
        skipping = method(s.model, fisher=fisher, skip=(layer,))
        skipping.evaluate(lambda: _loss(s.model(s.x), y))
        skipping.step()


@pytest.mark.entry("F20")
@pytest.mark.parametrize("quantity", ["batch_grad", "variance", "batch_l2", "kfac_emp"])
@pytest.mark.parametrize("way", ["in the loss", "penalty", "layers called directly"])
def test_uses_that_are_not_in_the_model_are_refused(way: str, quantity: str) -> None:
    s = SITUATIONS["plain"][0]()
    y, model = torch.arange(N) % C, s.model
    made: dict[str, Callable[[], Tensor]] = {
        "in the loss": lambda: _loss(model(s.x) + F.linear(s.x, model.out.weight[:, :D]), y),
        "penalty": lambda: _loss(model(s.x), y) + 0.1 * model.out.weight.square().sum(),
        "layers called directly": lambda: _loss(F.linear(model.out(torch.tanh(model.first(s.x))), model.out.weight[:, :C]), y),
    }
    with pytest.raises(ConfigError, match=r"out\.weight"), collect(model, quantity, loss_fn=F.cross_entropy):
        made[way]().backward()


@pytest.mark.entry("F20")
def test_a_penalty_by_itself_or_next_to_second_order_quantities_is_accepted() -> None:
    found = []
    for with_penalty in (False, True):
        s = SITUATIONS["plain"][0]()
        y = torch.arange(N) % C
        with collect(s.model, "batch_grad", loss_fn=F.cross_entropy) as first:
            _loss(s.model(s.x), y).backward()
            if with_penalty:
                torch.stack([p.square().sum() for p in s.model.parameters()]).sum().backward()
        with collect(s.model, "diag_ggn", loss_fn=F.cross_entropy) as second:
            penalty = torch.stack([p.square().sum() for p in s.model.parameters()]).sum()
            (_loss(s.model(s.x), y) + (1.0 if with_penalty else 0.0) * penalty).backward()
        found.append((first["out.weight"].batch_grad, second["out.weight"].diag_ggn))
    for one, other in zip(*found, strict=True):
        close(one, other)
        assert float(one.abs().sum()) > 0.0


@pytest.mark.entry("F20")
@pytest.mark.parametrize("inner", ["batch_grad", "diag_ggn"])
def test_contexts_inside_of_others_see_the_ordinary_backward_pass(inner: str) -> None:
    """Not the vectors and comparisons of each other."""
    y = torch.arange(N) % C
    found = []
    for is_nested in (False, True):
        s = SITUATIONS["plain"][0]()
        preconditioner = KFAC(s.model)
        with preconditioner.watch(), collect(s.model, "batch_grad", loss_fn=F.cross_entropy) as outer:
            if is_nested:
                with collect(s.model, inner, loss_fn=F.cross_entropy) as q:
                    preconditioner.backward(_loss(s.model(s.x), y))
                assert float(getattr(q["first.weight"], inner).abs().sum()) > 0.0
            else:
                preconditioner.backward(_loss(s.model(s.x), y))
        preconditioner.step()
        found.append((outer["first.weight"].batch_grad, preconditioner.mean_statistics("first.weight")["B"]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert float(one.abs().sum()) > 0.0


@pytest.mark.parametrize("samples", [[], [N], [-N - 1]])
def test_samples_that_do_not_exist_are_refused(samples: list[int]) -> None:
    s = SITUATIONS["plain"][0]()
    with pytest.raises(NgsgdError, match="samples"), collect(s.model, "batch_l2", loss_fn=F.cross_entropy, samples=samples):
        _loss(s.model(s.x), torch.arange(N) % C).backward()


def test_complex_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(D, H, dtype=torch.cfloat))
    with pytest.raises(ConfigError, match="layer 0"), collect(model, "batch_grad", loss_fn=F.cross_entropy):
        model(torch.randn(N, D, dtype=torch.cfloat))


@pytest.mark.entry("F20")
def test_the_comparison_runs_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    add = samples.Totals.add

    def noted(self: Any, *args: Any) -> None:
        runs.append("sum")
        add(self, *args)
    monkeypatch.setattr(samples.Totals, "add", noted)
    s, counts = SITUATIONS["plain"][0](), []
    for _ in range(6):
        with collect(s.model, "batch_grad", "diag_ggn", loss_fn=F.cross_entropy):
            _loss(s.model(s.x), torch.arange(N) % C).backward()
        counts.append(len(runs))
    # The first layer reached may need three attempts.
    assert counts[0] > 0 and counts[3] == counts[5]


@pytest.mark.entry("F20")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_rounding_is_no_difference(dtype: torch.dtype, is_autocast: bool) -> None:
    """Also where sums cancel: the bias before a BatchNorm in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(D, 16, 3), nn.BatchNorm1d(16), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 30, C))
    if not is_autocast:
        model = model.to(dtype)
    x, y = torch.randn(64, D, 32, dtype=next(model.parameters()).dtype), torch.arange(64) % C
    for is_training in (True, False):
        model.train(is_training)
        with (torch.autocast("cpu", dtype, enabled=is_autocast and dtype != torch.float32),
              collect(model, "kfac_emp" if is_training else "batch_l2", loss_fn=F.cross_entropy,
                      layers=["0", "4"]) as q):
            _loss(model(x).float(), y).backward()
        assert set(q) == {"0.weight", "0.bias", "4.weight", "4.bias"}


@pytest.mark.entry("F20")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.MultiheadAttention])
def test_a_hook_may_watch_the_output_of_a_recurrent_layer(kind: Any, dropout: float) -> None:
    """Its output is computed again, so that a change would be lost; dropout hides changes."""
    sizes = {"num_layers": 2, "hidden_size": D} if issubclass(kind, nn.RNNBase) else {"num_heads": 2}
    num_inputs = 1 if issubclass(kind, nn.RNNBase) else 3
    for change in (None, lambda y: (2.0 * y[0], *y[1:])):
        core = kind(D, dropout=dropout, batch_first=True, **sizes)
        model = Wired(lambda m, x: m.out(m.core(*[x] * num_inputs)[0][:, 0]), core=core,
                      out=nn.Linear(D, C)).double()
        model.core.register_forward_hook(lambda module, args, y, change=change: None if change is None else change(y))
        x, y = torch.randn(N, T, D).double(), torch.arange(N) % C
        if change is None and not dropout:
            with collect(model, "batch_grad", loss_fn=F.cross_entropy) as q:
                _loss(model(x), y).backward()
            close(q["out.weight"].batch_grad.sum(dim=0), model.out.weight.grad)
        else:
            with pytest.raises(ConfigError, match="layer core"), collect(model, "batch_grad", loss_fn=F.cross_entropy):
                _loss(model(x), y).backward()


@pytest.mark.entry("F24", "samples change their order, their number or their dimension inside the "
                   "model: `h[perm]`, `h.repeat`, time-first layers with samples-first losses",
                   "error", "`ConfigError` of `collect`, from one comparison per model that sees "
                   "every pair of samples; an order that is restored works.")
@pytest.mark.parametrize("pair", [(0, 1), (3, 60), (510, 511)])
def test_every_two_samples_are_told_apart(pair: tuple[int, int]) -> None:
    order = torch.arange(512)
    order[list(pair)] = order[list(pair[::-1])]
    made = _made(_between(lambda h: h[order]), 512, D)()
    with pytest.raises(ConfigError, match="take part"), collect(made.model, "batch_l2", loss_fn=F.cross_entropy):
        _loss(made.model(made.x), torch.arange(512) % C).backward()


@pytest.mark.entry("F24")
def test_a_minibatch_of_one_sample_decides_nothing() -> None:
    s = SITUATIONS["two samples swapped"][0]()
    for _ in range(4):
        with collect(s.model, "batch_l2", loss_fn=F.cross_entropy):
            _loss(s.model(s.x[:1]), torch.arange(1)).backward()
    with pytest.raises(ConfigError, match="take part"), collect(s.model, "batch_l2", loss_fn=F.cross_entropy):
        _loss(s.model(s.x), torch.arange(N) % C).backward()


@pytest.mark.entry("F26", "a minibatch is empty, or a layer has no inputs or outputs", "error",
                   "`DataError` or `ConfigError` that names the layer, before anything is "
                   "computed.")
@pytest.mark.parametrize("quantity", ["batch_grad", "variance", "diag_ggn", "kfac", "hmp"])
def test_empty_minibatches_are_refused(quantity: str) -> None:
    model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C))
    with pytest.raises(DataError, match="layer 0"), collect(model, quantity, loss_fn=F.cross_entropy):
        _loss(model(torch.zeros(0, D)), torch.zeros(0, dtype=torch.long)).backward()
    with pytest.raises(DataError, match="layer 0"):
        KFAC(model).evaluate(lambda: _loss(model(torch.zeros(0, D)), torch.zeros(0, dtype=torch.long)))


@pytest.mark.entry("F26")
@pytest.mark.parametrize("layer", [nn.Linear(0, 2), nn.Conv1d(2, 0, 1), nn.Embedding(3, 0),
                                   nn.LayerNorm(0)], ids=lambda layer: type(layer).__name__)
def test_layers_without_elements_are_refused(layer: nn.Module) -> None:
    model = nn.ModuleDict({"empty": layer, "full": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"empty.*layers="):
        collect(model, "batch_l2", loss_fn=F.cross_entropy)
    collect(model, "batch_l2", loss_fn=F.cross_entropy, layers=["full"])
    with pytest.raises(ConfigError, match=r"empty.*skip="):
        KFAC(model).evaluate(lambda: model["full"](torch.zeros(2, 2)).sum())
