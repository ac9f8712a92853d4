"""Names of earlier versions lead to the same modules and classes."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import ngsgd
from ngsgd.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_name_gives_the_module_of_the_new_name(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        found = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    assert found is new
    assert (new.__name__, new.__spec__ and new.__spec__.name) == (MOVED[old], MOVED[old])


def test_an_old_package_is_an_attribute_of_the_library() -> None:
    sys.modules.pop("ngsgd.egs", None)
    vars(ngsgd).pop("egs", None)
    with pytest.warns(DeprecationWarning, match=r"ngsgd\.data"):
        assert ngsgd.egs is ngsgd.data


@pytest.mark.slow
def test_an_old_name_works_in_a_fresh_process() -> None:
    code = ("import warnings; warnings.simplefilter('error'); warnings.filterwarnings('ignore', category=DeprecationWarning); "
            "from ngsgd.egs.reader import EgsReader; import ngsgd.data.reader as new; assert new.EgsReader is EgsReader")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
