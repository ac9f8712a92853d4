"""A script without a main guard is rejected before a worker imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = "from ngsgd.cluster.main_guard import require_main_guard\n"


@pytest.mark.parametrize(("script", "is_rejected"), [
    ("require_main_guard()\n", True),
    ("def main():\n    require_main_guard()\n\n\nmain()\n", True),
    ("require_main_guard()\nif __name__ == '__main__':\n    pass\n", True),
    ("if __name__ == '__main__':\n    require_main_guard()\n", False),
    ("def main():\n    require_main_guard()\n\n\nif __name__ == '__main__':\n    main()\n", False)])
def test_a_script_needs_the_guard_before_the_call(script: str, is_rejected: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CALL + script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert done.returncode == is_rejected
    assert ("ConfigError" in done.stderr) == is_rejected, done.stderr


def test_a_command_and_a_module_of_a_package_are_not_imported_by_workers(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", f"{CALL}require_main_guard()"], check=False).returncode == 0
    (tmp_path / "__main__.py").write_text(f"{CALL}require_main_guard()\n")
    assert subprocess.run([sys.executable, "-m", tmp_path.name], cwd=tmp_path.parent, check=False).returncode == 0
