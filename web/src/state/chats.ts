// Making, changing, keeping and removing chats.

import { ATTACHED_BYTES_MAX } from "../text/attached";
import { app, currentChat, notify, setDraftOptions } from "./app";
import { deleteChat, exchange, readChats } from "./database";
import { merged, withoutStale } from "./merge";
import { isWriting, stop } from "./running";
import { branchAt, freshId, newestEnd, withoutBranch } from "./tree";
import type { Chat, ChatOptions } from "./types";

/** Chats kept in this browser. */
export const CHATS_MAX = 500;
/** Characters of one chat, and of all together. A browser would take more; a limit keeps the page quick. A chat has room for
 * as many attachments as can be sent, and for text. */
export const CHAT_CHARS_MAX = ATTACHED_BYTES_MAX + 1_000_000;
export const ALL_CHARS_MAX = 64_000_000;
const TITLE_CHARS_MAX = 60;

/** Chats whose last change is not in the browser's storage. */
const unkept = new Set<string>();

/** Chats that this tab is deleting. */
const deleting = new Set<string>();

const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("keel-chats");

export function charsOf(chat: Chat): number {
  const file = (sum: number, each: { text: string }) => sum + each.text.length;
  const picture = (sum: number, each: { uri: string }) => sum + each.uri.length;
  return Object.values(chat.messages).reduce(
    (sum, message) => sum + message.content.length + (message.reasoning?.length ?? 0) + (message.files ?? []).reduce(file, 0)
      + (message.pictures ?? []).reduce(picture, 0) + (message.videos ?? []).reduce(picture, 0),
    0,
  );
}

function byChange(chats: Chat[]): Chat[] {
  return [...chats].sort((a, b) => b.changed - a.changed);
}

function put(chat: Chat): void {
  const others = app.state.chats.filter((each) => each.id !== chat.id);
  app.set({ chats: byChange([chat, ...others]) });
}

function copyOf(id: string): Chat | undefined {
  return app.state.chats.find((each) => each.id === id);
}

/** Changes a chat. Nothing happens if it is gone. Keeping it on disk is the caller's to ask for. */
export function change(id: string, how: (chat: Chat) => Chat): void {
  const chat = copyOf(id);
  if (chat) put(how(chat));
}

/** What speaks against keeping a chat, with numbers. */
function limitProblem(chat: Chat): string | null {
  const { chats } = app.state;
  if (chats.length > CHATS_MAX) return `This browser keeps ${CHATS_MAX} chats. Delete some to keep this one.`;
  if (charsOf(chat) > CHAT_CHARS_MAX) return `This chat is longer than the ${CHAT_CHARS_MAX / 1e6} million characters that are kept.`;
  const all = chats.reduce((sum, each) => sum + charsOf(each), 0);
  if (all > ALL_CHARS_MAX) return `The chats are longer than the ${ALL_CHARS_MAX / 1e6} million characters that are kept. Delete some.`;
  return null;
}

/** The stored form of a chat that another tab may have changed, together with the changes of this tab. */
function written(id: string, stored: Chat | undefined, before: Chat | undefined): Chat | undefined {
  const mine = copyOf(id);
  if (!mine) return undefined;
  if (!stored && before) {
    deletedElsewhere(id);
    return undefined;
  }
  const base = stored ? merged(mine, withoutStale(stored, mine), before, isWriting) : mine;
  if (base !== mine) put(base);
  return base;
}

/** Takes over what another tab has changed. */
function followed(id: string, stored: Chat | undefined, before: Chat | undefined): Chat | undefined {
  if (deleting.has(id)) return undefined;
  if (!stored) {
    deletedElsewhere(id);
    return undefined;
  }
  const mine = copyOf(id);
  const base = withoutStale(stored, mine);
  put(mine ? merged(mine, base, before, isWriting) : base);
  return base;
}

function deletedElsewhere(id: string): void {
  stop(id);
  app.set({ chats: app.state.chats.filter((each) => each.id !== id) });
  keepOthers(id);
}

/** Writes a chat to the browser's storage. */
export async function keep(id: string): Promise<void> {
  const chat = copyOf(id);
  unkept.delete(id);
  if (!chat) return;
  const problem = limitProblem(chat);
  if (problem) unkept.add(id);
  // The problem of another chat stays as long as that chat is not kept.
  const shown = problem ?? (unkept.size > 0 ? app.state.storageProblem : null);
  if (shown !== app.state.storageProblem) app.set({ storageProblem: shown });
  if (problem) return;
  try {
    await exchange(id, true, (stored, before) => written(id, stored, before));
    tabs?.postMessage(id);
  } catch {
    unkept.add(id);
    app.set({ storageProblem: "This browser does not keep chats (a private window, or its storage is full). Export what you need." });
  }
}

