// One message, and what can be done with it.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { regenerate, resend } from "../state/answer";
import { branchChat, removeMessage, showVersion } from "../state/chats";
import { isWriting } from "../state/running";
import type { Counts, Message } from "../state/types";
import { copyText } from "../text/copy";
import { count, seconds, tokens } from "../text/format";
import { Icon, IconButton } from "./icons";
import { isComposing } from "./keys";
import { FileList, PictureList, VideoList } from "./filelist";
import { Prose } from "./prose";

export interface MessageProps {
  chatId: string;
  message: Message;
  /** The other ways in which the chat goes on here, this message among them. */
  versions: Message[];
  busy: boolean;
}

export function MessageView(props: MessageProps) {
  return props.message.role === "user" ? <UserMessage {...props} /> : <AnswerMessage {...props} />;
}

function UserMessage({ chatId, message, versions, busy }: MessageProps) {
  const [editing, setEditing] = useState(false);
  if (editing) {
    const save = (text: string) => {
      setEditing(false);
      resend(chatId, message.id, text);
    };
    return <Editor message={message} busy={busy} save={save} cancel={() => setEditing(false)} />;
  }
  const failed = message.state === "failed";
  return (
    <article class={`message user ${failed ? "failed" : ""}`} aria-label="You">
      <PictureList pictures={message.pictures ?? []} />
      <VideoList videos={message.videos ?? []} />
      <FileList files={message.files ?? []} />
      {message.content && <div class="bubble">{message.content}</div>}
      {failed && <Refusal message={message} />}
      <div class="actions">
        <Versions chatId={chatId} message={message} versions={versions} busy={busy} />
        {failed && <IconButton icon="again" label="Try again" disabled={busy} onClick={() => regenerate(chatId, message.id)} />}
        <CopyButton text={message.content} />
        <IconButton icon="edit" label="Edit and send again" disabled={busy} onClick={() => setEditing(true)} />
        {failed && <IconButton icon="trash" label="Remove" disabled={busy} onClick={() => removeMessage(chatId, message.id)} />}
      </div>
    </article>
  );
}

const TOO_LONG = new Set(["context_length_exceeded", "memory_exceeded", "body_too_large"]);

function Refusal({ message }: { message: Message }) {
  const { code = "", message: reason = "" } = message.problem ?? {};
  const tooLong = TOO_LONG.has(code);
  return (
    <div class="problem" role="alert">
      <Icon name="alert" />
      <div>
        <strong>{tooLong ? "Too long, not sent." : "Not sent."}</strong> {reason}
        {tooLong && <p>The chat goes on without it. Shorten it here, or begin a new chat.</p>}
      </div>
    </div>
  );
}

function AnswerMessage({ chatId, message, versions, busy }: MessageProps) {
  const unfinished = message.state === "writing";
  const writing = unfinished && isWriting(message.id);
  const empty = !message.content && !message.reasoning;
  return (
    <article class="message answer" aria-label="Answer" aria-busy={writing}>
      {message.reasoning !== undefined && <Reasoning message={message} />}
      {writing && empty && <div class="waiting" role="img" aria-label="Waiting for the first token"><i /><i /><i /></div>}
      <Prose text={textOf(message)} />
      {message.problem && (
        <div class="problem" role="alert"><Icon name="alert" /><div><strong>The answer broke off.</strong> {message.problem.message}</div></div>
      )}
      {message.state === "stopped" && <p class="note">{empty ? "Stopped before the first token." : "Stopped."}</p>}
      {unfinished && !writing && <p class="note">Another tab is writing this answer, or was closed before its end.</p>}
      {message.cut && <p class="note">The answer reached its length. More tokens can be allowed in the settings of this chat.</p>}
      {!writing && (
        <div class="actions">
          <Versions chatId={chatId} message={message} versions={versions} busy={busy} />
          <CopyButton text={message.content} />
          <IconButton icon="again" label="Another answer" disabled={busy} onClick={() => regenerate(chatId, message.id)} />
          <IconButton icon="branch" label="Branch into a new chat from here" onClick={() => branchChat(chatId, message.id)} />
          {message.counts && <Speed counts={message.counts} />}
        </div>
      )}
    </article>
  );
}

