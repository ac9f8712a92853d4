"""Loops in which a sample is not an index of a layer's rows: right by brute force, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import capture, collect, samples
from ngsgd.errors import ConfigError, NgsgdError
from ngsgd.preconditioners import KFAC, SMWNG, DiagonalNG, Preconditioner
from ngsgd.preconditioners.fisher_method import FisherMethod
from tests.curvature.support import close
from tests.reference.curvature import ggn, ggn_blocks, gradients, individual_gradients, jacobians, loss_derivatives
from tests.wired import Wired

N, DAMPING = 4, 0.02
Loss = Callable[..., Tensor]
CE: Loss = nn.CrossEntropyLoss()
CE_SUM: Loss = nn.CrossEntropyLoss(reduction="sum")
FIRST = ("batch_grad", "batch_l2", "sum_grad_squared", "second_moment", "variance", "kfac_emp")
SECOND = ("diag_ggn", "batch_diag_ggn", "sqrt_ggn", "kflr")
WITHOUT_FACTORS = tuple(name for name in (*FIRST, *SECOND) if "kf" not in name)
Step = Callable[[], Tensor]


def positions(*, by_sample: bool = False, mixed: bool = True) -> nn.Module:
    """A language model with position embeddings, which run once, or once for each sample."""
    def run(model: Any, index_NT: Tensor) -> Any:
        t_T = torch.arange(index_NT.shape[1])
        h = model.emb(index_NT) + model.pos(t_T.expand(len(index_NT), -1) if by_sample else t_T)
        if mixed:
            h = h + torch.tanh(model.inner(h)).cumsum(dim=1)
        return model.out(h).transpose(1, 2)
    return Wired(run, emb=nn.Embedding(7, 5), pos=nn.Embedding(9, 5), inner=nn.Linear(5, 5),
                 out=nn.Linear(5, 3))


def last_layer() -> nn.Module:
    """The embeddings are what the loss sees."""
    return Wired(lambda m, index_NT: (m.emb(index_NT)
                                      + m.pos(torch.arange(index_NT.shape[1]))).transpose(1, 2),
                 emb=nn.Embedding(7, 3), pos=nn.Embedding(9, 3))


def shared_row(rows: int = 1) -> nn.Module:
    """A layer applied to one row, which all samples get."""
    model = Wired(lambda m, x_NT: m.out(torch.relu(m.emb(x_NT) * m.shared(m.row))).transpose(1, 2),
                  emb=nn.Embedding(7, 5), shared=nn.Linear(4, 5), out=nn.Linear(5, 3))
    model.register_buffer("row", torch.randn(rows, 4))
    return model


def prototypes() -> nn.Module:
    """Each sample is compared with outputs of a layer that runs once; no operation repeats rows."""
    model = Wired(lambda m, index_NT: m.emb(index_NT).mean(dim=1) @ m.of_prototypes(m.prototypes).T,
                  emb=nn.Embedding(7, 5), of_prototypes=nn.Linear(4, 5))
    model.register_buffer("prototypes", torch.randn(N, 4))
    return model


def centred() -> nn.Module:
    """A statistic over the minibatch between layers."""
    def run(model: Any, index_NT: Tensor) -> Any:
        h = model.emb(index_NT).mean(dim=1)
        return model.out(torch.tanh(nn.functional.batch_norm(h - h.mean(dim=0), None, None,
                                                             training=True)))
    return Wired(run, emb=nn.Embedding(7, 5), out=nn.Linear(5, 3))


ONCE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "positions": (positions, "pos"),
    "positions without a mixture": (lambda: positions(mixed=False), "pos"),
    "last layer": (last_layer, "pos"),
    "one row": (shared_row, "shared"), "rows": (lambda: shared_row(N), "shared")}


def _index(num_frames: int) -> Tensor:
    return torch.randint(7, (N, num_frames))


def _target(output: Tensor) -> Tensor:
    return torch.randint(output.shape[1], output.shape[:1] + output.shape[2:])


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return CE(output, _target(output))


def _made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


# layers that run once for the complete minibatch


@pytest.mark.entry("A4", "you collect curvature of a model with a layer that runs once for the complete minibatch, such as "
                         "`pos(torch.arange(T))`", "error",
                   "`ConfigError` names the layer and the remedy: an input for each sample, such as "
                   "`pos(torch.arange(T).expand(N, T))`, with which all quantities are exact, or `layers=` of `collect`, "
                   "`skip=` of a preconditioner; also where "
                   "T equals N. Preconditioners refuse it where the output is repeated for every sample.")
@pytest.mark.parametrize("num_frames", [N, N + 1, 2 * N])
@pytest.mark.parametrize("quantity", ["batch_grad", "batch_l2", "variance", "diag_ggn", "kfac"])
@pytest.mark.parametrize("name", ONCE)
def test_a_layer_that_runs_once_is_refused_by_name(name: str, quantity: str, num_frames: int) -> None:
    if name == "rows" and num_frames != N:
        pytest.skip("its rows are added to frames")
    made, layer = ONCE[name]
    model = _made(made)
    # factors are known for affine layers alone
    affine = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    if quantity == "kfac" and layer not in affine:
        pytest.skip("embeddings have no factors")
    layers = affine if quantity == "kfac" else None
    for num_samples in (None, N):
        with pytest.raises(NgsgdError, match=rf"layer {layer} .*once"), \
                collect(model, quantity, loss_fn=CE, layers=layers, num_samples=num_samples):
            _loss(model, _index(num_frames)).backward()


@pytest.mark.entry("P10", "your model has a layer that runs once for the complete minibatch (BERT's position_embeddings, 1 x T) "
                   "and you use a preconditioner that looks at rows", "error",
                   "ConfigError in the first backward pass names the layer; give it an input for each sample, or leave it its "
                   "plain gradient with skip=")
@pytest.mark.entry("A4")
@pytest.mark.parametrize("num_frames", [N, N + 1])
@pytest.mark.parametrize("method", [KFAC, DiagonalNG, SMWNG])
@pytest.mark.parametrize("name", [name for name in ONCE if name != "rows"])
def test_preconditioners_refuse_a_layer_that_runs_once(name: str, method: type[Preconditioner], num_frames: int) -> None:
    made, layer = ONCE[name]
    model = _made(made)
    preconditioner = method(model)
    with pytest.raises(ConfigError, match=rf"{layer} .* skip="):
        preconditioner.evaluate(lambda: _loss(model, _index(num_frames)))
    skipping = method(model, skip=(layer,))
    if name != "last layer":   # which leaves no affine layer
        skipping.evaluate(lambda: _loss(model, _index(num_frames)))
        skipping.step()


@pytest.mark.entry("A4")
def test_layers_with_another_leading_dimension_are_refused_where_its_size_is_the_same() -> None:
    """Frames lead the output layer's input, samples the recurrent layer's products."""
    model = _made(lambda: Wired(lambda m, x_NT: m.out(m.lstm(m.emb(x_NT.T))[0]).permute(1, 2, 0),
                                emb=nn.Embedding(7, 5), lstm=nn.LSTM(5, 4), out=nn.Linear(4, 3)))
    with pytest.raises(ConfigError, match="samples first"), collect(model, "variance", loss_fn=CE):
        _loss(model, _index(N)).backward()


@pytest.mark.entry("A4")
@pytest.mark.parametrize("made", [prototypes, centred])
@pytest.mark.parametrize("quantity", ["batch_grad", "diag_ggn"])
def test_samples_that_are_mixed_by_an_operation_are_refused(made: Callable[[], nn.Module], quantity: str) -> None:
    model = _made(made)
    with pytest.raises(ConfigError, match=r"sample.*gradient"), collect(model, quantity, loss_fn=CE):
        _loss(model, _index(3)).backward()


@pytest.mark.entry("A4")
def test_statistics_over_the_minibatch_are_no_layers_that_run_once() -> None:
    """Of preconditioners, for which rows are those of the loss."""
    model = _made(centred)
    preconditioner = KFAC(model)
    preconditioner.evaluate(lambda: _loss(model, _index(3)))
    preconditioner.step()


@pytest.mark.entry("A4")
@pytest.mark.parametrize("loss_fn", [CE, CE_SUM], ids=["mean", "sum"])
@pytest.mark.parametrize("num_frames", [N, N + 1])
def test_with_an_input_for_each_sample_all_quantities_are_exact(num_frames: int,
                                                                loss_fn: Loss) -> None:
    model, x = _made(lambda: positions(by_sample=True)), _index(num_frames)
    y = _target(model(x))
    with collect(model, *WITHOUT_FACTORS, loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    _require_right(q, model, x, lambda f: loss_fn(f, y), mean=loss_fn is CE)


def _require_right(q: Any, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor],
                   num_samples: int = N, *, mean: bool = True) -> None:
    """All quantities but factors, of a loss of the output."""
    J = jacobians(model, x, num_samples)
    d_NF, H_NFF = loss_derivatives(loss, model(x), num_samples)
    _require_equal(q, individual_gradients(J, d_NF), ggn_blocks(J, H_NFF), mean=mean)


def _require_equal(q: Any, g: dict[str, Tensor], blocks: dict[str, Tensor], *, mean: bool = True) -> None:
    """All quantities but factors, from the samples' gradients (c g_n) and blocks of the GGN."""
    for name, g_NP in g.items():
        of, scaled_NP = q[name], g_NP * (len(g_NP) if mean else 1)
        close(of.batch_grad, g_NP)
        close(of.batch_l2, g_NP.square().sum(dim=1))
        close(of.sum_grad_squared, g_NP.square().sum(dim=0))
        close(of.second_moment, scaled_NP.square().mean(dim=0))
        close(of.variance, scaled_NP.var(dim=0, unbiased=False))
        close(of.diag_ggn, blocks[name].sum(dim=0).diagonal())
        close(of.batch_diag_ggn, blocks[name].diagonal(dim1=1, dim2=2))
        assert of.sqrt_ggn.shape[1] == len(g_NP)
        root_XP = of.sqrt_ggn.flatten(2).flatten(0, 1)
        close(root_XP.T @ root_XP, blocks[name].sum(dim=0))


