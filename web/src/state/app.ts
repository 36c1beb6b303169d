// The page's state, and what changes how it looks. Chats have actions of their own in chats.ts.

import type { Model, Status } from "../api/server";
import { Store } from "./store";
import type { Chat, ChatOptions } from "./types";

export type Panel = "memory" | "settings" | null;
export type Theme = "auto" | "light" | "dark";

export interface Toast {
  text: string;
  action?: { label: string; run: () => void };
}

export interface AppState {
  /** Latest change first. */
  chats: Chat[];
  /** The chat that is shown; `null` is one that has no message yet. */
  current: string | null;
  /** Chats whose answer is being written. */
  running: ReadonlySet<string>;
  /** Options of chats to come. */
  draftOptions: ChatOptions;
  panel: Panel;
  sidebar: boolean;
  theme: Theme;
  keyDialog: boolean;
  keyNeeded: boolean;
  toast: Toast | null;
  /** Chats cannot be kept, and why. */
  storageProblem: string | null;
  models: Model[];
  status: Status | null;
  reachable: boolean;
}

const PREFERENCES = "keel-page";

interface Preferences {
  theme?: Theme;
  panel?: Panel;
  draftOptions?: ChatOptions;
}

function preferences(): Preferences {
  try {
    return JSON.parse(localStorage.getItem(PREFERENCES) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

function savePreferences(): void {
  const { theme, panel, draftOptions } = app.state;
  try {
    localStorage.setItem(PREFERENCES, JSON.stringify({ theme, panel, draftOptions }));
  } catch {
    // Forbidden or full: the choice holds until the page is closed.
  }
}

/** Narrower pages show side panels on top of the chat, so they begin closed. */
export const isNarrow = (): boolean => matchMedia("(max-width: 1100px)").matches;

/** Still narrower pages show the list of chats on top of the chat. */
export const isPhone = (): boolean => matchMedia("(max-width: 760px)").matches;

const kept = preferences();

export const app = new Store<AppState>({
  chats: [],
  current: null,
  running: new Set(),
  draftOptions: kept.draftOptions ?? {},
  panel: isNarrow() ? null : kept.panel === undefined ? "memory" : kept.panel,
  sidebar: false,
  theme: kept.theme ?? "auto",
  keyDialog: false,
  keyNeeded: false,
  toast: null,
  storageProblem: null,
  models: [],
  status: null,
  reachable: true,
});

export function showPanel(panel: Panel): void {
  app.set({ panel, sidebar: false });
  savePreferences();
}

export function setTheme(theme: Theme): void {
  app.set({ theme });
  applyTheme();
  savePreferences();
}

export function applyTheme(): void {
  const { theme } = app.state;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export function setDraftOptions(draftOptions: ChatOptions): void {
  app.set({ draftOptions });
  savePreferences();
}

const TOAST_MS = 6000;
let toastTimer = 0;

/** Shows a line for a few seconds. */
export function notify(text: string, action?: Toast["action"]): void {
  clearTimeout(toastTimer);
  app.set({ toast: action ? { text, action } : { text } });
  toastTimer = window.setTimeout(() => app.set({ toast: null }), TOAST_MS);
}

export function dismissToast(): void {
  clearTimeout(toastTimer);
  app.set({ toast: null });
}

export function currentChat(state: AppState = app.state): Chat | null {
  return state.chats.find((chat) => chat.id === state.current) ?? null;
}

/** Options of the chat that is shown. */
export function currentOptions(state: AppState = app.state): ChatOptions {
  return currentChat(state)?.options ?? state.draftOptions;
}

/** The model that requests with these options name. The server refuses a name that it does not list, so such a name is
 * not sent, and the first model answers. A remembered or imported name can be one of another server. */
export function modelOf(options: ChatOptions, models: Model[] = app.state.models): string | undefined {
  return models.find((model) => model.id === options.model)?.id;
}

/** The model that answers in the chat that is shown. */
function answering(state: AppState): Model | undefined {
  const named = modelOf(currentOptions(state), state.models);
  return state.models.find((model) => model.id === named) ?? state.models[0];
}

/** Tokens of a sequence, prompt and answer together, of the model that the chat uses. */
export function contextLength(state: AppState = app.state): number | undefined {
  return answering(state)?.context_length;
}

/** What the model that the chat uses takes besides text. Models with videos take pictures, too. */
export function takes(state: AppState = app.state): "text" | "pictures" | "videos" {
  const kinds = answering(state)?.input_modalities ?? [];
  if (kinds.includes("video")) return "videos";
  return kinds.includes("image") ? "pictures" : "text";
}
