"""The number of samples of a mean loss is that of the loss itself."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ngsgd import NGSGD
from ngsgd.errors import ConfigError
from tests.wired import Wired

NUM = 16
Loss = Callable[[Any], Any]


class Head(nn.Linear):
    """A subclass, which has no natural gradient."""


def sequence() -> nn.Module:
    """Outputs with positions, B x T x 3."""
    return Wired(lambda m, x: m.layers(x),
                 layers=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def frame_means() -> nn.Module:
    """Outputs are means over positions."""
    return Wired(lambda m, x: m.layers(x).mean(dim=1),
                 layers=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def heads() -> nn.Module:
    def run(model: Any, x: Tensor) -> Any:
        h = model.trunk(x).tanh()
        return model.left(h), model.right(h)

    return Wired(run, trunk=nn.Linear(5, 8), left=nn.Linear(8, 3), right=Head(8, 3))


class Experts(nn.Module):
    """Two experts after a trunk."""

    def __init__(self, last: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.trunk, self.experts = nn.Linear(5, 8), nn.ModuleList([last(8, 3), last(8, 3)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y: Tensor = self.experts[expert](self.trunk(x).tanh())
        return y

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        is_first = torch.arange(len(x)) % 2 == 0
        return self.experts[0](h[is_first]), self.experts[1](h[~is_first])


def affine(last: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), last(8, 3))


def images(last: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)))


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, IMAGES, FRAMES = data(NUM, 5), data(NUM, 1, 12, 12), data(NUM, 20, 5)
Y, T = torch.arange(NUM) % 3, data(NUM, 3)
Y_FRAMES = torch.arange(NUM * 20).view(NUM, 20) % 3
ce: Any = functional.cross_entropy


def focal(output: Tensor) -> Any:
    each = ce(output, Y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def contrastive(output: Tensor) -> Any:
    return ce(output @ output.T, torch.arange(NUM))


def masked(output: Tensor) -> Any:
    mask = (torch.arange(NUM) < 10).float()
    return (ce(output, Y, reduction="none") * mask).sum() / mask.sum()


class Doubled(torch.autograd.Function):
    """A loss with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.mean(x.square())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 2.0 * gradient * x / x.numel()


doubled: Any = Doubled.apply


