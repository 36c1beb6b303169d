// Chats in the browser's IndexedDB. Where there is none (private windows), chats live as long as the page.

import type { Chat } from "./types";

const NAME = "keel";
const STORE = "chats";

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function open(): Promise<IDBDatabase> {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return settled(request);
}

let database: Promise<IDBDatabase> | undefined;

async function store(mode: IDBTransactionMode): Promise<IDBObjectStore> {
  database ??= open();
  return (await database).transaction(STORE, mode).objectStore(STORE);
}

export async function readChats(): Promise<Chat[]> {
  return settled<Chat[]>((await store("readonly")).getAll());
}

export async function readChat(id: string): Promise<Chat | undefined> {
  return settled<Chat | undefined>((await store("readonly")).get(id));
}

/** Makes one change durable. It is committed at once: a transaction that is still open when its page goes away is undone. */
async function change(run: (chats: IDBObjectStore) => void): Promise<void> {
  const chats = await store("readwrite");
  run(chats);
  const { transaction } = chats;
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
    transaction.commit();
  });
}

export function writeChat(chat: Chat): Promise<void> {
  return change((chats) => chats.put(chat));
}

export function deleteChat(id: string): Promise<void> {
  return change((chats) => chats.delete(id));
}
