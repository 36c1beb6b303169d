// Follows the server: memory and sequences while they are shown, models at the start and whenever it comes back.

import { ApiError } from "../api/client";
import { readModels, readStatus } from "../api/server";
import { app } from "./app";
import { record } from "./history";

/** Time between two samples with the memory panel open, and without. */
const WATCH_MS = 500;
const IDLE_MS = 4000;

let known = false;
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
    if (!known) {
      app.set({ models: await readModels() });
      known = true;
    }
    app.set({ status, reachable: true, keyNeeded: false });
  } catch (error) {
    known = false;
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
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
}