def test_models_whose_sizes_are_all_equal_are_taken() -> None:
    """N equals T equals the width: many shapes are those of a layer that runs once."""
    def run(model: Any, x_NTD: Tensor) -> Any:
        h = torch.stack([model.frames(x_NTD[:, t]) for t in range(N)], dim=1)
        gate_NT1 = torch.sigmoid(model.gate(h.mean(dim=1)))[:, None]
        h = h * gate_NT1 + model.speaker(x_NTD[:, 0]).unsqueeze(1)
        h_TND = torch.cat([h[:, :1], h[:, 1:]], dim=1).transpose(0, 1).contiguous()
        h = h + model.attention(h, h, h)[0] + h_TND.transpose(0, 1)
        return model.out(h.transpose(0, 1)[-1])
    model = _made(lambda: Wired(run, frames=nn.Linear(N, N), gate=nn.Linear(N, N),
                                speaker=nn.Linear(N, N), out=nn.Linear(N, 3),
                                attention=nn.MultiheadAttention(N, 2, batch_first=True)))
    x, y = torch.randn(N, N, N).double(), torch.arange(N) % 3
    with collect(model, *WITHOUT_FACTORS, loss_fn=CE) as q:
        CE(model(x), y).backward()
    _require_right(q, model, x, lambda f: CE(f, y))
    preconditioner = KFAC(model)
    preconditioner.evaluate(lambda: CE(model(x), y))
    preconditioner.step()


