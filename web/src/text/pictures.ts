// Pictures that go with a message.

import type { Picture } from "../state/types";
import { bytes, bytesOver } from "./format";
import { FileProblem } from "./files";

/** Pictures of one message. */
export const PICTURES_MAX = 8;
/** Bytes of a file that is read at all. */
const FILE_BYTES_MAX = 32 << 20;
/** A larger file is sent smaller: every turn of a chat sends its pictures again. */
const SENT_BYTES_MAX = 512 << 10;
/** Pixels along the longer side of what is sent instead. */
const SIDE_MAX = 1536;
const KINDS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

export function isPicture(file: File): boolean {
  return KINDS.has(file.type);
}

/** Reads a picture, made smaller if its file is large. */
export async function readPicture(file: File): Promise<Picture> {
  if (file.size > FILE_BYTES_MAX) {
    throw new FileProblem(`${file.name} has ${bytesOver(file.size, FILE_BYTES_MAX)}; pictures of up to ${bytes(FILE_BYTES_MAX)} can be attached.`);
  }
  const sent = file.size > SENT_BYTES_MAX ? await smaller(file) : file;
  return { name: file.name, uri: await dataUri(sent) };
}

async function smaller(file: File): Promise<Blob> {
  try {
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(1, SIDE_MAX / Math.max(bitmap.width, bitmap.height));
    const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
    const context = canvas.getContext("2d");
    if (!context) throw new Error("The browser has no canvas.");
    // JPEG has no transparency, and would make it black.
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    bitmap.close();
    return await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
  } catch {
    throw new FileProblem(`${file.name} is not a picture that this browser can read.`);
  }
}

/** A file as a data URI. */
export function dataUri(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new FileProblem("The file cannot be read."));
    reader.readAsDataURL(blob);
  });
}
