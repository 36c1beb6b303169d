// The list of chats.

import { useRef, useState } from "preact/hooks";
import { app, notify } from "../state/app";
import { addChats, openChat, removeChat, renameChat } from "../state/chats";
import { useStore } from "../state/store";
import type { Chat } from "../state/types";
import { download, fileName, fromJson, toJson, toMarkdown } from "../text/export";
import { Icon, IconButton, Mark } from "./icons";
import { isComposing } from "./keys";
import { Menu, MenuItem } from "./menu";

export function Sidebar() {
  const chats = useStore(app, (state) => state.chats);
  const current = useStore(app, (state) => state.current);
  const running = useStore(app, (state) => state.running);
  return (
    <nav class="sidebar" aria-label="Chats">
      <div class="sidebar-head">
        <Mark />
        <p class="brand">Evenkeel</p>
        <IconButton icon="close" label="Close the list of chats" class="narrow-only" onClick={() => app.set({ sidebar: false })} />
      </div>
      <button type="button" class="new-chat" onClick={() => openChat(null)} aria-current={current === null ? "page" : undefined}>
        <Icon name="plus" />
        New chat
      </button>
      <ul class="chats">
        {chats.map((chat) => (
          <ChatRow key={chat.id} chat={chat} current={chat.id === current} running={running.has(chat.id)} />
        ))}
      </ul>
      <SidebarFoot chats={chats} />
    </nav>
  );
}

function ChatRow({ chat, current, running }: { chat: Chat; current: boolean; running: boolean }) {
  const [renaming, setRenaming] = useState(false);
  if (renaming) {
    return <li><Rename chat={chat} done={() => setRenaming(false)} /></li>;
  }
  return (
    <li class={`chat-row ${current ? "current" : ""}`}>
      <button type="button" class="chat-name" onClick={() => openChat(chat.id)} aria-current={current ? "page" : undefined}>
        <span>{chat.title}</span>
        {running && <span class="pulse" role="img" aria-label="an answer is being written" />}
      </button>
      <Menu id={`menu-${chat.id}`} label={`More about “${chat.title}”`} icon="more">
        <MenuItem icon="edit" label="Rename" onClick={() => setRenaming(true)} />
        <MenuItem icon="save" label="Export as Markdown" onClick={() => download(fileName(chat.title, "md"), toMarkdown(chat), "text/markdown")} />
        <MenuItem icon="save" label="Export as JSON" onClick={() => download(fileName(chat.title, "json"), toJson([chat]), "application/json")} />
        <MenuItem icon="trash" label="Delete" onClick={() => void removeChat(chat.id)} />
      </Menu>
    </li>
  );
}

function Rename({ chat, done }: { chat: Chat; done: () => void }) {
  const finished = useRef(false);
  const finish = (title: string | null) => {
    if (finished.current) return;
    finished.current = true;
    if (title !== null) renameChat(chat.id, title);
    done();
  };
  return (
    <input
      class="rename"
      aria-label="New name"
      value={chat.title}
      maxLength={120}
      ref={(input) => input?.focus()}
      onFocus={(event) => event.currentTarget.select()}
      onBlur={(event) => finish(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (isComposing(event)) return;
        if (event.key === "Enter") finish(event.currentTarget.value);
        if (event.key === "Escape") {
          event.preventDefault();
          finish(null);
        }
      }}
    />
  );
}

function SidebarFoot({ chats }: { chats: Chat[] }) {
  const picker = useRef<HTMLInputElement>(null);
  const take = async (file: File | undefined) => {
    if (!file) return;
    try {
      addChats(fromJson(await file.text()));
    } catch (error) {
      notify(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <div class="sidebar-foot">
      <span class="faint">Kept in this browser</span>
      <Menu id="menu-all" label="Export or import chats" icon="more">
        <MenuItem icon="save" label="Export all as JSON" onClick={() => download("chats.json", toJson(chats), "application/json")} />
        <MenuItem icon="open" label="Import a file" onClick={() => picker.current?.click()} />
      </Menu>
      <input
        ref={picker}
        type="file"
        accept="application/json,.json"
        class="offscreen"
        tabIndex={-1}
        aria-label="A file of chats"
        onChange={(event) => {
          void take(event.currentTarget.files?.[0]);
          event.currentTarget.value = "";
        }}
      />
    </div>
  );
}
