// The page: chats on the left, the conversation, a panel on the right.

import { app, currentChat, dismissToast, isNarrow, isPhone, showPanel } from "../state/app";
import { stop } from "../state/running";
import { useStore } from "../state/store";
import { useEffect } from "preact/hooks";
import { Composer } from "./composer";
import { Conversation } from "./conversation";
import { KeyDialog } from "./keydialog";
import { isComposing } from "./keys";
import { MemoryPanel } from "./memory";
import { SettingsPanel } from "./settings";
import { Sidebar } from "./sidebar";
import { Topbar } from "./topbar";

export function App() {
  const panel = useStore(app, (state) => state.panel);
  const sidebar = useStore(app, (state) => state.sidebar);
  const title = useStore(app, (state) => currentChat(state)?.title);
  useEffect(() => {
    document.title = title ? `${title} · Evenkeel` : "Evenkeel";
  }, [title]);
  useEffect(() => {
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const covered = sidebar || panel !== null;
  return (
    <div class={`page ${sidebar ? "with-sidebar" : ""} ${panel ? "with-panel" : ""}`}>
      <Sidebar />
      <main class="chat">
        <Topbar />
        <Banner />
        <Conversation />
        <Composer />
      </main>
      {panel === "memory" && <MemoryPanel />}
      {panel === "settings" && <SettingsPanel />}
      {covered && <div class="shade" onClick={() => app.set({ sidebar: false, panel: null })} />}
      <KeyDialog />
      <ToastLine />
    </div>
  );
}

/** Esc stops the answer. Where something lies on top of the chat, that is closed first. */
function onKey(event: KeyboardEvent): void {
  if (event.key !== "Escape" || isComposing(event) || event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
  if (app.state.sidebar && isPhone()) app.set({ sidebar: false });
  else if (app.state.panel && isNarrow()) showPanel(null);
  else if (stop(app.state.current)) event.preventDefault();
}

function Banner() {
  const reachable = useStore(app, (state) => state.reachable);
  const keyNeeded = useStore(app, (state) => state.keyNeeded);
  const storageProblem = useStore(app, (state) => state.storageProblem);
  if (keyNeeded) {
    return (
      <div class="banner" role="alert">
        This server asks for a key.
        <button type="button" class="quiet" onClick={() => app.set({ keyDialog: true })}>Enter it</button>
      </div>
    );
  }
  if (!reachable) return <div class="banner" role="alert">The server cannot be reached. The page tries again by itself.</div>;
  return storageProblem ? <div class="banner" role="alert">{storageProblem}</div> : null;
}

function ToastLine() {
  const toast = useStore(app, (state) => state.toast);
  return (
    <div class="toast-place" role="status">
      {toast && (
        <div class="toast">
          <span>{toast.text}</span>
          {toast.action && (
            <button type="button" class="quiet" onClick={() => { toast.action?.run(); dismissToast(); }}>
              {toast.action.label}
            </button>
          )}
        </div>
      )}
    </div>
  );
}
