"""What people import, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import ngsgd


@pytest.mark.parametrize("name", ngsgd.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ngsgd, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        ngsgd.no_such_thing  # noqa: B018


def test_the_library_part_needs_torch_and_numpy_only() -> None:
    code = textwrap.dedent("""
        import sys
        for name in ("ray", "hydra", "omegaconf", "mlflow", "rich", "matplotlib", "safetensors", "psutil", "kaldifst"):
            sys.modules[name] = None          # importing it raises ImportError
        import ngsgd
        assert "torch" not in sys.modules     # lazy
        import torch
        model = torch.nn.Linear(3, 2)
        optimizer = ngsgd.NGSGD(model, lr=0.1)
        torch.nn.functional.cross_entropy(model(torch.randn(5, 3)), torch.zeros(5).long(), reduction="sum").backward()
        optimizer.step()
        ngsgd.average_parameters([model.state_dict()] * 2)
    """)
    subprocess.run([sys.executable, "-c", code], check=True)
