// Memory by category over time, as stacked areas.

import type { Bytes } from "./api";

const WIDTH = 600;
const HEIGHT = 220;
/** Two minutes at two samples a second. */
const SAMPLES = 240;

const COLOURS = ["#2f6f8f", "#e0a030", "#6aa84f", "#b8505a", "#7b68b5", "#4fb3a9", "#a8763e", "#8a8f98", "#c77fb3", "#5577cc", "#99a83a"];

const history: Bytes[] = [];

export function colour(index: number): string {
  return COLOURS[index % COLOURS.length] ?? "#888";
}

/** Adds a sample and draws. The areas keep their order from sample to sample. */
export function draw(svg: SVGSVGElement, now: Bytes): void {
  history.push(now);
  if (history.length > SAMPLES) history.shift();
  const categories = Object.keys(now);
  const total = (sample: Bytes) => Object.values(sample).reduce((sum, bytes) => sum + bytes, 0);
  const top = Math.max(1, ...history.map(total));
  const x = (i: number) => (WIDTH * (i + SAMPLES - history.length)) / (SAMPLES - 1);
  const y = (bytes: number) => HEIGHT - (HEIGHT * 0.95 * bytes) / top;
  const below = history.map(() => 0);
  const areas = categories.map((category, index) => {
    const floor = history.map((_, i) => `${x(i).toFixed(1)},${y(below[i] ?? 0).toFixed(1)}`);
    history.forEach((sample, i) => (below[i] = (below[i] ?? 0) + (sample[category] ?? 0)));
    const ceiling = history.map((_, i) => `${x(i).toFixed(1)},${y(below[i] ?? 0).toFixed(1)}`);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${ceiling.join("L")}L${floor.reverse().join("L")}Z`);
    path.setAttribute("fill", colour(index));
    path.dataset.category = category;
    path.dataset.bytes = String(now[category] ?? 0);
    path.dataset.samples = String(history.length);
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = category;
    path.append(title);
    return path;
  });
  svg.replaceChildren(...areas);
}
