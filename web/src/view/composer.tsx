// Where a message is written, files are attached, and an answer is stopped.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { countTokens } from "../api/server";
import { app, contextLength, currentChat, notify, seesPictures } from "../state/app";
import { send, stop } from "../state/answer";
import { useStore } from "../state/store";
import { pathTo } from "../state/tree";
import type { Picture, TextFile, Video } from "../state/types";
import { asPrompt, FILES_BYTES_MAX, readTextFile } from "../text/files";
import { bytes, count } from "../text/format";
import { isPicture, PICTURES_MAX, readPicture } from "../text/pictures";
import { isVideo, readVideo, VIDEOS_MAX } from "../text/videos";
import { FileChips, PictureChips, VideoChips } from "./filelist";
import { IconButton } from "./icons";

/** Pause after the last key before tokens are counted. */
const COUNT_PAUSE_MS = 500;
/** A text with fewer characters than this share of the context is not worth the request, which counts against a key's limit. */
const COUNTED_SHARE = 1 / 16;

export function Composer() {
  const current = useStore(app, (state) => state.current);
  const busy = useStore(app, (state) => state.current !== null && state.running.has(state.current));
  const [text, setText] = useState("");
  const [files, setFiles] = useState<TextFile[]>([]);
  const [pictures, setPictures] = useState<Picture[]>([]);
  const [videos, setVideos] = useState<Video[]>([]);
  const sees = useStore(app, seesPictures);
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const dragging = useFileDrop((dropped) => void attach(dropped));

  useEffect(() => area.current?.focus(), [current]);
  useLayoutEffect(() => {
    if (!area.current) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [text]);

  const attach = async (chosen: File[]) => {
    for (const file of chosen) {
      try {
        if (sees && isPicture(file)) {
          const picture = await readPicture(file);
          setPictures((before) => {
            if (before.length < PICTURES_MAX) return [...before, picture];
            notify(`Up to ${PICTURES_MAX} pictures can be attached to one message.`);
            return before;
          });
          continue;
        }
        if (sees && isVideo(file)) {
          const video = await readVideo(file);
          setVideos((before) => {
            if (before.length < VIDEOS_MAX) return [...before, video];
            notify(`Up to ${VIDEOS_MAX} videos can be attached to one message.`);
            return before;
          });
          continue;
        }
        const read = await readTextFile(file);
        setFiles((before) => {
          const after = [...before, read];
          const total = after.reduce((sum, each) => sum + each.text.length, 0);
          if (total <= FILES_BYTES_MAX) return after;
          notify(`Up to ${bytes(FILES_BYTES_MAX)} can be attached to one message.`);
          return before;
        });
      } catch (error) {
        notify(error instanceof Error ? error.message : String(error));
      }
    }
    area.current?.focus();
  };
  const attached = files.length + pictures.length + videos.length;
  const canSend = !busy && (text.trim() !== "" || attached > 0);
  const submit = () => {
    // From the field itself: a quick Enter comes before the last key is rendered.
    const written = area.current?.value.trim() ?? "";
    if (busy || (written === "" && attached === 0)) return;
    send(written, { files, pictures, videos });
    setText("");
    setFiles([]);
    setPictures([]);
    setVideos([]);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  const onPaste = (event: ClipboardEvent) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (pasted.length === 0) return;
    event.preventDefault();
    void attach(pasted);
  };
  return (
    <form class={`composer ${dragging ? "dragging" : ""}`} onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <FileChips files={files} remove={(gone) => setFiles(files.filter((_, index) => index !== gone))} />
      <PictureChips pictures={pictures} remove={(gone) => setPictures(pictures.filter((_, index) => index !== gone))} />
      <VideoChips videos={videos} remove={(gone) => setVideos(videos.filter((_, index) => index !== gone))} />
      <div class="composer-row">
        <IconButton icon="attach" label={sees ? "Attach pictures, videos and text files" : "Attach text files"} onClick={() => picker.current?.click()} />
        <textarea ref={area} rows={1} aria-label="Your message" placeholder="Write a message" value={text}
          onInput={(event) => setText(event.currentTarget.value)} onKeyDown={onKeyDown} onPaste={onPaste} />
        {busy ? (
          <IconButton icon="stop" label="Stop (Esc)" class="primary round" onClick={() => stop(current)} />
        ) : (
          <IconButton icon="send" label="Send (Enter)" class="primary round" disabled={!canSend} onClick={submit} />
        )}
      </div>
      <input ref={picker} type="file" multiple class="offscreen" tabIndex={-1} aria-label={sees ? "Pictures, videos and text files to attach" : "Text files to attach"}
        onChange={(event) => {
          void attach([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }} />
      <Hint text={text} files={files} />
    </form>
  );
}

/** Whether files are being dragged over the page; they are handed over when they are dropped. */
function useFileDrop(take: (files: File[]) => void): boolean {
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

/** How much of the context the chat takes with what is being written. */
function Hint({ text, files }: { text: string; files: TextFile[] }) {
  const context = useStore(app, contextLength);
  const chat = useStore(app, currentChat);
  const [written, setWritten] = useState(0);
  const prompt = asPrompt({ content: text, files });
  useEffect(() => {
    if (!context || prompt.length < context * COUNTED_SHARE) return setWritten(0);
    const controller = new AbortController();
    const timer = setTimeout(() => {
      countTokens(prompt, controller.signal).then(setWritten, () => setWritten(0));
    }, COUNT_PAUSE_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [prompt, context]);
  const last = chat && pathTo(chat, chat.leaf).findLast((message) => message.counts)?.counts;
  const before = last ? last.prompt + last.completion : 0;
  const used = before + written;
  if (!context || used === 0) return <p class="hint faint">Enter sends, Shift+Enter begins a line, Esc stops.</p>;
  const over = used >= context;
  return (
    <p class={`hint ${over ? "over" : "faint"}`} role={over ? "alert" : undefined}>
      {over && "Too long for the model: "}
      About {count(used)} of {count(context)} tokens
    </p>
  );
}
