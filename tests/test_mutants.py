"""The list of mutants fits the code, so that `make mutants` can run."""

from __future__ import annotations

import pytest

from tests import fault_mutants
from tests.mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    assert (REPOSITORY / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", fault_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_changes_one_place(mutant: fault_mutants.FaultMutant) -> None:
    assert (REPOSITORY / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
