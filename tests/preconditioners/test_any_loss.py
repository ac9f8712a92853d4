"""The empirical Fisher matrix of any loss that is a mean over `num_rows`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import KFAC, METHODS, GradientMaker
from tests.preconditioners.problems import Problem, close, directions, gradients_of, joint, problem
from tests.reference import preconditioners as dense

F = nn.functional
# KFRA needs second derivatives of the loss
SEES_ROWS = [kind for kind in METHODS if METHODS[kind].traits.fisher and kind != "kfra"]


def _ctc(f: Tensor, y: Tensor) -> Tensor:
    """Three frames for each sample, one label; the mean over samples."""
    log_p_TNC = torch.stack([f, 2.0 * f, f.flip(1)]).log_softmax(dim=2)
    lengths = torch.full_like(y, 3), torch.ones_like(y)
    losses: Tensor = F.ctc_loss(log_p_TNC, y.clamp(min=1)[:, None], *lengths, reduction="none")
    return losses.mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nll_loss": lambda f, y: F.nll_loss(f.log_softmax(dim=1), y),
    "log_softmax by hand": lambda f, y: -f.log_softmax(dim=1).gather(1, y[:, None]).mean(),
    "kl_div": lambda f, y: F.kl_div(f.log_softmax(dim=1), F.one_hot(y, 3) * 0.8 + 0.2 / 3,
                                    reduction="batchmean"),
    "smooth_l1": lambda f, y: F.smooth_l1_loss(f, F.one_hot(y, 3).to(f)),
    "cross-entropy and a penalty": lambda f, y: (F.cross_entropy(f, y)
                                                 + 0.1 * f.square().sum(dim=1).mean()),
    "ctc_loss": _ctc}


def _directions(kind: str, loss: Callable[[Problem], Tensor], num_rows: int | None, *,
                at_once: bool = False) -> dict[str, Tensor]:
    """After two steps, so that methods that look at a minibatch twice have done so."""
    case = problem("linear")
    return directions(METHODS[kind](case.model, damping=0.1), lambda: loss(case), at_once=at_once,
                      num_rows=num_rows)


@pytest.mark.entry("B15", 'you use a preconditioner with `fisher="empirical"` and a loss other '
                          "than cross-entropy, mean squared error or binary cross-entropy: "
                          "nll_loss, kl_div, smooth_l1, CTC, a custom one", "works",
                   "with `evaluate(closure, num_rows=)`, `watch(num_rows=)` or "
                   "`forward_and_backward(num_rows=)` the loss counts as a mean over so many rows; "
                   "without it ConfigError names `num_rows=`")
@pytest.mark.parametrize("at_once", [False, True])
# the Gauss-Newton matrix of Hessian-free needs a loss that is recognized
@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind not in ("hessian_free", "ksd", "kfra")])
def test_log_likelihoods_written_out_have_the_direction_of_cross_entropy(kind: str,
                                                                         at_once: bool) -> None:
    """The same function of the output; methods that take any loss may be given its rows, too."""
    wanted = _directions(kind, lambda case: F.cross_entropy(case.model(case.x), case.y), None,
                         at_once=at_once)
    found = _directions(kind, lambda case: LOSSES["nll_loss"](case.model(case.x), case.y), 6,
                        at_once=at_once)
    for name, value in wanted.items():
        close(found[name], value)


@pytest.mark.entry("B15")
@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_the_gradients_with_respect_to_the_output(name: str) -> None:
    case = problem("linear")
    first, tanh, last = case.model.children()
    preconditioner = KFAC(case.model, damping=0.1)
    preconditioner.evaluate(lambda: LOSSES[name](case.model(case.x), case.y),
                            num_rows=case.num_rows)
    plain = gradients_of(case.model)
    preconditioner.step(lr=0.01)
    found = gradients_of(case.model)
    z = first(case.x)
    h = tanh(z)
    f = last(h)
    e_z, e_f = torch.autograd.grad(LOSSES[name](f, case.y) * case.num_rows, (z, f))
    for layer, x, e in (("0", case.x, e_z), ("2", h, e_f)):
        a_NTI = torch.cat([x.detach(), torch.ones(len(x), 1, dtype=x.dtype)], dim=1)[:, None]
        close(joint(found, layer), dense.kfac(a_NTI, e[None, :, None], joint(plain, layer), 0.1,
                                              num_rows=case.num_rows, sharing="expand"))


def _part_of_loss(case: Problem, part: slice) -> Tensor:
    y = case.y[part]
    return LOSSES["smooth_l1"](case.model(case.x[part]), y) * (len(y) / 6.0)


@pytest.mark.entry("B15")
@pytest.mark.parametrize("kind", ["kfac", "smw", "kbfgs"])
def test_passes_before_a_step_are_one_mean(kind: str) -> None:
    found = []
    for parts in ((slice(0, 6),), (slice(0, 4), slice(4, 6))):
        case = problem("linear")
        preconditioner = METHODS[kind](case.model, damping=0.1)
        for _ in range(2):
            case.model.zero_grad()
            for part in parts:
                preconditioner.evaluate(partial(_part_of_loss, case, part),
                                        num_rows=len(case.y[part]))
            preconditioner.step(lr=0.01)
            torch.optim.SGD(case.model.parameters(), lr=0.01).step()
        found.append([p.detach() for p in case.model.parameters()])
    for one, other in zip(*found, strict=True):
        close(one, other)


@pytest.mark.entry("B15")
def test_the_maker_and_watch_take_the_number_of_rows() -> None:
    wanted, case, watched = problem("linear"), problem("linear"), problem("linear")
    KFAC(wanted.model).evaluate_and_step(
        lambda: LOSSES["nll_loss"](wanted.model(wanted.x), wanted.y), num_rows=6)
    maker = GradientMaker(case.model, KFAC(case.model))
    maker.setup_loss_call(LOSSES["nll_loss"], maker.setup_model_call(case.model, case.x), case.y)
    maker.forward_and_backward(num_rows=6)
    preconditioner = KFAC(watched.model)
    with preconditioner.watch(num_rows=6):
        LOSSES["nll_loss"](watched.model(watched.x), watched.y).backward()
    preconditioner.step()
    for one, other, third in zip(case.model.parameters(), wanted.model.parameters(),
                                 watched.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and third.grad is not None
        close(one.grad, other.grad)
        close(third.grad, other.grad)


@pytest.mark.entry("B15")
def test_a_pass_that_failed_leaves_no_rows() -> None:
    case, again = problem("linear"), problem("linear")
    preconditioner, wanted = KFAC(case.model), KFAC(again.model)
    with pytest.raises(ZeroDivisionError):
        preconditioner.evaluate(lambda: 1 / 0, num_rows=6)  # type: ignore[arg-type,return-value]
    for each, of in ((preconditioner, case), (wanted, again)):
        each.evaluate(partial(_part_of_loss, of, slice(None)), num_rows=6)
        each.step()
    for name, known in wanted.statistics.items():
        assert all(torch.equal(preconditioner.statistics[name][key], value)
                   for key, value in known.items())


@pytest.mark.entry("B15")
@pytest.mark.parametrize("name", ["nll_loss", "log_softmax by hand"])
@pytest.mark.parametrize("fisher", ["empirical", "exact", "mc"])
def test_without_the_number_of_rows_the_error_names_it(name: str, fisher: str) -> None:
    case = problem("linear")

    def loss() -> Tensor:
        return LOSSES[name](case.model(case.x), case.y)
    preconditioner = KFAC(case.model, fisher=fisher)
    with pytest.raises(ConfigError, match="num_rows"):
        preconditioner.evaluate(loss)
    if fisher != "empirical":
        with pytest.raises(ConfigError, match="empirical"):
            preconditioner.evaluate(loss, num_rows=6)
        return
    with pytest.raises(ConfigError, match="at least 1"):
        preconditioner.evaluate(loss, num_rows=0)
    mixed = KFAC(case.model)
    mixed.evaluate(lambda: F.cross_entropy(case.model(case.x), case.y))
    with pytest.raises(ConfigError, match="num_rows"):
        mixed.evaluate(loss, num_rows=6)
