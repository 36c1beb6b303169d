// Which answers are being written, and stopping them.

import { app } from "./app";

const controllers = new Map<string, AbortController>();

export function isRunning(chatId: string): boolean {
  return controllers.has(chatId);
}

export function setRunning(chatId: string, controller: AbortController | null): void {
  if (controller) controllers.set(chatId, controller);
  else controllers.delete(chatId);
  app.set({ running: new Set(controllers.keys()) });
}

/** Stops the answer of a chat. Returns whether one was being written. */
export function stop(chatId: string | null): boolean {
  const controller = chatId === null ? undefined : controllers.get(chatId);
  controller?.abort();
  return controller !== undefined;
}
