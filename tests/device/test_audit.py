"""Every public name runs on a pretended device: right devices, few launches, no wait but those of
the table.

The cases run in one separate process (see `pretended`).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ngsgd
import ngsgd.curvature
import ngsgd.optim
import ngsgd.preconditioners
from ngsgd.config import ModelConfig
from tests.device import waits
from tests.device.cases import CASES, NOT_RUN
from tests.device.equality import MISTAKES

ROOT = Path(__file__).parents[2]
# names that compute nothing on a device by themselves, and KFRA, as in NOT_RUN
_NO_STEP = {"DummyObject", "METHODS", "Preconditioner", "GradientMaker", "Optimizer", "StepActivity", "KFRA"}
# tests that look at certain cases
_READ_MANY = {"test_no_update_of_estimates_waits"}
# launches relative to torch.optim.SGD(momentum, foreach=True): 55 to 35, 75 to 41, 140 to 119, 220
# to 141, 70 to 47
GOALS = {"mlp": 1.572, "tdnn": 1.83, "gpt": 1.177, "resnet14": 1.561, "3c3d": 1.49}


@functools.cache
def _run(*arguments: str) -> dict[str, Any]:
    # the limit of the test is enough: the process ends with it
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the audit prints of the cases that selected tests ask for."""
    own = [item for item in request.session.items
           if isinstance(item, pytest.Function) and item.module.__name__ == __name__]
    asked = {item.callspec.params.get("case") for item in own if hasattr(item, "callspec")}
    names = {name for name in CASES if name in asked}
    if any(item.originalname in _READ_MANY for item in own):
        names |= {"NGSGD"}
    return _run("tests.device.audit", *sorted(names))


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    """What `tests.device.launches` prints."""
    return _run("tests.device.launches")


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_a_step_runs_on_the_device_and_waits_only_where_listed(
        case: str, seen: dict[str, Any]) -> None:
    assert "error" not in seen[case], seen[case]
    for place, steps in seen[case]["waits"].items():
        wait = waits.allowed(place)
        assert wait is not None, f"the host waits {place}"
        assert steps <= wait.steps, (place, steps)


@pytest.mark.parametrize("net", GOALS)
def test_a_step_launches_little_more_than_sgd_and_never_waits(net: str, launched: dict[str, Any]) -> None:
    """The mean of a period: a step records an update, and the next one computes it."""
    own, sgd = launched[net]["NGSGD"], launched[net]["torch.optim.SGD"]
    assert own["waits"] == []
    assert len(set(own["launches"])) > 1
    assert sum(own["launches"]) <= GOALS[net] * sum(sgd["launches"])


def test_no_update_of_estimates_waits(seen: dict[str, Any]) -> None:
    # 16 steps, update period 4
    assert len(set(seen["NGSGD"]["launches"])) > 1
    assert [place for place in seen["NGSGD"]["waits"] if "preconditioners" in place or "layers" in place] == []


def test_all_public_names_have_a_case() -> None:
    covered = {name for case in CASES.values() for name in case.names}
    packages = set(ngsgd.__all__) - {name for name in ngsgd.__all__
                                     if type(getattr(ngsgd, name)).__name__ == "module"}
    wanted = packages - {"load", "train"}
    wanted |= {name for name in dir(ngsgd.preconditioners) if name[0].isupper()} - _NO_STEP
    wanted |= {name for name in dir(ngsgd.optim) if name[0].isupper()} - _NO_STEP
    wanted |= set(ngsgd.curvature.QUANTITIES) - set(NOT_RUN)
    wanted |= set(ModelConfig.__dataclass_fields__["kind"].metadata.get("choices", ()))
    wanted |= {"ReversibleSGD"}
    assert wanted - covered == set()


def test_numbers_on_the_device_are_those_of_a_cpu() -> None:
    """Layers in batches there, one by one here; float32 sums in another order, over 30 steps."""
    found = _run("tests.device.equality")
    assert found
    for case, (of_parameters, of_estimates) in found.items():
        assert of_parameters < 1e-5, case
        assert of_estimates < 1e-4, case


def test_recorded_steps_are_bitwise_those_without_a_graph() -> None:
    """Parameters, Fisher estimates, counts and returned numbers after 40 steps."""
    found = _run("tests.device.graphed")
    for case, result in found.items():
        assert result.get("equal") == ["parameters", "numbers", "estimates", "calls", "activity"], (case, result)
        # a model that raises an error at NaN waits for the device in each step
        assert (result["graphs"] == 0) == (case == "raise")


@pytest.mark.parametrize("case", MISTAKES)
def test_the_audit_detects_a_tensor_on_the_wrong_device_and_a_wait(case: str) -> None:
    found = _run("tests.device.equality", *MISTAKES)[case]
    assert str(found).startswith("WrongDevice") if case in ("mixes devices", "no device") else found == 1


def test_the_table_of_the_page_is_that_of_the_tests() -> None:
    text = waits.PAGE.read_text(encoding="utf-8")
    assert waits.with_table(text) == text
    for wait in waits.WAITS:
        assert (ROOT / wait.file).exists(), wait
