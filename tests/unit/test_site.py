"""The documentation as a site: it builds, its links lead somewhere, and its pages ask nothing of other hosts."""

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
#: Tags whose address a browser requests when it shows the page.
REQUESTED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "use"}
LINK_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "dns-prefetch"}


class Page(HTMLParser):
    """Anchors, links, and requested addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.requested = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        addresses = [values[key] for key in ("href", "src", "data", "srcset") if values.get(key)]
        if tag in REQUESTED or (tag == "link" and LINK_RELATIONS & set(values.get("rel", "").split())):
            self.requested += addresses
        if tag != "link" or tag in REQUESTED:
            self.links += addresses


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not built.stderr
    return folder


@cache
def page(path):
    return Page(path.read_text(encoding="utf-8"))


def target_of(source, address):
    """Return the file that a relative address leads to."""
    path = source if not address.path else (source.parent / unquote(address.path))
    return path / "index.html" if path.is_dir() else path


def test_links_lead_to_files_and_anchors_of_the_site(site):
    broken = []
    for source in sorted(site.rglob("index.html")):
        for link in page(source).links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = target_of(source, address)
            if not target.is_file() or (address.fragment and address.fragment not in page(target).anchors):
                broken.append(f"{source.relative_to(site)}: {link}")
    assert not broken


def test_a_page_requests_nothing_of_other_hosts(site):
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > len(PAGES) > 20
    assert styles
    requested = {address for each in pages for address in page(each).requested}
    for text in (each.read_text(encoding="utf-8") for each in [*styles, *pages]):
        requested |= set(re.findall(r"url\(\s*[\"']?([^\"')]+)", text)) | set(
            re.findall(r"@import\s+[\"']([^\"']+)", text)
        )
    assert {address for address in requested if address.endswith((".js", ".css"))}
    assert not {address for address in requested if address.startswith(("http:", "https:", "//"))}
    assert not [each for each in pages if 'class="mermaid"' in each.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_blocks_in_a_list_are_indented_as_both_github_and_the_site_need(path):
    in_block, wrong = False, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = line.lstrip().startswith("```")
        if not in_block and re.match(r" {1,3}(```|[-*] |\d+\. )", line):
            wrong.append(f"line {number}: indent by 4: {line.strip()}")
        in_block ^= fence
    assert not wrong
