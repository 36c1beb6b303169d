// Where a message is written, files are attached, and an answer is stopped.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { countTokens } from "../api/server";
import { app, contextLength, currentChat, currentOptions, modelOf, notify, takes } from "../state/app";
import { send } from "../state/answer";
import { isRunning, stop } from "../state/running";
import { useStore } from "../state/store";
import { pathTo } from "../state/tree";
import type { TextFile } from "../state/types";
import { NOTHING, sendingProblem } from "../text/attached";
import { asPrompt } from "../text/files";
import { count } from "../text/format";
import { earlierBytes, hasSome, type Taken, useAttaching, useFileDrop } from "./attaching";
import { FileChips, PictureChips, ReadingLine, VideoChips } from "./filelist";
import { IconButton } from "./icons";
import { isComposing } from "./keys";

/** Pause after the last key before tokens are counted. */
const COUNT_PAUSE_MS = 500;
/** What can be attached, for a model that takes this besides text. */
const ATTACHED: Record<Taken, string> = { text: "text files", pictures: "pictures and text files", videos: "pictures, videos and text files" };
/** A text with fewer characters than this share of the context is not worth the request, which counts against a key's limit. */
const COUNTED_SHARE = 1 / 16;

export function Composer() {
  const current = useStore(app, (state) => state.current);
  const busy = useStore(app, (state) => state.current !== null && state.running.has(state.current));
  const [text, setText] = useState("");
  const taken = useStore(app, takes);
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const { attached, held, hold, attach, reading, isReading, sendsIn } = useAttaching(taken, area, () => submit());
  const dragging = useFileDrop((dropped) => void attach(dropped));

  useEffect(() => area.current?.focus(), [current]);
  useLayoutEffect(() => {
    if (!area.current) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [text]);

  const { files, pictures, videos } = attached;
  const canSend = !busy && (text.trim() !== "" || hasSome(attached) || reading > 0);
  // It may run after files have been read, so it takes nothing from the rendering in which it was made.
  const submit = () => {
    const shown = app.state.current;
    if (shown !== null && isRunning(shown)) return;
    sendsIn.current = isReading() ? shown : undefined;
    if (isReading()) return;
    // From the field itself: a quick Enter comes before the last key is rendered.
    const written = area.current?.value.trim() ?? "";
    const hasAttached = hasSome(held.current);
    if (written === "" && !hasAttached) return;
    // Another chat may be shown than when they were attached.
    const problem = hasAttached ? sendingProblem(held.current, earlierBytes()) : null;
    if (problem) return notify(problem);
    send(written, held.current);
    setText("");
    hold(NOTHING);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
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
      <ReadingLine count={reading} />
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

/** How much of the context the chat takes with what is being written. */
function Hint({ text, files }: { text: string; files: TextFile[] }) {
  const context = useStore(app, contextLength);
  const chat = useStore(app, currentChat);
  const model = useStore(app, (state) => modelOf(currentOptions(state), state.models));
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
