// Which answers are being written, and stopping them.

import { app } from "./app";

/** An answer that this tab is writing. */
interface Running {
  controller: AbortController;
  messageId: string;
}

/** By chat. */
const answers = new Map<string, Running>();

export function isRunning(chatId: string): boolean {
  return answers.has(chatId);
}

/** Whether this tab is writing the message. Another tab of the same browser may be writing others. */
export function isWriting(messageId: string): boolean {
  return [...answers.values()].some((each) => each.messageId === messageId);
}

export function setRunning(chatId: string, running: Running | null): void {
  if (running) answers.set(chatId, running);
  else answers.delete(chatId);
  app.set({ running: new Set(answers.keys()) });
}

/** Stops the answer of a chat. Returns whether one was being written. */
export function stop(chatId: string | null): boolean {
  const controller = chatId === null ? undefined : answers.get(chatId)?.controller;
  controller?.abort();
  return controller !== undefined;
}