# the model, the loss, and its samples
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, int]] = {
    "classes": (affine, lambda m: ce(m(X), Y), NUM),
    "a head without natural gradient": (lambda: affine(Head), lambda m: ce(m(X), Y), NUM),
    "weight_norm": (weight_norm, lambda m: ce(m(X), Y), NUM),
    "pooling and a head without natural gradient": (lambda: images(Head), lambda m: ce(m(IMAGES), Y), NUM),
    "pooling at the end": (convolutional, lambda m: ce(m(IMAGES), Y), NUM),
    "means over frames": (frame_means, lambda m: ce(m(FRAMES), Y), NUM),
    "classes of frames": (sequence, lambda m: ce(m(FRAMES).transpose(1, 2), Y_FRAMES), NUM * 20),
    "classes of flat frames": (sequence, lambda m: ce(m(FRAMES).flatten(0, 1), Y_FRAMES.flatten()),
                               NUM * 20),
    "ignored frames": (sequence, lambda m: ce(m(FRAMES).flatten(0, 1), Y_FRAMES.flatten(),
                                              ignore_index=1), NUM * 20),
    "pixels": (lambda: nn.Conv2d(1, 3, 3), lambda m: ce(m(IMAGES), torch.zeros(NUM, 10, 10).long()), NUM * 100),
    "soft classes": (affine, lambda m: ce(m(X), functional.softmax(T, dim=1)), NUM),
    "label smoothing": (affine, lambda m: ce(m(X), Y, label_smoothing=0.1), NUM),
    "a sum that is divided": (affine, lambda m: ce(m(X), Y, reduction="sum") / NUM, NUM),
    "kl_div": (affine, lambda m: functional.kl_div(m(X).log_softmax(1), T.softmax(1), reduction="batchmean"), NUM),
    "mse": (affine, lambda m: functional.mse_loss(m(X), T), NUM),
    "mse of means over frames": (frame_means, lambda m: functional.mse_loss(m(FRAMES), T), NUM),
    "mse of frames": (sequence, lambda m: functional.mse_loss(m(FRAMES), data(NUM, 20, 3)),
                      NUM * 20),
    "mse of pixels": (lambda: nn.Conv2d(1, 3, 3), lambda m: functional.mse_loss(m(IMAGES), data(NUM, 3, 10, 10)), NUM * 100),
    "mse of pooled pixels": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1)),
                             lambda m: functional.mse_loss(m(IMAGES), T[..., None, None]), NUM),
    "mse of larger pixels": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Upsample(scale_factor=2)),
                             lambda m: functional.mse_loss(m(IMAGES), data(NUM, 3, 20, 20)), NUM * 400),
    "flat mse": (affine, lambda m: functional.mse_loss(m(X).flatten(), T.flatten()), NUM),
    "l1": (affine, lambda m: functional.l1_loss(m(X), T), NUM),
    "smooth l1 and huber": (affine, lambda m: functional.smooth_l1_loss(m(X), T) + functional.huber_loss(m(X), T), NUM),
    "binary": (affine, lambda m: functional.binary_cross_entropy_with_logits(m(X), T.sigmoid()), NUM),
    "binary of numbers": (lambda: nn.Sequential(nn.Linear(5, 8), Head(8, 1), nn.Flatten(0)),
                          lambda m: functional.binary_cross_entropy(m(X).sigmoid(), T[:, 0].sigmoid()), NUM),
    "a mean written out": (affine, lambda m: (m(X) - T).square().mean(), NUM),
    "a mean of norms": (affine, lambda m: (m(X) - T).norm(dim=1).mean(), NUM),
    "gaussian": (affine, lambda m: functional.gaussian_nll_loss(m(X)[:, :1], T[:, :1], m(X)[:, 1:2].exp()), NUM),
    "focal": (affine, lambda m: focal(m(X)), NUM),
    "masked": (affine, lambda m: masked(m(X)), NUM),
    "ctc": (sequence, lambda m: functional.ctc_loss(m(FRAMES).transpose(0, 1).log_softmax(-1),
                                                    Y_FRAMES[:, 1:5] % 2 + 1,
                                                   torch.full((NUM,), 20), torch.full((NUM,), 4)), NUM),
    "an own backward pass": (affine, lambda m: doubled(m(X)), NUM),
    "a penalty on weights": (affine, lambda m: ce(m(X), Y) + 1e-3 * sum(p.square().sum() for p in m.parameters()), NUM),
    "a mean penalty on weights": (affine, lambda m: ce(m(X), Y) + m[0].weight.abs().mean(), NUM),
    "a distance to weights": (affine, lambda m: ce(m(X), Y) + functional.mse_loss(m[0].weight, torch.zeros(8, 5)), NUM),
    "an orthogonality penalty": (affine, lambda m: (m(X) - T).square().mean() + (m[2].weight @ m[2].weight.T).square().sum(), NUM),
    "a penalty on activations": (sequence, lambda m: ce(m(FRAMES).mean(1), Y)
                                 + m.layers[0](FRAMES).abs().mean(), NUM),
    "two calls": (affine, lambda m: ce(m(X), Y) + ce(m(X + 1), Y), NUM),
    "two heads": (heads, lambda m: sum(ce(one, Y) for one in m(X)), NUM),
    "a mean of two heads": (heads, lambda m: torch.stack([ce(one, Y) for one in m(X)]).mean(), NUM),
    "weights of two losses": (affine, lambda m: sum(0.3 * of(one) for one in [m(X)] for of in (lambda o: ce(o, Y), focal)), NUM),
    "a weighted loss of another call": (affine, lambda m: ce(m(X), Y) + 0.1 * ce(m(X + 1), Y), NUM),
    "a weighted penalty": (affine, lambda m: 0.5 * (m(X) - T).square().mean() + 1e-3 * m[0].weight.square().sum(), NUM),
    "frames one by one": (sequence, lambda m: sum(ce(one, Y) for one in m(FRAMES).unbind(1)), NUM),
    "samples one by one": (affine, lambda m: sum(ce(m_x[i:i + 1], Y[i:i + 1]) for m_x in [m(X)] for i in range(NUM)) / NUM, NUM),
    "parts of a minibatch": (affine, lambda m: sum(ce(one, y) for one, y in zip(m(X).split(4), Y.split(4), strict=True)) / 4, NUM),
    "one sample": (affine, lambda m: ce(m(X[:1]), Y[:1]), 1),
    "one number": (lambda: nn.Linear(5, 1), lambda m: functional.mse_loss(m(X[:1]), T[:1, :1]), 1),
    "a vector": (affine, lambda m: ce(m(X[0]), Y[0]), 1),
    "checkpoints": (affine, lambda m: ce(m[2](checkpoint(m[:2], X, use_reentrant=False)), Y), NUM),
    "reentrant checkpoints": (affine, lambda m: ce(checkpoint(m, X.requires_grad_(), use_reentrant=True), Y), NUM),
    "contrastive": (affine, lambda m: contrastive(functional.normalize(m(X), dim=1)), NUM),
    "distances of pairs": (affine, lambda m: torch.pdist(m(X)).mean(), NUM),
    "a distribution of pairs": (affine, lambda m: torch.pdist(functional.normalize(m(X))).square().neg().exp().mean().log(), NUM),
    "a matrix of pairs": (affine, lambda m: torch.cdist(m(X), m(X)).square().mean(), NUM),
    "products of pairs": (affine, lambda m: (m(X) @ m(X).T)[*torch.triu_indices(NUM, NUM, 1)].square().mean(), NUM),
    "masked distances of pairs": (affine, lambda m: torch.cdist(m(X), m(X))[torch.eye(NUM) < 1.0].square().mean(), NUM),
    "similarities of pairs": (affine, lambda m: functional.cosine_similarity(m(X)[:, None], m(X), dim=2).square().mean(), NUM),
    "triplets": (affine, lambda m: functional.triplet_margin_loss(m(X), m(X + 1), m(X - 1)), NUM),
    "multi margin": (affine, lambda m: functional.multi_margin_loss(m(X), Y), NUM),
    "soft margins": (affine, lambda m: functional.multilabel_soft_margin_loss(m(X), T.sigmoid().round()), NUM),
    "poisson": (lambda: nn.Linear(5, 1), lambda m: functional.poisson_nll_loss(m(X), T[:, :1].abs()), NUM),
    "casts": (affine, lambda m: ce(m(X).half().float(), Y).double(), NUM),
}


