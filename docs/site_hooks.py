"""Hooks of the site (mkdocs.yml): pages from outside docs/, links to files that are not pages, formulas, and doctests.

A page of docs/ has the same path in the repository and on the site except for the folder; pages of experiments/ and the
root keep theirs. A link to a source file, which is not on the site, becomes plain text.

Formulas are written as GitHub renders them: $`x^2`$ in a line, and blocks fenced as ```math. latex2mathml converts them
when the site is built, so a page needs no script.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r"^```math\n(?P<block>.*?)^```$|\$`(?P<inline>[^`\n]+)`\$", re.M | re.S)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)  # up to a blank line
LOG = '<mo lspace="0.17em" rspace="0.17em">log</mo>'  # latex2mathml's is an identifier, which has no space around it


class Formulas(Preprocessor):
    """Replaces formulas by MathML, and puts a doctest of a docstring into a code block."""

    def run(self, lines: list[str]) -> list[str]:
        def to_mathml(match: re.Match[str]) -> str:
            mathml = convert(match["inline"] or match["block"], display="inline" if match["inline"] else "block")
            mathml = mathml.replace("<mi>log</mi>", LOG)
            return str(self.md.htmlStash.store(mathml if match["inline"] else f"<p>{mathml}</p>"))

        text = FORMULA.sub(to_mathml, "\n".join(lines))
        return DOCTEST.sub(r"```pycon\n\g<0>\n```", text).split("\n")


class FormulasExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        md.preprocessors.register(Formulas(md), "formulas", 29)  # before the fences of superfences, 25


def on_config(config: Any) -> Any:
    """Add the extension to the pages and to the docstrings of the API reference."""
    config.markdown_extensions.append(FormulasExtension())
    return config


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
