// Chats in the browser's IndexedDB. Where there is none (private windows), chats live as long as the page.

import type { Chat } from "./types";

const NAME = "keel";
const STORE = "chats";

/** Each chat as this tab last read or wrote it. */
const seen = new Map<string, Chat>();

let database: Promise<IDBDatabase> | undefined;

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Has the next access open a connection. What the storage holds may have been cleared meanwhile. */
function disconnect(): void {
  database = undefined;
  seen.clear();
}

async function open(): Promise<IDBDatabase> {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  const opened = await settled(request);
  opened.onclose = disconnect;
  opened.onversionchange = () => {
    opened.close();
    disconnect();
  };
  return opened;
}

async function begin(mode: IDBTransactionMode): Promise<IDBObjectStore> {
  const connection = (database ??= open());
  try {
    return (await connection).transaction(STORE, mode).objectStore(STORE);
  } catch (error) {
    if (database === connection) disconnect();
    throw error;
  }
}

/** Begins a transaction. A browser may lose a connection, so a second try opens another one. */
async function store(mode: IDBTransactionMode): Promise<IDBObjectStore> {
  try {
    return await begin(mode);
  } catch {
    return begin(mode);
  }
}

/** Reads all chats; `take` sees each as it is, and gives it as this tab has it. */
export async function readChats(take: (stored: Chat) => Chat): Promise<Chat[]> {
  const chats = (await settled<Chat[]>((await store("readonly")).getAll())).map(take);
  for (const chat of chats) seen.set(chat.id, chat);
  return chats;
}

/** Resolves when the changes of a transaction are durable. */
function durable({ transaction }: IDBObjectStore): Promise<void> {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Given a chat as stored, and as this tab last saw it there. Gives the chat as this tab then knows it to be stored. */
type Decide = (stored: Chat | undefined, before: Chat | undefined) => Chat | undefined;

/** Exchanges that write and have not read their chat yet: what each does if its page goes away meanwhile. */
const waiting = new Set<() => void>();

addEventListener("pagehide", () => waiting.forEach((write) => write()));

/** Reads a chat in one transaction. With `writes`, the same transaction writes what `decide` makes of the chat, so no
 * other tab changes it in between. No later access to the chats runs before it ends. */
export async function exchange(id: string, writes: boolean, decide: Decide): Promise<void> {
  let chats = await store("readwrite");
  let done = durable(chats);
  let left = false;
  let restore = () => {};
  const finish = (stored: Chat | undefined, before: Chat | undefined) => {
    waiting.delete(leave);
    restore = () => void (before ? seen.set(id, before) : seen.delete(id));
    const base = decide(stored, before);
    if (base) seen.set(id, base);
    else seen.delete(id);
    if (base && writes) chats.put(base);
    // Committed at once: a transaction that is still open when its page goes away is undone.
    chats.transaction.commit();
  };
  // There is no time to read, so the chat is taken to be as this tab last saw it.
  const leave = () => {
    left = true;
    const { transaction } = chats;
    transaction.abort();
    chats = transaction.db.transaction(STORE, "readwrite").objectStore(STORE);
    done = durable(chats);
    finish(seen.get(id), seen.get(id));
  };
  // An exchange that only reads has nothing to save, and its page may come back and need the news.
  if (writes) waiting.add(leave);
  const request = chats.get(id) as IDBRequest<Chat | undefined>;
  request.onsuccess = () => finish(request.result, seen.get(id));
  try {
    await done.catch((error) => {
      if (!left) throw error;
      // The second transaction may fail, too, and its page may come back.
      return done;
    });
  } catch (error) {
    waiting.delete(leave);
    restore();
    throw error;
  }
}

export async function deleteChat(id: string): Promise<void> {
  seen.delete(id);
  const chats = await store("readwrite");
  chats.delete(id);
  chats.transaction.commit();
  await durable(chats);
}
