// The last two minutes of memory.

import type { Bytes } from "../api/server";

/** Two samples a second. */
export const SAMPLES = 240;

const samples: Bytes[] = [];

export function record(now: Bytes): void {
  samples.push(now);
  if (samples.length > SAMPLES) samples.shift();
}

export function history(): readonly Bytes[] {
  return samples;
}
