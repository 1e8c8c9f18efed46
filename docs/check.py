"""Open the built site in a headless Chromium and look for faults: ``make docs-check``.

Links and anchors are read from the files. In the browser, each page is opened in light, in dark and at a phone's width:
no error on the console, no request that fails, text and figures legible, nothing wider than the page. Then the search.
Screenshots go to ``docs/_build/screenshots``.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parent / "_build" / "html"
SHOTS = SITE.parent / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SEARCHED = "icepop"
ABORTED = "net::ERR_ABORTED"  # by the browser itself, which gives up an icon when the next page is opened
SHOWN = ("index.html", "weight_sync.html", "reference/objectives.html")
WAYS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "is_mobile": True},
}

LOOK = """async () => {
  const parse = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0.5) return light(c);
    }
    return 1;
  };
  const found = [], article = document.querySelector("article") || document.body;
  const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT), pale = new Map();
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || !e.checkVisibility({opacityProperty: true, visibilityProperty: true}) || e.closest("svg")) continue;
    const style = getComputedStyle(e), large = parseFloat(style.fontSize) >= 24;
    const c = contrast(light(parse(style.color)), behind(e));
    if (c < (large ? 3 : 4.5)) pale.set(`${e.tagName.toLowerCase()}.${e.className} ${style.color}`,
                                        `${c.toFixed(1)} '${text.slice(0, 30)}'`);
  }
  for (const [where, what] of pale) found.push(`text of contrast ${what} in ${where}`);
  for (const image of article.querySelectorAll("img")) {
    if (!image.checkVisibility() || new URL(image.src).origin !== location.origin) continue;  // a badge, say
    image.loading = "eager";
    await image.decode().catch(() => {});
    if (!image.naturalWidth) { found.push(`image ${image.src} is not shown`); continue; }
    const canvas = Object.assign(document.createElement("canvas"), {width: 400, height: 300});
    const pen = canvas.getContext("2d");
    pen.drawImage(image, 0, 0, 400, 300);
    const data = pen.getImageData(0, 0, 400, 300).data, back = behind(image);
    let clear = 0, drawn = 0, legible = 0;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] < 128) clear++;
      else { drawn++; legible += contrast(light([data[i], data[i + 1], data[i + 2]]), back) >= 3; }
    }
    if (clear > 0.05 * (clear + drawn) && legible < 0.5 * drawn)
      found.push(`image ${image.src} is transparent, and ${Math.round(100 * legible / drawn)}% of it is legible here`);
  }
  const wide = document.documentElement.scrollWidth, room = document.documentElement.clientWidth;
  if (wide > room) {
    const over = [...article.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > room + 1);
    const names = over.slice(0, 3).map(e => `${e.tagName.toLowerCase()}.${e.className}`);
    found.push(`${wide} px wide, and the window has ${room}: ${names.join(", ")}`);
  }
  return found;
}"""
"""What a page's own style says of its legibility; contrasts are WCAG's."""


class Targets(HTMLParser):
    """The anchors of a page, and what it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in {"a", "link", "img", "script", "source"}:
            self.links += [given[name] for name in ("href", "src") if given.get(name)]


def dead_links(site: Path) -> Iterator[str]:
    """Each internal link whose file or anchor is missing."""
    pages = {path: Targets(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for page, targets in pages.items():
        for link in sorted({*targets.links}):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            at = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not at.is_file():
                yield f"{page.relative_to(site)}: {link} leads nowhere"
            elif parts.fragment and at in pages and unquote(parts.fragment) not in pages[at].anchors:
                yield f"{page.relative_to(site)}: {link} has no such anchor"


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The site's address, on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def tab(browser: Any, address: str, way: str, found: list[str]) -> Iterator[Any]:
    """A page of a browser, which appends what it complains of; what other hosts fail to send is their own affair."""
    context = browser.new_context(**WAYS[way])
    page = context.new_page()

    def note(kind: str, url: str, is_fault: bool) -> None:
        if is_fault and url.startswith(address):
            found.append(f"{kind}: {url}")

    page.on("console", lambda m: note(m.text, m.location["url"] or page.url, m.type in {"error", "warning"}))
    page.on("pageerror", lambda error: note(str(error), page.url, True))
    page.on("requestfailed", lambda request: note(f"{request.failure}", request.url, request.failure != ABORTED))
    page.on("response", lambda response: note(str(response.status), response.url, response.status >= 400))
    yield page
    context.close()


def faults_of_pages(browser: Any, address: str, way: str) -> Iterator[str]:
    """Open every page in one way."""
    found: list[str] = []
    with tab(browser, address, way, found) as page:
        for file in sorted(SITE.rglob("*.html")):
            name = file.relative_to(SITE).as_posix()
            if name.startswith("_static"):
                continue
            page.goto(f"{address}/{name}", wait_until="load")
            found += page.evaluate(LOOK)
            if name in SHOWN or page.query_selector("article img"):
                page.screenshot(path=SHOTS / f"{file.stem}-{way}.png", full_page=way == "light" and name not in SHOWN)
            yield from (f"{name}, {way}: {fault}" for fault in found)
            found.clear()


def faults_of_search(browser: Any, address: str, term: str) -> Iterator[str]:
    """Type a term, and open the first result."""
    found: list[str] = []
    with tab(browser, address, "light", found) as page:
        page.goto(address)
        page.fill("input.sidebar-search", term)
        page.press("input.sidebar-search", "Enter")
        page.wait_for_selector("#search-results p.search-summary:has-text('found')")
        page.screenshot(path=SHOTS / "search-light.png")
        result = page.query_selector("#search-results li a")
        if result is None:
            yield f"search: nothing found for {term!r}"
        else:
            result.click()
            page.wait_for_load_state()
            if term not in page.inner_text("article").lower():
                yield f"search: the first result for {term!r}, {page.url}, lacks it"
    yield from (f"search: {fault}" for fault in found)


def main() -> int:
    """Print the faults, and return how the command ends."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        print("make docs-check: no Chromium on the PATH: apt-get install chromium", file=sys.stderr)
        return 2
    if not (SITE / "index.html").exists():
        print("make docs-check: no site in docs/_build/html: make docs", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    SHOTS.mkdir(parents=True, exist_ok=True)
    faults = [*dead_links(SITE)]
    with sync_playwright() as play, served(SITE) as address:
        browser = play.chromium.launch(executable_path=program)
        for way in WAYS:
            faults += faults_of_pages(browser, address, way)
        faults += faults_of_search(browser, address, SEARCHED)
        browser.close()
    print("\n".join(faults) or f"docs-check: no fault; screenshots in {SHOTS}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
