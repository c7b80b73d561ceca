"""Pages laid out by a real browser, in frames of several widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

WIDTHS = (390, 768, 1280, 1600)

# What is outside of its frame, and of its chart; and what is wider than its box and cannot be scrolled.
MEASURE = """
addEventListener("load", () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const root = frame.contentDocument, wide = root.documentElement.clientWidth, outside = [], stuck = [];
    for (const part of root.body.querySelectorAll("*")) {
      const box = part.getBoundingClientRect(), drawing = part.closest("svg");
      if (!box.width || !box.height || part.closest("thead")) continue;
      const within = drawing && part !== drawing ? drawing.getBoundingClientRect() : {left: 0, right: wide};
      if (part.closest(".scroll *, .grid *") && !drawing) continue;
      if (box.left < within.left - 1 || box.right > within.right + 1) outside.push(part.outerHTML.slice(0, 80));
    }
    for (const part of root.querySelectorAll(".scroll, .grid"))
      if (part.scrollWidth > part.clientWidth + 1 && (part.tabIndex || getComputedStyle(part).overflowX != "auto"))
        stuck.push(part.outerHTML.slice(0, 80));
    found.push({window: wide, page: root.documentElement.scrollWidth, outside, stuck});
  }
  const text = document.createElement("pre");
  text.textContent = JSON.stringify(found);
  document.body.replaceChildren(text);
});
"""


def browser() -> str | None:
    """The program of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def layouts(html: str, folder: Path) -> list[dict[str, Any]]:
    """For every one of `WIDTHS` how wide window and page are, and what is outside of it, in CSS pixels."""
    source = escape(html, quote=True)
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{source}"></iframe>' for width in WIDTHS)
    harness = folder / "harness.html"
    harness.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>", encoding="utf-8")
    program = browser()
    assert program is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
    done = subprocess.run(
        [program, *options, "--virtual-time-budget=20000", "--dump-dom", harness.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(unescape(found[1]))