def test_each_way_of_calling_a_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    for name in ("_reached", "mixed_rows"):
        real = getattr(samples, name)
        owner: Any = samples if name == "_reached" else capture

        def noted(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            checked.append(name)
            return real(*args, **options)
        monkeypatch.setattr(owner, name, noted)
    model = _made(lambda: positions(by_sample=True))
    preconditioner = KFAC(model)
    counts = []
    for _ in range(5):
        with collect(model, "variance", loss_fn=CE):
            _loss(model, _index(3)).backward()
        preconditioner.evaluate(lambda: _loss(model, _index(5)))
        preconditioner.step()
        counts.append(len(checked))
    assert counts[0] > 0 and counts[4] == counts[2]


# two calls of the model in one graph


def _net() -> nn.Module:
    return _made(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def _halves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * N, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (2 * N,), generator=generator)
    return x[:N], y[:N], x[N:], y[N:]


@pytest.mark.entry("A9", "you call the model twice before one `backward()`, as in `ce(m(x1), y1) + ce(m(x2), y2)`", "error",
                   "`collect` raises `ConfigError`: call `backward()` for each, make one minibatch of both, or collect on a module "
                   "that makes both calls. Preconditioners take the rows of both calls, as of one minibatch; where one loss "
                   "compares both outputs, row i of both is one sample.")
@pytest.mark.parametrize("quantity", ["variance", "batch_l2", "diag_ggn", "kfac"])
def test_two_calls_in_one_graph_are_refused_by_collect(quantity: str) -> None:
    model = _net()
    x1, y1, x2, y2 = _halves()
    with pytest.raises(ConfigError, match="two calls"), collect(model, quantity, loss_fn=CE):
        (CE(model(x1), y1) + CE(model(x2), y2)).backward()


@pytest.mark.entry("A9")
@pytest.mark.parametrize("loss_fn", [CE, CE_SUM], ids=["mean", "sum"])
@pytest.mark.parametrize("way", ["two backward passes", "one minibatch"])
def test_the_ways_that_the_refusal_names_are_exact(way: str, loss_fn: Loss) -> None:
    model = _net()
    x1, y1, x2, y2 = _halves()
    share = 0.5 if loss_fn is CE else 1.0
    with collect(model, *FIRST, *SECOND, loss_fn=loss_fn) as q:
        if way == "two backward passes":
            first, second = loss_fn(model(x1), y1), loss_fn(model(x2), y2)   # both graphs at once
            (share * first).backward()
            (share * second).backward()
        else:
            loss_fn(model(torch.cat([x1, x2])), torch.cat([y1, y2])).backward()
    y = torch.cat([y1, y2])
    _require_right(q, model, torch.cat([x1, x2]), lambda f: loss_fn(f, y), 2 * N,
                   mean=loss_fn is CE)


@pytest.mark.entry("A9")
def test_a_module_that_makes_both_calls_has_pairs_as_samples() -> None:
    model = Wired(lambda m, x1, x2: m.inner(x1) * 2.0 + m.inner(x2), inner=_net())
    x1, y1, x2, _ = _halves()
    with collect(model, *WITHOUT_FACTORS, loss_fn=CE) as q:
        CE(model(x1, x2), y1).backward()
    g = gradients(model, [CE(model(x1[n:n + 1], x2[n:n + 1]), y1[n:n + 1]) / N for n in range(N)])
    blocks = ggn(model, lambda n: model(x1[n:n + 1], x2[n:n + 1]), lambda n, f: CE(f[None], y1[n:n + 1]) / N, N)
    _require_equal(q, g, blocks)


def _directions(method: str, model: nn.Module, shares: Sequence[Tensor], num_rows: int, weight: float) -> dict[str, Tensor]:
    """(F + d I)^-1 g of a diagonal or the complete F = 1/R sum_n (R/W g_n)(R/W g_n)^T."""
    g = gradients(model, shares)
    g_NP = torch.cat(list(g.values()), dim=1)
    U = g_NP * (num_rows / weight)
    F = U.T @ U / num_rows
    F = F.diagonal().diag() if method == "diagonal" else F
    found = torch.linalg.solve(F + DAMPING * torch.eye(len(F), dtype=F.dtype), g_NP.sum(dim=0))
    return dict(zip(g, found.split([p.shape[1] for p in g.values()]), strict=True))


def _stepped(preconditioner: Preconditioner, step: Step) -> dict[str, Tensor]:
    preconditioner.model.zero_grad()
    preconditioner.evaluate(step)
    preconditioner.step()
    return {name: p.grad.flatten() for name, p in preconditioner.model.named_parameters() if p.grad is not None}


def _require_directions(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, direction in wanted.items():   # a solve in float64 at condition 1e3
        torch.testing.assert_close(found[name], direction, rtol=1e-8, atol=1e-10)


@pytest.mark.entry("A9")
@pytest.mark.parametrize("order", ["forward first", "one by one"])
@pytest.mark.parametrize(("name", "method"), [("diagonal", DiagonalNG), ("smw", SMWNG)])
def test_preconditioners_take_the_rows_of_both_calls(name: str, method: type[Preconditioner], order: str) -> None:
    model = _net()
    x1, y1, x2, y2 = _halves()
    x2, y2 = x2[:N - 1], y2[:N - 1]   # another size

    def step() -> Tensor:
        if order == "one by one":
            return CE(model(x1), y1) + CE(model(x2), y2)
        f1, f2 = model(x1), model(x2)
        return CE(f1, y1) + CE(f2, y2)
    found = _stepped(method(model, damping=DAMPING), step)
    shares = [CE(model(x1[n:n + 1]), y1[n:n + 1]) / N for n in range(N)]
    shares += [CE(model(x2[n:n + 1]), y2[n:n + 1]) / (N - 1) for n in range(N - 1)]
    _require_directions(found, _directions(name, model, shares, 2 * N - 1, 2.0))


@pytest.mark.entry("A9")
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("method", [KFAC, DiagonalNG, SMWNG])
def test_two_calls_are_one_minibatch_with_weights_of_rows(method: type[FisherMethod], fisher: str) -> None:
    model = _net()
    x1, y1, x2, y2 = _halves()
    x2, y2 = x2[:N - 2], y2[:N - 2]
    weight = torch.tensor([1.0 / N] * N + [1.0 / (N - 2)] * (N - 2), dtype=torch.float64)

    def one() -> Tensor:
        x, y = torch.cat([x1, x2]), torch.cat([y1, y2])
        return nn.functional.cross_entropy(model(x), y, reduction="none") @ weight

    def two() -> Tensor:
        f1, f2 = model(x1), model(x2)
        return CE(f1, y1) + CE(f2, y2)
    found = _stepped(method(model, fisher=fisher, damping=DAMPING), two)
    _require_directions(found, _stepped(method(model, fisher=fisher, damping=DAMPING), one))


def test_calls_that_no_loss_is_of_change_nothing() -> None:
    model = _net()
    x1, y1, x2, _ = _halves()
    with collect(model, *FIRST, *SECOND, loss_fn=CE) as wanted:
        CE(model(x1), y1).backward()
    for others in (x2[:2], x2[:3], torch.cat([x2, x2])):
        with collect(model, *FIRST, *SECOND, loss_fn=CE) as q:
            seen = model(others)
            CE(model(x1), y1).backward()
        assert seen.requires_grad
        for name in q:
            for quantity in (*FIRST, *SECOND):
                found, expected = getattr(q[name], quantity), getattr(wanted[name], quantity)
                close(*(each.B_OO if quantity.startswith("kf") else each for each in (found, expected)))


@pytest.mark.entry("A9")
@pytest.mark.parametrize(("name", "method"), [("diagonal", DiagonalNG), ("smw", SMWNG)])
def test_a_loss_that_compares_both_outputs_has_pairs_as_samples(name: str, method: type[Preconditioner]) -> None:
    model = _net()
    x1, _, x2, _ = _halves()
    found = _stepped(method(model, damping=DAMPING), lambda: nn.functional.mse_loss(model(x1), model(x2)))
    shares = [nn.functional.mse_loss(model(x1[n:n + 1]), model(x2[n:n + 1])) / N for n in range(N)]
    # a row of a squared error is one vector of C numbers, each with the weight 1 / (N C)
    _require_directions(found, _directions(name, model, shares, N, 1.0))
    with pytest.raises(ConfigError, match="one size"):
        _stepped(method(model), lambda: nn.functional.mse_loss(model(x1).mean(dim=0), model(x2[:2]).mean(dim=0)))
    # the second derivative with respect to both sides is not supported
    for exact in (KFAC(model, fisher="exact"), KFAC(model, fisher="mc")):
        with pytest.raises(ConfigError, match=r"target.*parameters"):
            _stepped(exact, lambda: nn.functional.mse_loss(model(x1), model(x2)))


@pytest.mark.entry("P10")
def test_a_skipped_layer_that_runs_once_keeps_its_gradient_and_others_theirs() -> None:
    x, y, found = _index(3), torch.randint(3, (N, 3)), []
    for by_sample in (False, True):
        model = _made(partial(positions, by_sample=by_sample))
        loss = partial(lambda net: CE(net(x), y), model)
        loss().backward()
        plain = model.get_parameter("pos.weight").grad
        assert plain is not None
        plain = plain.flatten().clone()
        found.append(_stepped(DiagonalNG(model, damping=DAMPING, skip=("pos",)), loss))
        close(found[-1]["pos.weight"], plain)
    _require_directions(*found)


# several losses of one output


def _soft() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(dim=1)


TWO_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the same twice": lambda f, y: 0.5 * CE(f, y) + 0.5 * CE(f, y),
    "mixup": lambda f, y: 0.3 * CE(f, y) + 0.7 * CE(f, 2 - y),
    "distillation": lambda f, y: 0.4 * CE(f, y) + 0.6 * CE(f / 2.0, _soft()[:len(f)])}


def _share(loss: Callable[[Tensor, Tensor], Tensor], model: nn.Module, x: Tensor, y: Tensor, n: int) -> Tensor:
    """Of sample n: the outputs of the others are held fixed, which leaves its gradient."""
    f = model(x)
    fixed = f.detach().clone()
    return loss(torch.cat([fixed[:n], f[n:n + 1], fixed[n + 1:]]), y)


@pytest.mark.entry("A5", "you add two losses of one output: mixup, or cross-entropy and distillation from soft targets", "works",
                   "Rows count once and the weights of both losses add up; the rows of the empirical Fisher matrix are the "
                   "gradients of the sum. `collect` gives one entry per sample. With `kl_div` or another loss whose rows have no "
                   "known weight, preconditioners raise `ConfigError` and name cross-entropy with soft targets.")
@pytest.mark.parametrize(("name", "method"), [("diagonal", DiagonalNG), ("smw", SMWNG)])
@pytest.mark.parametrize("losses", TWO_LOSSES)
def test_two_losses_of_one_output_count_its_rows_once(losses: str, name: str, method: type[Preconditioner]) -> None:
    model, (x, y, _, _), loss = _net(), _halves(), TWO_LOSSES[losses]
    found = _stepped(method(model, damping=DAMPING), lambda: loss(model(x), y))
    shares = [_share(loss, model, x, y, n) for n in range(N)]
    _require_directions(found, _directions(name, model, shares, N, 1.0))


@pytest.mark.entry("A5")
@pytest.mark.parametrize("method", [KFAC, DiagonalNG])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_second_loss_of_unknown_weight_is_refused(method: type[FisherMethod], fisher: str) -> None:
    model, (x, y, _, _) = _net(), _halves()

    def distilled() -> Tensor:
        f = model(x)
        soft = nn.functional.kl_div(f.log_softmax(dim=1), _soft(), reduction="batchmean")
        return 0.4 * CE(f, y) + 0.6 * soft
    with pytest.raises(ConfigError, match="kl_div" if fisher == "empirical" else "another loss"):
        _stepped(method(model, fisher=fisher), distilled)

    def penalised() -> Tensor:
        penalty = nn.functional.l1_loss(model.get_parameter("0.weight"), torch.zeros(4, 5).double())
        return CE(model(x), y) + 0.0 * penalty
    found = _stepped(method(model, fisher=fisher), penalised)   # which is of no rows
    _require_directions(found, _stepped(method(model, fisher=fisher), lambda: CE(model(x), y)))


@pytest.mark.entry("A5")
def test_a_second_loss_module_is_collected_with_the_first() -> None:
    model, (x, y, _, _), other = _net(), _halves(), nn.CrossEntropyLoss(label_smoothing=0.3)
    for loss_fn in (CE, nn.functional.cross_entropy):
        with collect(model, "batch_diag_ggn", "diag_ggn", "kflr", loss_fn=loss_fn) as q:
            f = model(x)
            (0.5 * loss_fn(f, y) + 2.5 * other(f, 2 - y)).backward()
        with collect(model, "batch_diag_ggn", "diag_ggn", "kflr", loss_fn=CE) as wanted:
            (3.0 * CE(model(x), y)).backward()   # the same second derivative
        for name in q:
            close(q[name].batch_diag_ggn, wanted[name].batch_diag_ggn)
            close(q[name].kflr.B_OO, wanted[name].kflr.B_OO)


@pytest.mark.entry("A5")
def test_a_second_loss_of_some_rows_counts_none_of_them_again() -> None:
    model, (x, y, _, _) = _net(), _halves()
    masked = torch.where(torch.arange(N) < 1, -100, y)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * CE(f, masked) + 0.5 * CE(f, y)
    found = _stepped(DiagonalNG(model, damping=DAMPING), lambda: loss(model(x), y))
    shares = [_share(loss, model, x, y, n) for n in range(N)]
    _require_directions(found, _directions("diagonal", model, shares, N, 1.0))


@pytest.mark.entry("A5")
@pytest.mark.parametrize("method", [KFAC, DiagonalNG, SMWNG])
def test_two_backward_passes_are_two_minibatches_still(method: type[Preconditioner]) -> None:
    """Accumulation: here rows do add up, also where both graphs are there at once."""
    model, (x1, y1, x2, y2) = _net(), _halves()
    whole = _stepped(method(model, damping=DAMPING), lambda: CE(model(torch.cat([x1, x2])), torch.cat([y1, y2])))
    preconditioner = method(model, damping=DAMPING)
    model.zero_grad()
    with preconditioner.watch():
        for loss in (0.5 * CE(model(x1), y1), 0.5 * CE(model(x2), y2)):
            preconditioner.backward(loss)
    preconditioner.step()
    _require_directions({name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}, whole)


@pytest.mark.entry("A5")
@pytest.mark.parametrize("losses", TWO_LOSSES)
def test_two_losses_of_one_output_are_collected_as_their_sum(losses: str) -> None:
    model, (x, y, _, _), loss = _net(), _halves(), TWO_LOSSES[losses]
    with collect(model, *FIRST, *SECOND, "diag_h", "batch_diag_h", loss_fn=CE) as q:
        loss(model(x), y).backward()
    J = jacobians(model, x, N)
    d_NF, H_NFF = loss_derivatives(lambda f: loss(f, y), model(x), N)
    _require_equal(q, individual_gradients(J, d_NF), ggn_blocks(J, H_NFF))
    _require_factors(q, J, H_NFF, d_NF)
    for name in q:
        close(q[name].diag_h, q[name].batch_diag_h.sum(dim=0))


def _require_factors(q: Any, J: dict[str, Tensor], H_NFF: Tensor, d_NF: Tensor) -> None:
    """B of the biases, which is their GGN and their empirical Fisher matrix times N."""
    for name in ("0.bias", "2.bias"):
        close(q[name].kflr.B_OO, ggn_blocks({name: J[name]}, H_NFF)[name].sum(dim=0))
        g_NP = individual_gradients({name: J[name]}, d_NF)[name]
        close(q[name].kfac_emp.B_OO, g_NP.T @ g_NP * len(g_NP))


@pytest.mark.parametrize("method", [KFAC, DiagonalNG])
def test_a_pass_that_failed_has_no_share_in_the_next(method: type[Preconditioner]) -> None:
    model, (x, y, other_x, other_y) = _net(), _halves()
    wanted = _stepped(method(model), lambda: CE(model(x), y))
    preconditioner = method(model)

    def failing() -> Tensor:
        f = model(other_x)
        first = CE(f, other_y)
        # after the derivative of the loss has been seen
        f.register_hook(lambda _: first.detach()[5])
        return first
    with pytest.raises(IndexError):
        preconditioner.evaluate(failing)
    _require_directions(_stepped(preconditioner, lambda: CE(model(x), y)), wanted)


# losses of slices of the output


def _frames() -> tuple[nn.Module, Tensor, Tensor]:
    model = _made(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    return model, torch.randn(N, 6, 5).double(), torch.randint(3, (N, 6))


@pytest.mark.entry("B7", "you compute losses of slices of the output, as in `sum(ce(o[:, t], y[:, t]))`, or of heads of different "
                         "width", "works",
                   "The losses add up as one loss of the complete output would. Where a loss sees only a part of the rows that "
                   "layers see as samples, `ConfigError` explains how to compute it.")
@pytest.mark.parametrize("loss_fn", [CE, CE_SUM], ids=["mean", "sum"])
def test_losses_of_frames_are_the_loss_of_all_frames(loss_fn: Loss) -> None:
    model, x, y = _frames()
    with collect(model, *FIRST, *SECOND, "kfra", "diag_h", "batch_diag_h", loss_fn=loss_fn) as whole:
        (loss_fn(model(x).transpose(1, 2), y) * (6 if loss_fn is CE else 1)).backward()
    with collect(model, *FIRST, *SECOND, "kfra", "diag_h", "batch_diag_h", loss_fn=loss_fn) as q:
        o = model(x)
        torch.stack([loss_fn(o[:, t], y[:, t]) for t in range(6)]).sum().backward()
    for name in whole:
        for quantity in (*FIRST, *SECOND, "kfra", "diag_h", "batch_diag_h"):
            found, wanted = getattr(q[name], quantity), getattr(whole[name], quantity)
            if quantity.startswith("kf"):
                found, wanted = found.B_OO, wanted.B_OO
            if quantity == "sqrt_ggn":
                found, wanted = (root.flatten(2).flatten(0, 1) for root in (found, wanted))
                found, wanted = found.T @ found, wanted.T @ wanted
            close(found, wanted)


@pytest.mark.entry("B7")
@pytest.mark.parametrize("method", [KFAC, DiagonalNG, SMWNG])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_preconditioners_take_losses_of_frames(method: type[FisherMethod], fisher: str) -> None:
    model, x, y = _frames()
    whole = _stepped(method(model, fisher=fisher), lambda: CE(model(x).transpose(1, 2), y))

    def slices() -> Tensor:
        o = model(x)
        return torch.stack([CE(o[:, t], y[:, t]) for t in range(6)]).mean()
    _require_directions(_stepped(method(model, fisher=fisher), slices), whole)


@pytest.mark.entry("B7")
def test_a_loss_of_a_part_of_the_rows_is_refused() -> None:
    model, x, y = _frames()

    def loss() -> Tensor:
        o = model(x.flatten(0, 1)).unflatten(0, (N, 6))   # frames are samples
        return torch.stack([CE(o[:, t], y[:, t]) for t in range(6)]).sum()
    for quantity in ("diag_ggn", "kflr", "diag_h", "kfra"):
        with pytest.raises(ConfigError, match=r"4 rows.*24 samples"), \
                collect(model, quantity, loss_fn=CE):
            loss().backward()
    with pytest.raises(ConfigError, match="has 4 rows"):
        KFAC(model, fisher="exact").evaluate(loss)
    with collect(model, "diag_ggn", loss_fn=CE, num_samples=N) as q:
        loss().backward()
    with collect(model, "diag_ggn", loss_fn=CE) as wanted:
        (6 * CE(model(x).transpose(1, 2), y)).backward()
    close(q["0.weight"].diag_ggn, wanted["0.weight"].diag_ggn)


def _heads(*, sliced: bool) -> nn.Module:
    """Two heads, of 3 and 2 classes; of one layer or of two."""
    def run(model: Any, x: Tensor) -> Any:
        h = torch.tanh(model.trunk(x))
        return model.heads(h) if sliced else torch.cat([model.first(h), model.second(h)], dim=1)
    trunk = nn.Linear(5, 4)
    if sliced:
        return Wired(run, trunk=trunk, heads=nn.Linear(4, 5))
    return Wired(run, trunk=trunk, first=nn.Linear(4, 3), second=nn.Linear(4, 2))


def _of_heads(f: Tensor, y: Tensor) -> Tensor:
    return CE(f[:, :3], y) + CE(f[:, 3:], y % 2)


@pytest.mark.entry("B7")
@pytest.mark.parametrize("sliced", [True, False], ids=["slices", "layers"])
def test_heads_of_different_width(sliced: bool) -> None:
    model, (x, y, _, _) = _made(lambda: _heads(sliced=sliced)), _halves()
    with collect(model, *FIRST, *SECOND, loss_fn=CE) as q:
        _of_heads(model(x), y).backward()
    _require_right(q, model, x, lambda f: _of_heads(f, y))
    preconditioner = KFAC(model, fisher="exact")
    preconditioner.evaluate(lambda: _of_heads(model(x), y))
    preconditioner.step()
    B = preconditioner.mean_statistics("trunk.weight")["B"]
    close(B * 2.0, q["trunk.bias"].kflr.B_OO)   # of the mean over rows, whose weights sum up to 2
    close(preconditioner.mean_statistics("trunk.weight")["A"][:-1, :-1], q["trunk.weight"].kflr.A_II)
