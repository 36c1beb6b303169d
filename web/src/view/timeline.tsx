// Memory by category over time, as stacked areas, beneath the line of the plan.

import type { Bytes } from "../api/server";
import { SAMPLES } from "../state/history";
import { bytes, seconds } from "../text/format";
import { look, ordered } from "./categories";

/** Samples that the width shows at least; it shows more as they come. */
const SPAN_MIN = 40;
const SAMPLE_SECONDS = 0.5;
const WIDTH = 600;
const HEIGHT = 160;
/** The share of the height that the plan takes. */
const FILL = 0.92;

interface Area {
  category: string;
  path: string;
}

/** The areas of samples, oldest first; the newest is at the right edge. */
export function areas(samples: readonly Bytes[], top: number): Area[] {
  const span = spanOf(samples);
  const x = (index: number) => ((WIDTH * (index + span - samples.length)) / (span - 1)).toFixed(1);
  const y = (value: number) => (HEIGHT - (HEIGHT * FILL * value) / top).toFixed(1);
  const below = samples.map(() => 0);
  return ordered(samples.flatMap((sample) => Object.keys(sample))).map((category) => {
    const floor = below.map((value, index) => `${x(index)},${y(value)}`);
    samples.forEach((sample, index) => (below[index] = (below[index] ?? 0) + (sample[category] ?? 0)));
    const ceiling = below.map((value, index) => `${x(index)},${y(value)}`);
    return { category, path: `M${ceiling.join("L")}L${floor.reverse().join("L")}Z` };
  });
}

function spanOf(samples: readonly Bytes[]): number {
  return Math.min(SAMPLES, Math.max(SPAN_MIN, samples.length));
}

const total = (sample: Bytes) => Object.values(sample).reduce((sum, each) => sum + each, 0);

export function Timeline({ samples, planned }: { samples: readonly Bytes[]; planned: Bytes }) {
  const plan = total(planned);
  const top = Math.max(1, plan, ...samples.map(total));
  const planY = HEIGHT - (HEIGHT * FILL * plan) / top;
  const now = samples.at(-1) ?? {};
  return (
    <figure class="timeline">
      <svg role="img" aria-label="Memory by category over time" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none">
        <defs>
          <pattern id="free-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
            <path class="hatch" d="M0 0V6" />
          </pattern>
        </defs>
        {areas(samples, top).map(({ category, path }) => (
          <path key={category} class={look(category).class} d={path} data-category={category} data-bytes={now[category] ?? 0} />
        ))}
        <line class="plan-line" x1="0" x2={WIDTH} y1={planY} y2={planY} />
      </svg>
      <figcaption class="faint"><span>last {seconds(spanOf(samples) * SAMPLE_SECONDS)}</span><span>planned {bytes(plan)}</span></figcaption>
    </figure>
  );
}
