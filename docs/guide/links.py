"""Checks every link between the pages of a built book: links.py FOLDER. A link that leads nowhere is an error."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, _, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def main():
    folder = Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    # 404.html stands for any address, so its links start at the root of a site.
    pages = {path: page for path, page in pages.items() if path.name not in ("404.html", "toc.html")}
    broken, count = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = target.is_file()
            if is_there and parts.fragment and target in pages:
                is_there = unquote(parts.fragment) in pages[target].ids
            if not is_there:
                broken.append(f"{path.relative_to(folder)}: {link}")
    if broken or len(pages) < 2:
        raise SystemExit("links that lead nowhere:\n" + "\n".join(broken))
    print(f"{count} links of {len(pages)} pages")


main()