def stepped(model: nn.Module, run: Callable[[nn.Module, NGSGD], object], num_samples: int | None = None,
            **options: Any) -> list[Tensor]:
    """Parameters after `run` and a step."""
    optimizer = NGSGD(model, 1e-3, loss_reduction="mean", fallback="sgd", max_change=0.0, max_param_change=0.0, **options)
    before = [p.detach().clone() for p in model.parameters()]
    run(model, optimizer)
    optimizer.step(num_samples=num_samples)
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return [p.detach().clone() for p in model.parameters()]


def assert_counts(build: Callable[[], nn.Module], run: Callable[[nn.Module, NGSGD], object], expected: int) -> None:
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, given = stepped(model, run), stepped(twin, run, expected)
    assert all(torch.equal(p, q) for p, q in zip(found, given, strict=True))


@pytest.mark.entry("F14", "the loss is a mean and the layer next to it has no natural gradient, or positions are averaged after it",
                   "works", "NGSGD counts the rows of the loss's target: samples where it has samples, positions where it has "
                   "positions, ignored ones too. It reads them from the graph of the loss. Penalties on weights do not count")
@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_the_loss(case: str) -> None:
    build, loss, expected = CASES[case]
    assert_counts(build, lambda model, optimizer: loss(model).backward(), expected)


def all_of(model: nn.Module, action: Callable[[Any], object]) -> object:
    return [action(p) for p in model.parameters()]


# how a loop clears gradients
CLEARED: dict[str, Callable[[Any, NGSGD], object]] = {
    "optimizer, to None": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, to None": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "None": lambda model, optimizer: all_of(model, lambda p: setattr(p, "grad", None)),
    "zero_": lambda model, optimizer: all_of(model, lambda p: p.grad.zero_()),
    "zeros": lambda model, optimizer: all_of(model, lambda p: setattr(p, "grad", torch.zeros_like(p))),
    "foreach_zero": lambda model, optimizer: torch._foreach_zero_([p.grad for p in model.parameters()]),
    "times 0": lambda model, optimizer: all_of(model, lambda p: p.grad.mul_(0.0)),
    "scaled before": lambda model, optimizer: (all_of(model, lambda p: p.grad.mul_(0.5)), model.zero_grad(set_to_none=False)),
}


@pytest.mark.entry("F13", "a loop skips minibatches and clears their gradients, in any way", "works",
                   "the samples of passes whose gradients were cleared do not count, also after a step that a GradScaler skipped")
