"""The list of mutants fits the code, so that `make mutants` can run."""

from __future__ import annotations

import ast

import pytest

from tests import fault_mutants, generated_mutants
from tests.mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    assert (REPOSITORY / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", fault_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_changes_one_place(mutant: fault_mutants.FaultMutant) -> None:
    assert (REPOSITORY / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_mutants_of_the_source_are_drawn_by_a_seed_and_can_be_parsed() -> None:
    drawn = generated_mutants.sample(60, seed=1)
    assert len({(mutant.file, mutant.new) for mutant in drawn}) > 50
    assert {mutant.name.partition(":")[0] for mutant in drawn} > {"comparison", "one_more", "no_field"}
    for mutant in drawn:
        ast.parse(mutant.new)
        assert mutant.new != mutant.old == (REPOSITORY / mutant.file).read_text()
    assert drawn == generated_mutants.sample(60, seed=1) != generated_mutants.sample(60, seed=2)
    assert all((REPOSITORY / test).exists() for tests in generated_mutants.FILES.values() for test in tests)
