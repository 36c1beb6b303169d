"""README.md for packages, which are read without the repository around it.

    readme.py stage FOLDER   copies README.md, CHANGELOG.md and every document that their links lead to
    readme.py check FOLDER   fails if a link of those two leads to no file of FOLDER
    readme.py plain          prints README.md without links to files, for a page that shows it alone
"""

import re
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ROOTS = ("README.md", "CHANGELOG.md")
# Links to code are not followed: an archive has no source.
DOCUMENTS = (".md", ".svg", ".webp", ".png")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SCHEME = re.compile(r"[a-z]+:", re.IGNORECASE)
NOTE = "\nThe files that this text names are in the source repository, its documents also in the archive of a release.\n"


def targets(text):
    """The files that a text links to, as it names them."""
    for _, _, target in LINK.findall(text):
        name = target.split("#")[0]
        if name and not SCHEME.match(target):
            yield name


def documents():
    """README.md, CHANGELOG.md and the documents that can be reached from them, relative to the repository."""
    found, left = set(), [REPO / name for name in ROOTS]
    while left:
        path = left.pop()
        if path in found or not path.is_file() or path.suffix not in DOCUMENTS or not path.is_relative_to(REPO):
            continue
        found.add(path)
        if path.suffix == ".md":
            left += [(path.parent / name).resolve() for name in targets(path.read_text())]
    return sorted(path.relative_to(REPO) for path in found)


def stage(folder):
    for path in documents():
        place = Path(folder) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / path, place)


def check(folder):
    folder = Path(folder)
    dead = [f"{root}: {name}" for root in ROOTS for name in targets((folder / root).read_text()) if not (folder / name).exists()]
    if dead:
        raise SystemExit("links that lead nowhere: " + "; ".join(dead))


def plain():
    """README.md with the words of its links alone. Pictures are left out."""

    def words(link):
        picture, text, target = link.groups()
        if SCHEME.match(target):
            return link[0]
        return "" if picture else text

    return re.sub(r"\n{3,}", "\n\n", LINK.sub(words, (REPO / "README.md").read_text())) + NOTE


def main(what, *folder):
    if what == "plain":
        print(plain(), end="")
    else:
        {"stage": stage, "check": check}[what](*folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
