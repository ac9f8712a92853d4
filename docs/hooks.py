"""Replace links from pages to files outside of docs/ by the name of the file.

Such links work on the code host and not on the site.

A link to a file that is not there ends the build, which MkDocs itself would not notice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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

    return _OUTSIDE.sub(replaced, markdown)
