// Several tabs change one chat. Each tab has a copy; the browser's storage has another. All functions are pure.
//
// A tab remembers the chat as it last read or wrote it, the base. A message that differs from the base, by identity,
// was changed by this tab. Any other message is as the storage has it: added, changed or removed by another tab.

import { childrenOf, newestEnd, pathTo } from "./tree";
import type { Chat, Message } from "./types";

/** Whether this tab is writing a message. */
type IsWriting = (id: string) => boolean;

function charsOf(message: Message): number {
  return message.content.length + (message.reasoning?.length ?? 0);
}

/** The stored chat, with this tab's form of answers that are stored as unfinished and have no more text than here.
 * The tab that wrote such an answer may have been closed. If it has not, the stored text grows again. */
export function withoutStale(stored: Chat, mine: Chat | undefined): Chat {
  const messages = Object.entries(stored.messages).map(([id, theirs]) => {
    const ours = mine?.messages[id];
    const stale = ours && theirs.state === "writing" && ours.state !== "writing" && charsOf(ours) >= charsOf(theirs);
    return [id, stale ? ours : theirs];
  });
  return { ...stored, messages: Object.fromEntries(messages) };
}

/** The changes of this tab since `base`, and those of other tabs since then, which are in `stored`. */
export function merged(mine: Chat, stored: Chat, base: Chat | undefined, isWriting: IsWriting): Chat {
  const messages = mergedMessages(mine, stored, base, isWriting);
  const pick = <K extends keyof Chat>(field: K): Chat[K] => (base && Object.is(mine[field], base[field]) ? stored[field] : mine[field]);
  const named = pick("named");
  const chat: Chat = {
    ...mine,
    ...(named === undefined ? {} : { named }),
    title: pick("title"),
    options: pick("options"),
    changed: Math.max(mine.changed, stored.changed),
    messages,
  };
  return { ...chat, leaf: endOf(chat, stored.leaf, isWriting) };
}

function mergedMessages(mine: Chat, stored: Chat, base: Chat | undefined, isWriting: IsWriting): Chat["messages"] {
  const result: Chat["messages"] = {};
  for (const id of new Set([...Object.keys(stored.messages), ...Object.keys(mine.messages)])) {
    const [ours, theirs, before] = [mine.messages[id], stored.messages[id], base?.messages[id]];
    const changedHere = ours !== before || isWriting(id);
    const message = before === undefined ? (ours ?? theirs) : changedHere ? ours : theirs;
    if (message) result[id] = message;
  }
  // What another tab removed comes back if a message that stays follows it.
  for (let message of Object.values(result)) {
    while (message.parent !== null && !result[message.parent]) {
      const parent = mine.messages[message.parent] ?? stored.messages[message.parent] ?? base?.messages[message.parent];
      if (!parent) break;
      result[parent.id] = parent;
      message = parent;
    }
  }
  return result;
}

/** What is shown stays, so that no reader loses an answer; what another tab has added after it is shown, too. */
function endOf(chat: Chat, storedLeaf: string | null, isWriting: IsWriting): string | null {
  const shown = chat.leaf !== null && chat.messages[chat.leaf] ? chat.leaf : null;
  if (shown && isWriting(shown)) return shown;
  const path = pathTo(chat, storedLeaf);
  if (path.length > 0 && (!shown || path.some(({ id }) => id === shown))) return storedLeaf;
  if (shown) return shown;
  const first = childrenOf(chat, null).at(-1);
  return first ? newestEnd(chat, first.id) : null;
}
