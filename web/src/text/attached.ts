// What goes with a message, and how much of it one request may bring.

import type { Message, Picture, TextFile, Video } from "../state/types";
import { FileProblem, FILES_BYTES_MAX } from "./files";
import { bytes, bytesOver } from "./format";
import { PICTURES_MAX } from "./pictures";
import { VIDEOS_MAX } from "./videos";

export interface Attached {
  files: TextFile[];
  pictures: Picture[];
  videos: Video[];
}

export const NOTHING: Attached = { files: [], pictures: [], videos: [] };

/** Bytes of all attachments of a request, as they are sent. The server takes 8 MiB in one request, and the rest is for text. */
export const ATTACHED_BYTES_MAX = 7_000_000;

/** Bytes of attachments in a request: text as JSON has it, and data URIs. */
function sentBytes({ files = [], pictures = [], videos = [] }: Partial<Attached>): number {
  const encoder = new TextEncoder();
  const texts = files.reduce((sum, { text }) => sum + encoder.encode(JSON.stringify(text)).length, 0);
  return [...pictures, ...videos].reduce((sum, { uri }) => sum + uri.length, texts);
}

/** Bytes of the attachments of these messages: every turn sends them again. */
export function sentBytesOf(path: Message[]): number {
  return path.reduce((sum, message) => sum + sentBytes(message), 0);
}

/** What speaks against sending attachments after messages that bring `earlier` bytes of them. */
export function sendingProblem(attached: Attached, earlier: number): string | null {
  const all = earlier + sentBytes(attached);
  if (all <= ATTACHED_BYTES_MAX) return null;
  const rest = earlier > 0 ? ", those of earlier messages with them. Begin a new chat, or attach less." : ". Attach less.";
  return `The attachments would have ${bytesOver(all, ATTACHED_BYTES_MAX)} as they are sent; up to ${bytes(ATTACHED_BYTES_MAX)} can be sent${rest}`;
}

/** Attachments with more of them; a {@link FileProblem} if that is too much after messages that bring `earlier` bytes. */
export function withMore(before: Attached, more: Partial<Attached>, earlier: number): Attached {
  const after: Attached = {
    files: [...before.files, ...(more.files ?? [])],
    pictures: [...before.pictures, ...(more.pictures ?? [])],
    videos: [...before.videos, ...(more.videos ?? [])],
  };
  if (after.pictures.length > PICTURES_MAX) throw new FileProblem(`Up to ${PICTURES_MAX} pictures can be attached to one message.`);
  if (after.videos.length > VIDEOS_MAX) throw new FileProblem(`Up to ${VIDEOS_MAX} videos can be attached to one message.`);
  if (after.files.reduce((sum, { text }) => sum + text.length, 0) > FILES_BYTES_MAX) {
    throw new FileProblem(`Up to ${bytes(FILES_BYTES_MAX)} of text files can be attached to one message.`);
  }
  const problem = sendingProblem(after, earlier);
  if (problem) throw new FileProblem(problem);
  return after;
}
