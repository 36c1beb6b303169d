// Videos that go with a message. They are sent as they are: the server takes their frames.

import type { Video } from "../state/types";
import { FileProblem } from "./files";
import { bytes } from "./format";
import { dataUri } from "./pictures";

/** Videos of one message. */
export const VIDEOS_MAX = 2;
/** Bytes of a video. The server takes 8 MiB in one request, every turn sends its videos again, and base64 makes 4 bytes of 3. */
const FILE_BYTES_MAX = 5 << 20;
/** Kinds that the server reads, with the endings of files to which systems give no kind. */
const KINDS: Record<string, string> = {
  mp4: "video/mp4", m4v: "video/mp4", mov: "video/quicktime", webm: "video/webm", mkv: "video/x-matroska", avi: "video/x-msvideo",
};

function kindOf(file: File): string | undefined {
  if (file.type.startsWith("video/")) return file.type.split(";")[0];
  return file.type ? undefined : KINDS[file.name.split(".").pop()?.toLowerCase() ?? ""];
}

export function isVideo(file: File): boolean {
  return kindOf(file) !== undefined;
}

export async function readVideo(file: File): Promise<Video> {
  if (file.size > FILE_BYTES_MAX) {
    throw new FileProblem(`${file.name} has ${bytes(file.size)}; videos of up to ${bytes(FILE_BYTES_MAX)} can be attached.`);
  }
  return { name: file.name, uri: await dataUri(new Blob([file], { type: kindOf(file) ?? "" })) };
}
