// Text files that go with a message.

import type { Message, TextFile } from "../state/types";
import { bytes, bytesOver } from "./format";

/** Bytes of one file, and of all of a message. */
export const FILE_BYTES_MAX = 1 << 20;
export const FILES_BYTES_MAX = 4 << 20;

/** A file that is not taken, and why. */
export class FileProblem extends Error {}

/** Reads a file as UTF-8 text. */
export async function readTextFile(file: File): Promise<TextFile> {
  if (file.size > FILE_BYTES_MAX) {
    throw new FileProblem(`${file.name} has ${bytesOver(file.size, FILE_BYTES_MAX)}; up to ${bytes(FILE_BYTES_MAX)} can be attached.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // Falls through to the same refusal.
  }
  throw new FileProblem(`${file.name} is not text in UTF-8, and the model reads text alone.`);
}

/** A fence that does not occur in the text. */
function fenceFor(text: string): string {
  const longest = (text.match(/`{3,}/g) ?? []).reduce((length, run) => Math.max(length, run.length), 2);
  return "`".repeat(longest + 1);
}

/** A message as the model reads it: its files first, each with its name, then the text. */
export function asPrompt(message: Pick<Message, "content" | "files">): string {
  const files = (message.files ?? []).map(({ name, text }) => {
    const fence = fenceFor(text);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, message.content].filter(Boolean).join("\n\n");
}
