// The messages of a chat. They follow a growing answer only while the reader is at the end.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { app, currentChat } from "../state/app";
import { send } from "../state/answer";
import { useStore } from "../state/store";
import { childrenOf, pathTo } from "../state/tree";
import type { Chat } from "../state/types";
import { NOTHING } from "../text/attached";
import { bytes } from "../text/format";
import { IconButton, Mark } from "./icons";
import { MessageView } from "./message";

/** Nearer to the end than this counts as at the end. */
const END_PX = 48;

export function Conversation() {
  const chat = useStore(app, currentChat);
  return chat ? <Messages key={chat.id} chat={chat} /> : <Welcome />;
}

function Messages({ chat }: { chat: Chat }) {
  const busy = useStore(app, (state) => state.running.has(chat.id));
  const path = useMemo(() => pathTo(chat, chat.leaf), [chat]);
  const log = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [atEnd, setAtEnd] = useState(true);

  const toEnd = () => {
    if (log.current) log.current.scrollTop = log.current.scrollHeight;
  };
  const onScroll = () => {
    const box = log.current;
    if (!box) return;
    follows.current = box.scrollHeight - box.scrollTop - box.clientHeight < END_PX;
    setAtEnd(follows.current);
  };
  // A message that the user has just sent is always shown.
  const lastAsked = path.findLast((message) => message.role === "user")?.id;
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [lastAsked]);
  // Whatever changes the height: tokens, an image of a formula, a narrower window.
  useEffect(() => {
    if (!content.current) return;
    const observer = new ResizeObserver(() => (follows.current ? toEnd() : onScroll()));
    observer.observe(content.current);
    return () => observer.disconnect();
  }, []);

  return (
    <div class="log-frame">
      <div class="log" ref={log} onScroll={onScroll} role="log" aria-live="off" aria-label="Messages" tabIndex={0}>
        <div class="log-content" ref={content}>
          {path.map((message) => (
            <MessageView key={message.id} chatId={chat.id} message={message} versions={childrenOf(chat, message.parent)} busy={busy} />
          ))}
        </div>
      </div>
      {!atEnd && (
        <IconButton icon="down" label="To the latest message" class="to-end" onClick={() => { follows.current = true; toEnd(); }} />
      )}
      <Announcement busy={busy} />
    </div>
  );
}

/** Screen readers hear that an answer begins and ends, not each token. */
function Announcement({ busy }: { busy: boolean }) {
  const [text, setText] = useState("");
  const before = useRef(busy);
  useEffect(() => {
    if (busy !== before.current) setText(busy ? "The answer is being written." : "The answer has ended.");
    before.current = busy;
  }, [busy]);
  return <p class="offscreen" role="status">{text}</p>;
}

const SUGGESTIONS = ["Tell me a story about a dog.", "Once upon a time, there was a little boat.", "What can you do?"];

function Welcome() {
  const status = useStore(app, (state) => state.status);
  const planned = status && Object.values(status.planned).reduce((sum, each) => sum + each, 0);
  return (
    <div class="welcome">
      <Mark />
      <p class="welcome-title">What shall we talk about?</p>
      <p class="faint">
        {planned
          ? `This server runs on ${bytes(planned)}, which it planned before it started. It will not need more.`
          : "Messages stay in this browser and go to this server alone."}
      </p>
      <ul class="suggestions">
        {SUGGESTIONS.map((text) => (
          <li key={text}><button type="button" onClick={() => send(text, NOTHING)}>{text}</button></li>
        ))}
      </ul>
    </div>
  );
}
