"""docs/curvature.md: each cell of its support table is a test case, and its examples run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from ngsgd.curvature import QUANTITIES
from tests.curvature import test_against_definitions as definitions
from tests.curvature import test_kronecker as kronecker
from tests.curvature import test_products as products
from tests.curvature.problems import PROBLEMS
from tests.curvature.support import LOSSES, ROWS, WITHOUT_FACTORS, documented, pairs

_FACTORS = ("kfac", "kflr", "kfac_emp")
# (problem, loss) of the cases of each quantity
COMPUTED = {
    **dict.fromkeys((*definitions.FIRST, *definitions.GGN, *definitions.SAMPLED), pairs(definitions.CELLS)),
    **dict.fromkeys(("ggnmp", "hmp"), pairs(products.CELLS)),
    **dict.fromkeys(("diag_h", "batch_diag_h"), pairs(definitions.HESSIAN_CELLS)),
    "pchmp": pairs(products.POSITIVE_CELLS),
    **dict.fromkeys(_FACTORS, pairs(kronecker.CELLS)),
    "kfra": pairs(kronecker.CHAIN_CELLS)}
REFUSED = {
    **dict.fromkeys(("diag_h", "batch_diag_h"), definitions.NO_HESSIAN),
    "pchmp": products.NO_POSITIVE,
    **dict.fromkeys(_FACTORS, WITHOUT_FACTORS),
    "kfra": kronecker.NO_CHAINS}


def test_every_quantity_has_its_column() -> None:
    columns, _ = documented()
    named = [quantity for column in columns for quantity in column]
    assert sorted(named) == sorted(QUANTITIES)


def test_every_row_has_its_networks_and_every_network_its_row() -> None:
    _, rows = documented()
    assert list(rows) == list(ROWS)
    assert {name for names in ROWS.values() for name in names} == set(PROBLEMS)


def test_every_cell_of_the_table_is_tested() -> None:
    columns, rows = documented()
    untested = []
    for label, cells in rows.items():
        assert len(cells) == len(columns)
        assert set(cells) <= {"yes", "error"}
        for says, quantities in zip(cells, columns, strict=True):
            for quantity, name in itertools.product(quantities, ROWS[label]):
                tested = ({(name, loss) for loss in LOSSES} <= COMPUTED[quantity] if says == "yes"
                          else name in REFUSED.get(quantity, ()))
                if not tested:
                    untested.append((label, quantity, name, says))
    assert not untested


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, as one program."""
    text = (Path(__file__).parents[2] / "docs" / "curvature.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 5
    exec("\n".join(examples), {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert "torch.Size([64, 64, 3])" in printed and "torch.Size([192, 192])" in printed
    assert "torch.Size([128, 40]) torch.Size([32, 32])" in printed
