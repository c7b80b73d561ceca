"""Of the documentation site: the README opens its first page, and links out of docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READMES = {"index.md": "README.md", "index.zh.md": "README.zh-CN.md"}
OF_READMES = {"README.md": "index.md", "README.zh-CN.md": "index.zh.md"}


def from_docs(link: re.Match[str]) -> str:
    """A link of a README as it is from docs/; pages are linked by their English names, as in a translated page."""
    # The README's link to the documentation would lead from its own page to itself.
    if link[1] == "docs/index.md":
        return "](#all-pages)"
    target = OF_READMES.get(link[1], link[1])
    inside = target.startswith("docs/") or target in READMES
    return f"]({target.removeprefix('docs/').replace('.zh.md', '.md') if inside else f'../{target}'})"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with the README before it, if it is the first one, and with links that work on the site."""
    source = Path(page.file.src_uri).name
    if source in READMES:
        readme = (ROOT / READMES[source]).read_text(encoding="utf-8")
        # The site has a switch of languages of its own.
        readme = re.sub(r" · \[(中文|English)\]\(README.*?\)", "", readme, flags=re.MULTILINE)
        markdown = re.sub(r"\]\((?!https?://|#)([^)]+)\)", from_docs, readme) + "\n" + markdown
    markdown = re.sub(r"\]\(\.\./README(?:\.zh-CN)?\.md(#[^)]*)?\)", r"](index.md\1)", markdown)
    # From a page in a folder, such as lab/, one more step up leads out.
    out = r"\.\./" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\]\({out}([^)]+)\)", rf"]({config.repo_url}/blob/main/\1)", markdown)
