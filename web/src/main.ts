// The page of a running server: a chat, and what memory does meanwhile.

import { status, type Status } from "./api";
import { colour, draw } from "./chart";
import { setUpChat } from "./chat";

const PERIOD_MS = 500;

function human(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

/** Fills a table's body with text; a first cell may have a coloured square. */
function fill(id: string, rows: string[][], colours?: string[]): void {
  const body = document.querySelector(`#${id} tbody`);
  body?.replaceChildren(
    ...rows.map((cells, row) => {
      const line = document.createElement("tr");
      cells.forEach((text, column) => {
        const cell = document.createElement("td");
        const fillColour = column === 0 ? colours?.[row] : undefined;
        if (fillColour) {
          const swatch = document.createElement("span");
          swatch.className = "swatch";
          swatch.style.background = fillColour;
          cell.append(swatch);
        }
        cell.append(text);
        line.append(cell);
      });
      return line;
    }),
  );
}

function render(now: Status): void {
  const model = document.querySelector("#model");
  if (model) model.textContent = now.model;
  const svg = document.querySelector<SVGSVGElement>("#chart");
  if (svg) draw(svg, now.now);
  const categories = Object.entries(now.now);
  fill("legend", categories.map(([name, bytes]) => [name, human(bytes)]), categories.map((_, i) => colour(i)));
  const counts = document.querySelector("#counts");
  if (counts) counts.textContent = `(${now.running.length} running, ${now.waiting} waiting)`;
  fill("running", now.running.map((s) => [
    String(s.id),
    s.prefilled_tokens < s.prompt_tokens ? `${s.prefilled_tokens} of ${s.prompt_tokens}` : String(s.prompt_tokens),
    String(s.cached_tokens),
    String(s.generated_tokens),
    `${s.pages} of ${s.pages_promised}`,
    String(s.slot),
    s.drafted > 0 ? `${Math.round((100 * s.accepted) / s.drafted)}%` : "",
  ]));
  const used = Object.keys(now.planned).filter((name) => (now.planned[name] ?? 0) > 0 || (now.peak[name] ?? 0) > 0);
  const cell = (bytes: Record<string, number>, name: string) => human(bytes[name] ?? 0);
  fill("plan", used.map((name) => [name, cell(now.planned, name), cell(now.allocated, name), cell(now.peak, name)]));
}

async function poll(): Promise<void> {
  // A hidden page asks for nothing.
  if (!document.hidden) {
    try {
      render(await status());
    } catch {
      const counts = document.querySelector("#counts");
      if (counts) counts.textContent = "(the server cannot be read: is a key needed?)";
    }
  }
  setTimeout(poll, PERIOD_MS);
}

setUpChat();
void poll();
