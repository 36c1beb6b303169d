// Files that are attached to the message that is being written.

import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { app, currentChat, notify } from "../state/app";
import { lastGood, pathTo } from "../state/tree";
import { type Attached, NOTHING, sentBytesOf, withMore } from "../text/attached";
import { FileProblem, readTextFile } from "../text/files";
import { isPicture, readPicture } from "../text/pictures";
import { isVideo, readVideo } from "../text/videos";

/** What a model takes besides text. */
export type Taken = "text" | "pictures" | "videos";

/** What is attached to the message that is being written. Files are read one after the other. */
export function useAttaching(taken: Taken, area: RefObject<HTMLTextAreaElement | null>, submit: () => void) {
  const [attached, setAttached] = useState(NOTHING);
  // Between the reading of two files nothing may have been rendered.
  const held = useRef(NOTHING);
  const unread = useRef(0);
  const [reading, setReading] = useState(0);
  /** The chat in which the message is to be sent once its files have been read. `null` is a new chat. */
  const sendsIn = useRef<string | null | undefined>(undefined);
  const hold = (next: Attached) => {
    held.current = next;
    setAttached(next);
  };
  const attach = async (chosen: File[]) => {
    setReading((unread.current += chosen.length));
    for (const file of chosen) {
      try {
        const read = await readFile(file, taken);
        hold(withMore(held.current, read, earlierBytes()));
      } catch (error) {
        // Without this file the user may want to write something else.
        sendsIn.current = undefined;
        notify(error instanceof Error ? error.message : String(error));
      }
      setReading((unread.current -= 1));
    }
    area.current?.focus();
    if (unread.current === 0 && sendsIn.current === app.state.current) submit();
  };
  return { attached, held, hold, attach, reading, isReading: () => unread.current > 0, sendsIn };
}

export function hasSome({ files, pictures, videos }: Attached): boolean {
  return files.length + pictures.length + videos.length > 0;
}

async function readFile(file: File, taken: Taken): Promise<Partial<Attached>> {
  if (taken !== "text" && isPicture(file)) return { pictures: [await readPicture(file)] };
  if (taken === "videos" && isVideo(file)) return { videos: [await readVideo(file)] };
  if (taken === "pictures" && isVideo(file)) throw new FileProblem(`${file.name} is a video, and this model takes pictures alone.`);
  return { files: [await readTextFile(file)] };
}

/** Bytes of the attachments that go before the next message of the chat that is shown. */
export function earlierBytes(): number {
  const chat = currentChat();
  return chat ? sentBytesOf(pathTo(chat, lastGood(chat))) : 0;
}

/** Whether files are being dragged over the page; they are handed over when they are dropped. */
export function useFileDrop(take: (files: File[]) => void): boolean {
  const [dragging, setDragging] = useState(false);
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    const over = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setDragging(true);
    };
    const leave = (event: DragEvent) => event.relatedTarget === null && setDragging(false);
    const drop = (event: DragEvent) => {
      setDragging(false);
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length === 0) return;
      event.preventDefault();
      latest.current(files);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  return dragging;
}
