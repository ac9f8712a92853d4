"""Replace what only a code host needs, before MkDocs renders a page.

- Links to files outside of docs/ become the name of the file. A link to a file that is not there
  ends the build, which MkDocs itself would not notice.
- Entries of the Python reference become directives of mkdocstrings, which render the complete
  docstring.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tools.python_reference import ENTRY

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs calls this for every page."""
    docs, source = Path(config["docs_dir"]), Path(page.file.abs_src_path)
    root = docs.parent

    def replaced(found: re.Match[str]) -> str:
        target = (source.parent / found[2]).resolve()
        if target.is_relative_to(docs):
            return found[0]
        if not target.exists():
            raise FileNotFoundError(f"{source}: {found[2]} is not there")
        path = target.relative_to(root).as_posix()
        return found[1] if found[1] == path else f"{found[1]} (`{path}`)"

    markdown = _OUTSIDE.sub(replaced, markdown)
    if page.file.src_uri.startswith("reference/python"):
        markdown = ENTRY.sub(r"::: \1\n\n", markdown + "\n")
    return markdown