/** An answer that follows a schema is shown as JSON, set out in lines once it is whole. */
function textOf({ json, content }: Message): string {
  if (!json || !content) return content;
  let text = content;
  try {
    text = JSON.stringify(JSON.parse(content), null, 2);
  } catch {
    // Not whole yet.
  }
  const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
  return `${fence}json\n${text}\n${fence}`;
}

function Reasoning({ message }: { message: Message }) {
  const thinking = message.state === "writing" && !message.content;
  const took = message.reasoningSeconds;
  return (
    <details class="reasoning">
      <summary>{thinking ? "Reasoning…" : took === undefined ? "Reasoning" : took < 1 ? "Reasoned for a moment" : `Reasoned for ${seconds(took)}`}</summary>
      <Prose text={message.reasoning ?? ""} />
    </details>
  );
}

function Speed({ counts }: { counts: Counts }) {
  const rate = counts.writeSeconds > 0.05 ? (counts.completion - 1) / counts.writeSeconds : 0;
  const detail = `Prompt of ${tokens(counts.prompt)}, ${count(counts.cached)} of them reused; first token after ${seconds(counts.waitSeconds)}`;
  return (
    <span class="speed faint" title={detail}>
      {tokens(counts.completion)}
      {rate > 0 && ` · ${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`}
    </span>
  );
}

function Versions({ chatId, message, versions, busy }: MessageProps) {
  if (versions.length < 2) return null;
  const index = versions.findIndex((version) => version.id === message.id);
  const go = (step: number) => {
    const version = versions[index + step];
    if (version) showVersion(chatId, version.id);
  };
  return (
    <span class="versions">
      <IconButton icon="left" label="Earlier version" disabled={busy || index === 0} onClick={() => go(-1)} />
      <span aria-label={`Version ${index + 1} of ${versions.length}`} role="img">{index + 1}/{versions.length}</span>
      <IconButton icon="right" label="Later version" disabled={busy || index === versions.length - 1} onClick={() => go(1)} />
    </span>
  );
}

function CopyButton({ text }: { text: string }) {
  const [state, setState] = useState<"idle" | "done" | "failed">("idle");
  const copy = async () => {
    setState((await copyText(text)) ? "done" : "failed");
    setTimeout(() => setState("idle"), 1500);
  };
  const label = state === "idle" ? "Copy" : state === "done" ? "Copied" : "The browser does not let the page copy";
  return <IconButton icon={state === "done" ? "check" : "copy"} label={label} onClick={() => void copy()} />;
}

interface EditorProps {
  message: Message;
  busy: boolean;
  save: (text: string) => void;
  cancel: () => void;
}

function Editor({ message, busy, save, cancel }: EditorProps) {
  const [text, setText] = useState(message.content);
  const area = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => {
    area.current?.focus();
    area.current?.setSelectionRange(text.length, text.length);
  }, []);
  const hasFiles = (message.files?.length ?? 0) + (message.pictures?.length ?? 0) + (message.videos?.length ?? 0) > 0;
  const canSave = !busy && (text.trim() !== "" || hasFiles);
  const onKeyDown = (event: KeyboardEvent) => {
    if (isComposing(event)) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      const written = (event.currentTarget as HTMLTextAreaElement).value;
      if (!busy && (written.trim() || hasFiles)) save(written);
    } else if (event.key === "Escape") {
      event.preventDefault();
      cancel();
    }
  };
  return (
    <div class="message user editing">
      <PictureList pictures={message.pictures ?? []} />
      <VideoList videos={message.videos ?? []} />
      <FileList files={message.files ?? []} />
      <textarea ref={area} aria-label="Edit your message" value={text} rows={Math.min(12, text.split("\n").length + 1)}
        onInput={(event) => setText(event.currentTarget.value)} onKeyDown={onKeyDown} />
      <div class="editor-buttons">
        <span class="faint">The version before stays.</span>
        <button type="button" onClick={cancel}>Cancel</button>
        <button type="button" class="primary" disabled={!canSave} onClick={() => save(text)}>Send</button>
      </div>
    </div>
  );
}
