// Follows the server: memory and sequences while they are shown, and models whenever they can have changed.

import { ApiError } from "../api/client";
import { readModels, readStatus } from "../api/server";
import { app } from "./app";
import { record } from "./history";

/** Time between two samples with the memory panel open, and without. */
const WATCH_MS = 500;
const IDLE_MS = 4000;

/** Names of the models in the status with which they were read; `null` has them read again. */
let listed: string | null = null;
let timer = 0;

async function poll(): Promise<void> {
  // A hidden page asks for nothing.
  if (!document.hidden) await ask();
  clearTimeout(timer);
  timer = window.setTimeout(() => void poll(), app.state.panel === "memory" ? WATCH_MS : IDLE_MS);
}

async function ask(): Promise<void> {
  try {
    const status = await readStatus();
    record(status.now);
    const names = JSON.stringify((status.models ?? []).map(({ id }) => id));
    if (names !== listed) {
      app.set({ models: await readModels() });
      listed = names;
    }
    app.set({ status, reachable: true, keyNeeded: false });
  } catch (error) {
    listed = null;
    const needsKey = error instanceof ApiError && error.status === 401;
    app.set({ reachable: needsKey, keyNeeded: needsKey });
  }
}

/** Asks at once, because a key or a panel has changed. */
export function refresh(): void {
  clearTimeout(timer);
  void poll();
}

export function followServer(): void {
  void poll();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    // Meanwhile another server may have started in the place of this one, with the same names.
    listed = null;
    refresh();
  });
}
