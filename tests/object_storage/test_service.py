"""Runs against an S3 service over HTTP that fails: equal models, nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.object_storage.service import Fault, running
from tests.object_storage.trials import LENGTHS, Trials

pytestmark = [pytest.mark.faults, pytest.mark.same_process("object storage service")]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with pytest.MonkeyPatch.context() as patch, running(patch.setenv) as service:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = Trials(service, tmp_path_factory.mktemp("runs"))
        yield found
        found.trainer.close()


@pytest.mark.parametrize(("kind", "part"), [
    ("kill_before", 0.1), ("kill_before", 0.97), ("kill_after", 0.5), ("lost_answer", 0.3), ("error_500", 0.6), ("slow_down", 0.5),
    ("timeout", 0.1), ("timeout", 0.97), ("expired", 0.5), ("stale_lists", 0.7)])
def test_a_failing_write_changes_no_result(trials: Trials, kind: str, part: float) -> None:
    fault = Fault(kind, max(1, int(part * trials.num_writes)), LENGTHS.get(kind, 1))
    assert list(trials.problems(fault)) == []


def test_a_process_that_was_replaced_during_a_pause_changes_nothing(trials: Trials) -> None:
    assert list(trials.interrupted_by_another(int(0.4 * trials.num_writes))) == []
