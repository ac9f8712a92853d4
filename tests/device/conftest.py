"""The tests of the pretended device do not run where torch lacks the functions that make it."""

from __future__ import annotations

from torch.utils import backend_registration

_IS_OLD = not hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
collect_ignore_glob = ["test_*.py"] if _IS_OLD else []
