"""`skip`: modules, classes and single parameters that keep their plain gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig
from ngsgd.errors import ConfigError
from ngsgd.preconditioners import KFAC, METHODS, Shampoo
from ngsgd.preconditioners.build import make_preconditioner
from tests.preconditioners.problems import close, gradients_of, joint, problem
from tests.preconditioners.support import Scale
from tests.reference import preconditioners as dense

N, T, D = 4, 3, 4
CE = nn.functional.cross_entropy


class Vit(nn.Module):
    """A vision transformer of one block, with parameters at its root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cls_token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, T + 1, D))
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)
        self.scale, self.head = Scale(), nn.Linear(D, 3)

    def forward(self, x_NTD: Tensor) -> Tensor:
        h = torch.cat([self.cls_token.expand(len(x_NTD), 1, D), x_NTD], dim=1) + self.positions
        h = h + self.scale(self.attn(h, h, h, need_weights=False)[0])
        f: Tensor = self.head(h[:, 0])
        return f


@pytest.mark.entry("P12", "you skip single parameters: the class token and positions at the root "
                          "of a ViT, LayerScale, `attn.in_proj_weight`", "works",
                   '`skip=("cls_token", "*.gamma", "attn.in_proj_weight")` leaves them their plain '
                   "gradient; a name of a module or of a class means all parameters inside of it; "
                   "an entry that matches nothing is a ConfigError with similar names")
# KFRA refuses branches
@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind != "kfra"])
def test_single_parameters_keep_their_gradient(kind: str) -> None:
    model = Vit().double()
    x, y = torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3
    skip = ("cls_token", "posit*", "attn.in_proj_weight", "*.gamma")
    # pairs of L-BFGS need positive curvature
    preconditioner = METHODS[kind](model, damping=10.0 if kind == "lbfgs" else 0.1, skip=skip)
    for _ in range(2):  # some methods begin with the gradient itself
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
        preconditioner.evaluate(lambda: CE(model(x), y))
        plain = gradients_of(model)
        preconditioner.step(lr=0.01)
    found = gradients_of(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, g in plain.items():
        is_skipped = name in ("cls_token", "positions", "attn.in_proj_weight", "scale.gamma")
        assert torch.equal(found[name], g) == is_skipped, name


@pytest.mark.entry("P12")
def test_a_weight_without_its_bias_is_a_layer_without_bias() -> None:
    case = problem("linear")
    plain, found = (case.gradients(),
                    case.preconditioned(KFAC(case.model, damping=0.1, skip=("0.bias", "2.weight"))))
    for layer, a_NTI, e_VNTO in case.layers():
        if layer == "0":
            wanted = dense.kfac(a_NTI[..., :-1], e_VNTO, plain["0.weight"], 0.1,
                                num_rows=case.num_rows, sharing="expand")
            close(found["0.weight"], wanted)
            close(found["0.bias"], plain["0.bias"])
        else:  # a bias without its weight has the diagonal
            close(found["2.weight"], plain["2.weight"])
            squares = e_VNTO.sum(dim=2).square().sum(dim=(0, 1)) / case.num_rows
            close(found["2.bias"], plain["2.bias"] / (squares + 0.1))


@pytest.mark.entry("P12")
@pytest.mark.parametrize("skip", [("2",), ("1", "again"), ("_Output",)])
def test_a_module_skips_all_its_parameters_by_any_of_their_names(skip: tuple[str, ...]) -> None:
    class _Output(nn.Linear):
        """A class of the user's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), _Output(5, 5)).double()
    first, output = model[0], model[2]
    first.weight = output.weight  # one parameter, whose first name is that of the first layer
    model.forward = lambda x: output(first(x).tanh())  # type: ignore[method-assign]
    model.again = output
    preconditioner = KFAC(model, skip=skip)
    preconditioner.evaluate(lambda: CE(model(torch.randn(4, 5, dtype=torch.float64)),
                                       torch.arange(4)))
    plain = gradients_of(model)
    preconditioner.step(lr=0.01)
    kept = {name for name, g in gradients_of(model).items() if torch.equal(g, plain[name])}
    assert kept == {"0.weight", "2.bias"}


@pytest.mark.entry("P12")
@pytest.mark.parametrize("kind", ["kfac", "shampoo", "adam", "psgd"])
def test_entries_without_a_match_are_reported_with_similar_names(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        METHODS[kind](Vit(), skip=("cls_tokens", "MultiHeadAttention", "head", "*.q_proj.*"))
    first, second, third = error.value.problems
    assert "cls_token" in first and "MultiheadAttention" in second and "q_proj" in third


@pytest.mark.entry("P12")
def test_the_error_for_raw_parameters_names_the_skip_entries() -> None:
    model = Vit()
    preconditioner = KFAC(model)
    with pytest.raises(ConfigError) as error:
        preconditioner.evaluate(lambda: CE(model(torch.randn(N, T, D)), torch.arange(N) % 3))
    assert all(f'"{name}"' in str(error.value)
               for name in ("cls_token", "positions", "scale.gamma"))


def test_the_bias_of_a_skipped_weight_is_a_separate_block_for_shampoo() -> None:
    case, alone = problem("linear"), problem("linear")
    found = case.preconditioned(Shampoo(case.model, damping=0.1, skip=("0.weight",)))
    wanted = alone.preconditioned(Shampoo(alone.model, damping=0.1))
    close(found["0.bias"], wanted["0.bias"])  # Shampoo does not join them
    close(joint(found, "2"), joint(wanted, "2"))


@pytest.mark.parametrize("skip", ["later", "later.weight,now", "Bilinear"])
def test_a_run_may_skip_layers_that_are_still_to_be_added(skip: str) -> None:
    complete = nn.ModuleDict({"now": nn.Linear(2, 2), "later": nn.Bilinear(2, 2, 2)})
    network = nn.ModuleDict({"now": complete["now"]})
    config = OptimizerConfig("kfac", skip=skip)
    preconditioner = make_preconditioner(network, config, seed=0, complete=complete)
    assert preconditioner.skip == (("now.weight", "now.bias") if "now" in skip else ())
    with pytest.raises(ConfigError, match="skip has"):
        make_preconditioner(network, config, seed=0)
    with pytest.raises(ConfigError, match="nowhere"):
        make_preconditioner(network, OptimizerConfig("kfac", skip="nowhere"), 0, complete)
