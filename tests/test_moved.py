"""Names of earlier versions still work, and warn with the name of today."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

import ngsgd
from ngsgd import curvature, hypergrad, moved
from ngsgd.hypergrad.search_space import HyperSpace
from ngsgd.optim import layers

# of hypergrad; curvature.Call and two names of optim.layers follow below
RENAMED_IN_HYPERGRAD = {
    "Evaluation": "HypergradientRun", "Place": "MinibatchIndex", "Plan": "HyperparameterPlan",
    "Report": "HypergradientReport", "Search": "SearchResult", "Settings": "BaseHyperparameters",
    "Task": "TrainingTask", "Trial": "SearchTrial", "evaluate": "evaluate_hyperparameters",
    "tune": "tune_hyperparameters"}
RENAMED = [(hypergrad, old, new) for old, new in RENAMED_IN_HYPERGRAD.items()] + [
    (curvature, "Call", "LayerCall"), (layers, "Settings", "FisherSettings"),
    (layers, "Shared", "LayerContext")]


def import_for_the_first_time(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[Any]]:
    """Import `name` as if no module of an old name were loaded; the module and the warnings."""
    for old in moved.MOVED:
        monkeypatch.delitem(sys.modules, old, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
    return module, [warning for warning in caught if name in str(warning.message)]


@pytest.mark.parametrize(("old", "new"), moved.MOVED.items())
def test_an_old_module_name_gives_the_module_of_the_new_name(
        old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, caught = import_for_the_first_time(old, monkeypatch)
    assert module is importlib.import_module(new)
    assert sys.modules[old] is sys.modules[new] is module
    assert any(warning.category is DeprecationWarning and new in str(warning.message) for warning in caught)


@pytest.mark.parametrize(("old", "new"), moved.MOVED.items())
def test_a_module_keeps_its_spec_and_its_name(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = import_for_the_first_time(old, monkeypatch)
    assert module.__name__ == new
    assert module.__spec__ is not None and module.__spec__.name == new
    assert module.__spec__.loader is module.__loader__


def test_a_second_import_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    import_for_the_first_time("ngsgd.egs", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("ngsgd.egs")


def test_the_warning_points_to_the_line_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    for old in moved.MOVED:
        monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match="ngsgd.egs") as caught:
        exec(compile("import ngsgd.egs", "a_script.py", "exec"), {})
    assert [warning.filename for warning in caught] == ["a_script.py"]


def test_an_old_package_is_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ngsgd.egs", raising=False)
    monkeypatch.delattr(ngsgd, "egs", raising=False)
    with pytest.warns(DeprecationWarning, match="ngsgd.data"):
        assert ngsgd.egs is ngsgd.data


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_attribute_gives_the_object_of_the_new_name(module: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\b{new}\b"):
        assert getattr(module, old) is getattr(module, new)
    assert old not in module.__all__


def test_the_old_method_of_a_search_space_gives_the_same_point() -> None:
    space = HyperSpace(hypergrad.BaseHyperparameters(0.1, 0.01), ("0", "2"), num_steps=4)
    with pytest.warns(DeprecationWarning, match="center"):
        assert torch.equal(space.centre(), space.center())
