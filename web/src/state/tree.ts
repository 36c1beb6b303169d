// A chat is a tree of messages. Editing or regenerating adds a version next to the old one; nothing is overwritten.
// All functions are pure.

import type { Chat, Message } from "./types";

/** A name that no other object has. `crypto.randomUUID` exists on secure origins alone, and a phone may use plain HTTP. */
export function freshId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The messages from the first to `last`. */
export function pathTo(chat: Chat, last: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>();
  for (let id = last; id !== null && !seen.has(id); ) {
    const message = chat.messages[id];
    if (!message) break;
    seen.add(id);
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/** The versions that follow `parent`, oldest first. */
export function childrenOf(chat: Chat, parent: string | null): Message[] {
  return Object.values(chat.messages)
    .filter((message) => message.parent === parent)
    .sort((a, b) => a.at - b.at);
}

/** The end of the newest continuation of a message. */
export function newestEnd(chat: Chat, id: string): string {
  const seen = new Set<string>();
  for (let end = id; ; ) {
    seen.add(end);
    const next = childrenOf(chat, end).at(-1);
    if (!next || seen.has(next.id)) return end;
    end = next.id;
  }
}

export function withMessage(chat: Chat, message: Message): Chat {
  return { ...chat, messages: { ...chat.messages, [message.id]: message }, changed: Math.max(chat.changed, message.at) };
}

/** Without a message and everything that follows it. What is shown then ends at its newest neighbour, or its parent. */
export function withoutBranch(chat: Chat, id: string): Chat {
  const root = chat.messages[id];
  if (!root) return chat;
  const gone = new Set<string>();
  const collect = (each: string) => {
    if (gone.has(each)) return;
    gone.add(each);
    for (const child of childrenOf(chat, each)) collect(child.id);
  };
  collect(id);
  const messages = Object.fromEntries(Object.entries(chat.messages).filter(([key]) => !gone.has(key)));
  const rest: Chat = { ...chat, messages };
  if (chat.leaf === null || !gone.has(chat.leaf)) return rest;
  const neighbour = childrenOf(rest, root.parent).at(-1);
  return { ...rest, leaf: neighbour ? newestEnd(rest, neighbour.id) : root.parent };
}

/** A chat of its own that begins like this one, up to a message. */
export function branchAt(chat: Chat, id: string, now: number): Chat {
  const path = pathTo(chat, id);
  const title = `${chat.title} (branch)`;
  return {
    ...chat,
    id: freshId(),
    title,
    created: now,
    changed: now,
    messages: Object.fromEntries(path.map((message) => [message.id, message])),
    leaf: id,
  };
}

/** Where the next message goes: after the last one that the server took. */
export function lastGood(chat: Chat): string | null {
  const path = pathTo(chat, chat.leaf);
  for (let i = path.length - 1; i >= 0; i -= 1) {
    const message = path[i];
    if (message && !(message.role === "user" && message.state === "failed")) return message.id;
  }
  return null;
}
