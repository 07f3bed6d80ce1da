"""Hooks of the site (mkdocs.yml): pages from outside docs/, and links to files that are no pages.

A page of docs/ has the same path in the repository and on the site but for the folder; pages of experiments/ and the
root keep theirs. A link to a source file, which the site does not have, becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures of experiments/ and two pages of the root."""
    outside = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    outside += [path for path in (ROOT / "experiments").rglob("*") if path.suffix in (".md", ".png", ".svg")]
    for path in sorted(outside):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=os.fspath(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the relative links of a page, which are those of the repository, for the site."""
    here = page.file.src_uri
    in_docs = (ROOT / "docs" / here).exists()

    def rewrite(match: re.Match[str]) -> str:
        mark, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join("docs" if in_docs else "", posixpath.dirname(here), link))
        target = {"README.md": "docs/index.md"}.get(target, target).removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return text
        return f"{mark}[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(rewrite, markdown)