@pytest.mark.parametrize("way", CLEARED)
@pytest.mark.parametrize("build", [affine, lambda: affine(Head)], ids=["natural", "other"])
def test_passes_whose_gradients_were_cleared_do_not_count(way: str, build: Callable[[], nn.Module]) -> None:
    def run(model: nn.Module, optimizer: NGSGD) -> None:
        for _ in range(3):
            ce(model(X), Y).backward()
            CLEARED[way](model, optimizer)
        ce(model(X[:7]), Y[:7]).backward()
    assert_counts(build, run, 7)


@pytest.mark.entry("F13")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_a_scaler_skips_does_not_count(set_to_none: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def run(model: nn.Module, optimizer: NGSGD) -> None:
        scaler.scale(ce(model(X), Y)).backward()
        all_of(model, lambda p: p.grad.fill_(torch.inf))
        scaler.step(optimizer)
        scaler.update(2.0)
        model.zero_grad(set_to_none=set_to_none)
        (scaler.scale(ce(model(X), Y)) / 2.0).backward()
    assert_counts(affine, run, NUM)


@pytest.mark.parametrize("is_clipped", [True, False])
def test_accumulated_passes_are_added(is_clipped: bool) -> None:
    def run(model: nn.Module, optimizer: NGSGD) -> None:
        for part in (slice(0, 4), slice(4, 9), slice(9, 16)):
            (ce(model(X[part]), Y[part]) / 3).backward()
            if is_clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert_counts(lambda: affine(Head), run, NUM)


def two_heads(model: Any) -> None:
    left, right = model(X)
    ce(left, Y).backward(retain_graph=True)
    ce(right, Y).backward()


def two_losses(model: Any) -> None:
    output = model(X)
    ce(output, Y).backward(retain_graph=True)
    functional.mse_loss(output, T).backward()


@pytest.mark.parametrize(("build", "passes", "times"), [
    (heads, two_heads, 1), (heads, two_heads, 3), (lambda: affine(Head), two_losses, 2)])
def test_passes_of_one_minibatch_count_once(build: Callable[[], nn.Module],
                                            passes: Callable[[Any], None], times: int) -> None:
    def run(model: nn.Module, optimizer: NGSGD) -> None:
        for _ in range(times):
            passes(model)
    assert_counts(build, run, times * NUM)


def replica_loss(model: nn.Module) -> Any:
    """A loss of functions of the parameters, as in the replicas of DataParallel."""
    parameters = {name: p * 1.0 for name, p in model.named_parameters()}
    return ce(torch.func.functional_call(model, parameters, (X,)), Y)


# passes with plain gradients
PLAIN: dict[str, Callable[[nn.Module], object]] = {
    "create_graph": lambda model: ce(model(X), Y).backward(create_graph=True),
    "replicas": lambda model: replica_loss(model).backward(),
}


@pytest.mark.entry("F14")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("case", PLAIN)
def test_passes_with_plain_gradients_count(case: str) -> None:
    assert_counts(affine, lambda model, optimizer: PLAIN[case](model), NUM)


def test_passes_of_adamw_layers_alone_do_not_count() -> None:
    torch.manual_seed(0)
    models: list[Any] = [affine(Head), affine(Head)]
    models[1].load_state_dict(models[0].state_dict())
    for model, num_samples in zip(models, (None, NUM), strict=True):
        optimizer = NGSGD(model, 1e-3, loss_reduction="mean", fallback="adamw")
        before = model[0].weight.detach().clone()
        ce(model(X), Y).backward()
        ce(model[2](data(7, 8)), Y[:7]).backward()
        optimizer.step(num_samples=num_samples)
        assert not torch.equal(model[0].weight, before)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_a_closure_counts_its_last_pass() -> None:
    torch.manual_seed(0)
    models = [affine(), affine()]
    models[1].load_state_dict(models[0].state_dict())
    for model, num_samples in zip(models, (None, NUM), strict=True):
        optimizer = NGSGD(model, 1e-3, loss_reduction="mean")

        def closure(model: nn.Module = model, optimizer: NGSGD = optimizer) -> float:
            optimizer.zero_grad()
            loss = ce(model(X), Y)
            loss.backward()
            return float(loss.detach())
        for _ in range(3):
            optimizer.step(closure, num_samples=num_samples)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_other_models_do_not_count() -> None:
    def run(model: nn.Module, optimizer: NGSGD) -> None:
        other = affine()
        NGSGD(other, loss_reduction="mean")
        ce(model(X), Y).backward()
        ce(other(X), Y).backward()
        torch.autograd.grad(ce(model(X), Y), list(model.parameters()))
    assert_counts(affine, run, NUM)


def test_models_that_train_in_threads_count_their_own_losses() -> None:
    results: dict[tuple[int, int | None], list[Tensor]] = {}

    def run(size: int, given: int | None) -> None:
        model = affine()
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        optimizer = NGSGD(model, 1e-3, loss_reduction="mean")
        for _ in range(20):
            optimizer.zero_grad()
            ce(model(X[:size].detach()), Y[:size]).backward()
            optimizer.step(num_samples=given)
        results[size, given] = list(model.parameters())

    threads = [threading.Thread(target=run, args=case) for case in ((4, None), (9, None), (4, 4), (9, 9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in (4, 9):
        assert all(torch.equal(p, q) for p, q in zip(results[size, None], results[size, size], strict=True))
        assert not torch.equal(results[size, None][-1], torch.full((3,), 0.1))


def test_passes_of_unknown_losses_that_were_cleared_do_not_count() -> None:
    def run(model: nn.Module, optimizer: NGSGD) -> None:
        left, right = model(X)
        (ce(left, Y) + ce(right[:4].clone(), Y[:4])).backward()
        model.zero_grad(set_to_none=False)
        ce(model(X)[0], Y).backward()
    assert_counts(heads, run, NUM)


# losses whose samples cannot be known
UNKNOWN: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]] = {
    "two numbers": (sequence, lambda m: (ce(m(FRAMES).flatten(0, 1), Y_FRAMES.flatten())
                                         + ce(m(FRAMES).mean(1), Y)).backward()),
    "two numbers in two passes": (heads, lambda m: (ce(m(X)[0], Y).backward(),
                                                    ce(m(X[:4])[1], Y[:4]).backward())),
    "an own loss of positions": (sequence, lambda m: doubled(m(FRAMES)).backward()),
    "means of unknown dimensions": (lambda: nn.LSTM(5, 3),
                                    lambda m: m(FRAMES)[0].unfold(1, 4, 4).sum(-1).square().mean().backward()),
    "passes that end in different experts": (Experts, lambda m: [(ce(m(X, i), Y) / 2).backward() for i in range(2)]),
    "passes that end in other experts": (lambda: Experts(Head), lambda m: [ce(m(X, i), Y).backward(retain_graph=True)
                                                                          for i in range(2)]),
    "a mean of two experts": (Experts, lambda m: (sum(ce(m(X, i), Y) for i in range(2)) / 2).backward()),
    "a mean of experts with half of the samples": (
        Experts, lambda m: torch.stack([ce(one, Y[:8]) for one in m.halves(X)]).mean().backward()),  # type: ignore[operator]
    "a mean of two calls": (affine, lambda m: ((ce(m(X), Y) + ce(m(X + 1), Y)) / 2).backward()),
    "weights of two calls": (
        affine, lambda m: (0.5 * (m(X) - T).square().mean() + 0.5 * (m(X + 1) - T).square().mean()).backward()),
    "gradients that were set": (affine, lambda m: all_of(m, lambda p: setattr(p, "grad", torch.ones_like(p)))),
}


@pytest.mark.entry("F14")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_number_of_samples_is_refused_before_anything_moves(case: str) -> None:
    build, run = UNKNOWN[case]
    torch.manual_seed(0)
    model = build()
    optimizer = NGSGD(model, 1e-3, loss_reduction="mean", fallback="sgd")
    before = [p.detach().clone() for p in model.parameters()]
    run(model)
    with pytest.raises(ConfigError, match="num_samples"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.step(num_samples=NUM)
    assert not torch.equal(next(model.parameters()), before[0])


@pytest.mark.slow
@pytest.mark.parametrize("compiles_loss", [False, True])
def test_a_compiled_model_counts_the_loss_outside_of_it(compiles_loss: bool) -> None:
    torch.manual_seed(0)
    model = affine()
    torch.compiler.reset()

    def run(model: nn.Module, optimizer: NGSGD) -> None:
        if compiles_loss:
            torch.compile(lambda x: ce(model(x), Y), backend="aot_eager")(X.detach()).backward()
        else:
            ce(torch.compile(model, backend="aot_eager")(X.detach()), Y).backward()
    if compiles_loss:
        with pytest.raises(ConfigError, match="num_samples"):
            stepped(model, run)
    else:
        assert_counts(affine, run, NUM)
