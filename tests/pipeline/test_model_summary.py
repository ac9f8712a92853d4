"""Layers and parameter counts of a model."""

from __future__ import annotations

import torch
from torch import nn

from ngsgd.pipeline.base_run import summary


def test_every_module_with_parameters_has_a_row_and_shared_ones_count_once() -> None:
    layer = nn.Linear(3, 2)
    total, *rows = summary(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(2, 4, bias=False)))
    assert "16 parameters" in total
    assert [row.split()[0] for row in rows] == ["0", "3"] and [row.split()[-1] for row in rows] == ["8", "8"]
    # fixed ones are counted apart
    layer.weight.requires_grad_(False)
    assert "8 parameters" in summary(layer)[0] and " 6 " in summary(layer)[0]


def test_a_deep_model_has_one_row_for_each_top_level_module() -> None:
    body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    _total, *rows = summary(nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)}))
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [("body", "800"), ("head", "10")]


def test_names_are_those_of_public_layers() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.ones(3))

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Parameter(torch.ones(3))

    names = [row.split()[:2] for row in summary(nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": Own()}))[1:]]
    assert names == [["a", "MultiheadAttention"], ["a.out_proj", "Linear"], ["b", "Own"]]
    assert summary(Weights())[1].split()[:2] == ["(model)", "Weights"]
    private = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert all(hasattr(nn, row.split()[1]) for row in summary(nn.Sequential(private))[1:])
