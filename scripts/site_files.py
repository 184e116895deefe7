"""Hooks of mkdocs.yml: pages may link to files outside docs/, and the links work in a checkout and on the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_ABOVE_DOCS = re.compile(r"\]\(((?:\.\./)+)([\w./@-]+)\)")
_NAMED_BY_FILE = re.compile(r"\[([\w-]+\.md)\]\(((?:\.\./)*)\1\b")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the icon, and each file outside docs/ that a page links to."""
    files.append(File.generated(config, "icon.svg", abs_src_path=str(ROOT / "app" / "icon.svg")))
    linked = {
        name
        for page in files.documentation_pages()
        for up, name in _ABOVE_DOCS.findall(Path(page.abs_src_path or "").read_text(encoding="utf-8"))
        if _is_above_docs(up, page)
    }
    for name in sorted(linked):
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page with links as the site needs them: to copies of files, and named by a page's title."""
    markdown = _ABOVE_DOCS.sub(
        lambda link: f"]({link[1][3:]}{link[2]})" if _is_above_docs(link[1], page.file) else link[0], markdown
    )
    return _NAMED_BY_FILE.sub(lambda link: f"[{_title(link[1])}]({link[2]}{link[1]}", markdown)


def _is_above_docs(up: str, page: File) -> bool:
    """Return whether these `../` lead from the folder of a page out of docs/."""
    return up.count("/") > page.src_uri.count("/")


def _title(page: str) -> str:
    path = ROOT / "docs" / page
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") if path.is_file() else page