/** Forgets a chat that is deleted, and writes those that there was no room for. */
function keepOthers(deleted: string): void {
  unkept.delete(deleted);
  if (unkept.size === 0) return;
  app.set({ storageProblem: null });
  for (const id of [...unkept]) void keep(id);
}

/** Reads all chats, and follows what other tabs do. */
export async function restoreChats(): Promise<void> {
  try {
    // An answer that was being written when the page was closed ends there.
    const chats = await readChats(endWriting);
    app.set({ chats: byChange([...app.state.chats, ...chats.filter(({ id }) => !copyOf(id))]) });
  } catch {
    app.set({ storageProblem: "This browser does not keep chats (a private window?). Export what you need." });
  }
  tabs?.addEventListener("message", (event) => void follow(String(event.data)));
}

async function follow(id: string): Promise<void> {
  try {
    await exchange(id, false, (stored, before) => followed(id, stored, before));
  } catch {
    // The next change is followed again, and merged with what this tab has.
  }
}

function endWriting(chat: Chat): Chat {
  const writing = Object.values(chat.messages).filter((message) => message.state === "writing");
  if (writing.length === 0) return chat;
  const ended = writing.map((message) => [message.id, { ...message, state: "stopped" as const }]);
  return { ...chat, messages: { ...chat.messages, ...Object.fromEntries(ended) } };
}

export function titleOf(text: string): string {
  const line = text.trim().split("\n")[0]?.trim() ?? "";
  return line.length > TITLE_CHARS_MAX ? `${line.slice(0, TITLE_CHARS_MAX - 1).trimEnd()}…` : line || "New chat";
}

/** Makes a chat and shows it. */
export function createChat(title: string): Chat {
  const now = Date.now();
  const options = { ...app.state.draftOptions };
  const chat: Chat = { id: freshId(), title, created: now, changed: now, messages: {}, leaf: null, options };
  put(chat);
  app.set({ current: chat.id });
  return chat;
}

export function openChat(id: string | null): void {
  app.set({ current: id, sidebar: false });
}

export function renameChat(id: string, title: string): void {
  const named = title.trim().slice(0, 2 * TITLE_CHARS_MAX);
  if (!named) return;
  change(id, (chat) => ({ ...chat, title: named, named: true }));
  void keep(id);
}

/** Removes a chat and stops its answer. Offers to bring it back once the browser's storage has forgotten it. */
export async function removeChat(id: string): Promise<void> {
  const chat = copyOf(id);
  if (!chat) return;
  stop(id);
  app.set({
    chats: app.state.chats.filter((each) => each.id !== id),
    current: app.state.current === id ? null : app.state.current,
    storageProblem: null,
  });
  deleting.add(id);
  await deleteChat(id).then(() => tabs?.postMessage(id), () => undefined);
  deleting.delete(id);
  keepOthers(id);
  const undo = () => {
    // An answer that was being written has been stopped.
    put(endWriting(chat));
    app.set({ current: id });
    void keep(id);
  };
  notify(`Deleted “${chat.title}”.`, { label: "Undo", run: undo });
}

export function setOptions(options: ChatOptions): void {
  const chat = currentChat();
  if (!chat) return setDraftOptions(options);
  change(chat.id, (each) => ({ ...each, options }));
  void keep(chat.id);
}

/** Shows another version of a message, with what followed it last. */
export function showVersion(chatId: string, messageId: string): void {
  change(chatId, (chat) => ({ ...chat, leaf: newestEnd(chat, messageId) }));
  void keep(chatId);
}

export function removeMessage(chatId: string, messageId: string): void {
  change(chatId, (chat) => withoutBranch(chat, messageId));
  void keep(chatId);
}

/** Goes on in a chat of its own from a message. */
export function branchChat(chatId: string, messageId: string): void {
  const chat = copyOf(chatId);
  if (!chat) return;
  const branch = branchAt(chat, messageId, Date.now());
  put(branch);
  app.set({ current: branch.id });
  void keep(branch.id);
  notify("This is a branch. The chat that it came from is unchanged.");
}

/** Takes chats from a file, under new names so that none is overwritten. */
export function addChats(chats: Chat[]): void {
  const fresh = chats.map((chat) => endWriting({ ...chat, id: freshId() }));
  app.set({ chats: byChange([...fresh, ...app.state.chats]), current: fresh[0]?.id ?? app.state.current });
  for (const chat of fresh) void keep(chat.id);
  notify(fresh.length === 1 ? "Imported a chat." : `Imported ${fresh.length} chats.`);
}
