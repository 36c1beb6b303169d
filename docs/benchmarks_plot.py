"""Draw docs/benchmarks.svg from the tables of docs/benchmarks.md. Needs Python 3.9 and nothing else.

    python3 docs/benchmarks_plot.py            # writes the SVG
    python3 docs/benchmarks_plot.py --check    # exits with 1 if the SVG is not that of the tables

Every row whose cell `keel is` holds a ratio becomes a bar, in the order of the tables. If a cell holds several ratios, the bar is the
lowest one. A goal is a ratio ("3x"), or a speed ("60,000") that is divided by the peer's.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "benchmarks.md"
TARGET = HERE / "benchmarks.svg"
COLUMNS = ["date", "what", "keel", "peers", "keel is", "goal", "of the floor", "command"]

WIDTH = 960
LABEL_WIDTH = 345  # where bars begin, in px
RIGHT_MARGIN = 190  # for the ratio and the peer's name
TOP = 92
ROW_HEIGHT = 22
BAR_HEIGHT = 14
HEADING_HEIGHT = 34
GAP_OF_MODELS = 7
HALO = 'paint-order="stroke" stroke="#fff" stroke-width="4"'  # keeps grid lines out of texts
COLORS = {"prefill": "#2f6db5", "decode": "#d9822b", "server": "#4b9460"}

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
RATIO = re.compile(r"(\d[\d,]*(?:\.\d+)?)x")


@dataclass
class Bar:
    """One row of a table: keel's speed over the fastest peer's."""

    machine: str
    model: str
    work: str
    ratio: float
    goal: float | None
    peer: str

    @property
    def kind(self) -> str:
        return next(kind for kind in ("server", "prefill", "decode") if kind in self.work)

    @property
    def in_one_run(self) -> bool:
        return "another" not in self.peer


def value(text: str) -> float:
    return float(text.replace(",", ""))


def bar_of(machine: str, model: str, row: dict[str, str]) -> Bar:
    """The bar of a row. `model` is the model that the row, or the row it repeats, names."""
    work = row["what"].split(", ", 1)[1].removesuffix(", tok/s")
    peers, ratios = row["peers"].split("<br>"), row["keel is"].split("<br>")
    if len(peers) != len(ratios):
        raise SystemExit(f"{row['what']}: {len(peers)} peers and {len(ratios)} ratios")
    ratio, peer = min((min(map(value, RATIO.findall(ratio))), peer) for ratio, peer in zip(ratios, peers))
    name, _, speed = peer.partition(":")
    goal = None
    if found := RATIO.search(row["goal"]):
        goal = value(found[1])
    elif found := NUMBER.search(row["goal"]):
        goal = value(found[0]) / value(NUMBER.search(speed)[0])
    return Bar(machine, model, work, ratio, goal, name)


def read(text: str) -> list[Bar]:
    bars, machine, model = [], "", ""
    for line in text.splitlines():
        if line.startswith("## "):
            machine = line[3:]
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| 2"):
            if cells[0] == "date" and cells != COLUMNS:
                raise SystemExit(f"{machine}: columns {cells}, expected {COLUMNS}")
            continue
        if len(cells) != len(COLUMNS):
            raise SystemExit(f"{machine}: {len(cells)} cells, expected {len(COLUMNS)}: {line}")
        row = dict(zip(COLUMNS, cells))
        named = row["what"].split(", ", 1)[0]
        model = model if named == "the same" else named
        if RATIO.search(row["keel is"]):
            bars.append(bar_of(machine, model, row))
    return bars


def draw(bars: list[Bar]) -> str:
    most = max(max(bar.ratio, bar.goal or 0) for bar in bars)
    ticks = range(0, int(most) + 2)
    scale = (WIDTH - LABEL_WIDTH - RIGHT_MARGIN) / ticks[-1]
    body: list[str] = []

    def x(ratio: float) -> float:
        return round(LABEL_WIDTH + ratio * scale, 1)

    def text(at: float, y: float, content: str, style: str = "", anchor: str = "start") -> None:
        body.append(f'<text x="{at}" y="{y}" text-anchor="{anchor}" {HALO} {style}>{escape(content)}</text>')

    y = TOP
    last: Bar | None = None
    for bar in bars:
        if last is None or bar.machine != last.machine:
            y += HEADING_HEIGHT if last else 22
            text(14, y, bar.machine, 'font-weight="bold"')
            y += 10
            last = None
        elif bar.model != last.model:
            y += GAP_OF_MODELS
        middle = y + ROW_HEIGHT / 2
        if last is None or bar.model != last.model:
            text(14, middle + 4, bar.model)
        text(LABEL_WIDTH - 8, middle + 4, bar.work, 'fill="#555"', "end")
        color = COLORS[bar.kind]
        fill = f'fill="{color}"' if bar.in_one_run else f'fill="{color}" fill-opacity="0.35" stroke="{color}"'
        top = middle - BAR_HEIGHT / 2
        body.append(f'<rect x="{x(0)}" y="{top}" width="{round(bar.ratio * scale, 1)}" height="{BAR_HEIGHT}" {fill}/>')
        end = max(bar.ratio, bar.goal or 0)
        if bar.goal is not None:
            at = x(bar.goal)
            body.append(f'<path d="M{at} {middle - 7}l6 7l-6 7l-6-7z" fill="#fff" stroke="#222" stroke-width="1.5"/>')
        text(x(end) + 11, middle + 4, f"{bar.ratio:.2f}x", 'font-weight="bold"')
        text(x(end) + 56, middle + 4, bar.peer, 'fill="#555" font-size="11"')
        y += ROW_HEIGHT
        last = bar
    bottom = y + 8

    grid = []
    for tick in ticks:
        style = 'stroke="#222" stroke-width="1.5"' if tick == 1 else 'stroke="#ddd"'
        grid.append(f'<line x1="{x(tick)}" y1="{TOP - 4}" x2="{x(tick)}" y2="{bottom}" {style}/>')
        grid.append(f'<text x="{x(tick)}" y="{TOP - 10}" text-anchor="middle" fill="#555">{tick}x</text>')

    legend, at = [], 14
    for color, label, opacity in (
        (COLORS["prefill"], "prefill", 1),
        (COLORS["decode"], "decode", 1),
        (COLORS["server"], "server", 1),
        ("#777", "pale: the peer ran on another GPU of that kind", 0.35),
    ):
        stroke = f' stroke="{color}"' if opacity < 1 else ""
        legend.append(f'<rect x="{at}" y="44" width="12" height="12" fill="{color}" fill-opacity="{opacity}"{stroke}/>')
        legend.append(f'<text x="{at + 18}" y="54.5">{label}</text>')
        at += 40 + round(6.2 * len(label))
    legend.append(f'<path d="M{at + 6} 43l6 7l-6 7l-6-7z" fill="#fff" stroke="#222" stroke-width="1.5"/>')
    legend.append(f'<text x="{at + 18}" y="54.5">goal</text>')

    height = bottom + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222">',
            "<title>Speed of keel over the fastest peer's</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            '<text x="14" y="26" font-size="17" font-weight="bold">Speed of keel over the fastest peer\'s</text>',
            '<text x="345" y="26" fill="#555">1x: as fast as the peer. Drawn from benchmarks.md.</text>',
            *legend,
            *grid,
            *body,
            "</svg>\n",
        ]
    )


def main() -> None:
    drawn = draw(read(SOURCE.read_text(encoding="utf-8")))
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != drawn:
            raise SystemExit("docs/benchmarks.svg is not that of docs/benchmarks.md: run python3 docs/benchmarks_plot.py")
        return
    TARGET.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
