// Where a message is written, files are attached, and an answer is stopped.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { countTokens } from "../api/server";
import { app, contextLength, currentChat, currentOptions, notify, takes } from "../state/app";
import { send } from "../state/answer";
import { stop } from "../state/running";
import { useStore } from "../state/store";
import { lastGood, pathTo } from "../state/tree";
import type { TextFile } from "../state/types";
import { type Attached, NOTHING, sendingProblem, sentBytesOf, withMore } from "../text/attached";
import { asPrompt, FileProblem, readTextFile } from "../text/files";
import { count } from "../text/format";
import { isPicture, readPicture } from "../text/pictures";
import { isVideo, readVideo } from "../text/videos";
import { FileChips, PictureChips, VideoChips } from "./filelist";
import { IconButton } from "./icons";

/** Pause after the last key before tokens are counted. */
const COUNT_PAUSE_MS = 500;
/** What can be attached, for a model that takes this besides text. */
const ATTACHED = { text: "text files", pictures: "pictures and text files", videos: "pictures, videos and text files" };
/** A text with fewer characters than this share of the context is not worth the request, which counts against a key's limit. */
const COUNTED_SHARE = 1 / 16;

export function Composer() {
  const current = useStore(app, (state) => state.current);
  const busy = useStore(app, (state) => state.current !== null && state.running.has(state.current));
  const [text, setText] = useState("");
  const [attached, setAttached] = useState(NOTHING);
  // Files are read one after the other, and between two of them nothing may have been rendered.
  const held = useRef(NOTHING);
  const hold = (next: Attached) => {
    held.current = next;
    setAttached(next);
  };
  const taken = useStore(app, takes);
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
        const read = await readFile(file, taken);
        hold(withMore(held.current, read, earlierBytes()));
      } catch (error) {
        notify(error instanceof Error ? error.message : String(error));
      }
    }
    area.current?.focus();
  };
  const { files, pictures, videos } = attached;
  const hasAttached = files.length + pictures.length + videos.length > 0;
  const canSend = !busy && (text.trim() !== "" || hasAttached);
  const submit = () => {
    // From the field itself: a quick Enter comes before the last key is rendered.
    const written = area.current?.value.trim() ?? "";
    if (busy || (written === "" && !hasAttached)) return;
    // Another chat may be shown than when they were attached.
    const problem = hasAttached ? sendingProblem(attached, earlierBytes()) : null;
    if (problem) return notify(problem);
    send(written, attached);
    setText("");
    hold(NOTHING);
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
      <FileChips files={files} remove={(gone) => hold({ ...attached, files: files.filter((_, index) => index !== gone) })} />
      <PictureChips pictures={pictures} remove={(gone) => hold({ ...attached, pictures: pictures.filter((_, index) => index !== gone) })} />
      <VideoChips videos={videos} remove={(gone) => hold({ ...attached, videos: videos.filter((_, index) => index !== gone) })} />
      <div class="composer-row">
        <IconButton icon="attach" label={`Attach ${ATTACHED[taken]}`} onClick={() => picker.current?.click()} />
        <textarea ref={area} rows={1} aria-label="Your message" placeholder="Write a message" value={text}
          onInput={(event) => setText(event.currentTarget.value)} onKeyDown={onKeyDown} onPaste={onPaste} />
        {busy ? (
          <IconButton icon="stop" label="Stop (Esc)" class="primary round" onClick={() => stop(current)} />
        ) : (
          <IconButton icon="send" label="Send (Enter)" class="primary round" disabled={!canSend} onClick={submit} />
        )}
      </div>
      <input ref={picker} type="file" multiple class="offscreen" tabIndex={-1} aria-label={`To attach: ${ATTACHED[taken]}`}
        onChange={(event) => {
          void attach([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }} />
      <Hint text={text} files={files} />
    </form>
  );
}

async function readFile(file: File, taken: keyof typeof ATTACHED): Promise<Partial<Attached>> {
  if (taken !== "text" && isPicture(file)) return { pictures: [await readPicture(file)] };
  if (taken === "videos" && isVideo(file)) return { videos: [await readVideo(file)] };
  if (taken === "pictures" && isVideo(file)) throw new FileProblem(`${file.name} is a video, and this model takes pictures alone.`);
  return { files: [await readTextFile(file)] };
}

/** Bytes of the attachments that go before the next message of the chat that is shown. */
function earlierBytes(): number {
  const chat = currentChat();
  return chat ? sentBytesOf(pathTo(chat, lastGood(chat))) : 0;
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
  const model = useStore(app, (state) => currentOptions(state).model);
  const [written, setWritten] = useState(0);
  const prompt = asPrompt({ content: text, files });
  useEffect(() => {
    if (!context || prompt.length < context * COUNTED_SHARE) return setWritten(0);
    const controller = new AbortController();
    const timer = setTimeout(() => {
      countTokens(prompt, model, controller.signal).then(setWritten, () => setWritten(0));
    }, COUNT_PAUSE_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [prompt, context, model]);
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
