// Videos that go with a message. They are sent as they are: the server takes their frames.

import type { Video } from "../state/types";
import { FileProblem } from "./files";
import { bytes, bytesOver } from "./format";
import { dataUri } from "./pictures";

/** Videos of one message. */
export const VIDEOS_MAX = 2;
/** Bytes of a video. Base64 makes 4 bytes of 3, so that a request has room for one such video: see `attached.ts`. */
const FILE_BYTES_MAX = 5 << 20;
/** Kinds of files that the server reads, with the endings of files to which systems give no kind. */
const KINDS: Record<string, string> = {
  mp4: "video/mp4", m4v: "video/mp4", mov: "video/quicktime", webm: "video/webm", mkv: "video/x-matroska", avi: "video/x-msvideo",
};
/** The same kinds, by all names that browsers give them. Other names starting with "video/" may be text: .ts is video/mp2t. */
const NAMES = new Set([...Object.values(KINDS), "video/x-m4v", "video/matroska", "video/avi", "video/msvideo", "video/vnd.avi"]);

function kindOf(file: File): string | undefined {
  const type = file.type.split(";")[0] ?? "";
  if (type) return NAMES.has(type) ? type : undefined;
  return KINDS[file.name.split(".").pop()?.toLowerCase() ?? ""];
}

export function isVideo(file: File): boolean {
  return kindOf(file) !== undefined;
}

export async function readVideo(file: File): Promise<Video> {
  if (file.size > FILE_BYTES_MAX) {
    throw new FileProblem(`${file.name} has ${bytesOver(file.size, FILE_BYTES_MAX)}; videos of up to ${bytes(FILE_BYTES_MAX)} can be attached.`);
  }
  return { name: file.name, uri: await dataUri(new Blob([file], { type: kindOf(file) ?? "" })) };
}
