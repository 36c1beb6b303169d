// Sending a message, and writing the answer into its chat as it comes.

import { type ChatMessage, type ChatRequest, type ContentPart, type Part, streamChat } from "../api/chat";
import { ApiError } from "../api/client";
import { type Attached } from "../text/attached";
import { asPrompt } from "../text/files";
import { app, modelOf, notify } from "./app";
import { change, createChat, keep, titleOf } from "./chats";
import { isRunning, setRunning } from "./running";
import { freshId, lastGood, newestEnd, pathTo, withMessage, withoutBranch } from "./tree";
import type { Chat, ChatOptions, Counts, Message, Problem } from "./types";

/** Time between two renderings of a growing answer, and between two writes to storage. */
const SHOW_MS = 60;
const KEEP_MS = 3000;

function chatOf(id: string): Chat | undefined {
  return app.state.chats.find((chat) => chat.id === id);
}

/** Sends a message at the end of the chat that is shown, or in a new one. */
export function send(content: string, attached: Attached): void {
  const shown = app.state.current;
  const [first] = [...attached.files, ...attached.pictures, ...attached.videos];
  const chat = (shown && chatOf(shown)) || createChat(titleOf(content || first?.name || ""));
  if (isRunning(chat.id)) return;
  sendAfter(chat, lastGood(chat), content, attached);
}

/** Sends another version of a message. */
export function resend(chatId: string, messageId: string, content: string): void {
  const chat = chatOf(chatId);
  const old = chat?.messages[messageId];
  if (!chat || !old || isRunning(chatId)) return;
  const { files = [], pictures = [], videos = [] } = old;
  sendAfter(chat, old.parent, content, { files, pictures, videos });
}

function sendAfter(chat: Chat, parent: string | null, content: string, { files, pictures, videos }: Attached): void {
  const message: Message = { id: freshId(), parent, role: "user", content, at: Date.now() };
  if (files.length > 0) message.files = files;
  if (pictures.length > 0) message.pictures = pictures;
  if (videos.length > 0) message.videos = videos;
  change(chat.id, (each) => ({ ...withMessage(each, message), leaf: message.id }));
  void answer(chat.id, message.id);
}

/** Writes another answer to the message that this one answers; or one to a message that has none. */
export function regenerate(chatId: string, messageId: string): void {
  const message = chatOf(chatId)?.messages[messageId];
  const asked = message?.role === "assistant" ? message.parent : messageId;
  if (asked && !isRunning(chatId)) void answer(chatId, asked);
}

/** A message as the server takes it: its pictures first, then its videos, then its text. */
function contentOf(message: Message): string | ContentPart[] {
  const text = asPrompt(message);
  const pictures = (message.pictures ?? []).map(({ uri }): ContentPart => ({ type: "image_url", image_url: { url: uri } }));
  const videos = (message.videos ?? []).map(({ uri }): ContentPart => ({ type: "video_url", video_url: { url: uri } }));
  const shown = [...pictures, ...videos];
  if (shown.length === 0) return text;
  return text ? [...shown, { type: "text", text }] : shown;
}

/** The request that asks for an answer to the last message of `path`. */
export function requestFor(path: Message[], options: ChatOptions): ChatRequest {
  const messages: ChatMessage[] = path.map((message) => ({ role: message.role, content: contentOf(message) }));
  if (options.system?.trim()) messages.unshift({ role: "system", content: options.system });
  const body: ChatRequest = { messages };
  const model = modelOf(options);
  if (model) body.model = model;
  if (options.temperature !== undefined) body.temperature = options.temperature;
  if (options.topP !== undefined) body.top_p = options.topP;
  if (options.seed !== undefined) body.seed = options.seed;
  if (options.maxTokens !== undefined) body.max_tokens = options.maxTokens;
  if (options.noReasoning) body.reasoning_effort = "none";
  if (options.schema?.trim()) {
    const schema: unknown = JSON.parse(options.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return body;
}

/** A growing answer, which is shown at most every `SHOW_MS`. */
class Draft {
  readonly #started = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  #answerAt = 0;
  #timer = 0;
  #keptAt = performance.now();

  constructor(
    readonly chatId: string,
    public message: Message,
  ) {}

  take(part: Part): void {
    const now = performance.now();
    const next = { ...this.message };
    if (part.content !== undefined || part.reasoning !== undefined) {
      this.#firstAt ||= now;
      this.#lastAt = now;
    }
    if (part.reasoning !== undefined) next.reasoning = (next.reasoning ?? "") + part.reasoning;
    if (part.content !== undefined) {
      this.#answerAt ||= now;
      next.content += part.content;
      if (next.reasoning !== undefined) next.reasoningSeconds = (this.#answerAt - this.#firstAt) / 1000;
    }
    if (part.finish === "length") next.cut = true;
    if (part.usage) next.counts = this.#counts(part.usage);
    this.message = next;
    if (!this.#timer) this.#timer = window.setTimeout(() => this.show(), SHOW_MS);
  }

  #counts(usage: NonNullable<Part["usage"]>): Counts {
    const first = this.#firstAt || performance.now();
    return {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: usage.completion_tokens,
      waitSeconds: (first - this.#started) / 1000,
      writeSeconds: Math.max(0, (this.#lastAt || first) - first) / 1000,
    };
  }

  show(): void {
    clearTimeout(this.#timer);
    this.#timer = 0;
    change(this.chatId, (chat) => (chat.messages[this.message.id] ? withMessage(chat, this.message) : chat));
    if (performance.now() - this.#keptAt > KEEP_MS) {
      this.#keptAt = performance.now();
      void keep(this.chatId);
    }
  }

  end(state: Message["state"] | undefined, problem?: Problem): void {
    const { state: _, ...rest } = this.message;
    this.message = { ...rest, ...(state ? { state } : {}), ...(problem ? { problem } : {}) };
    this.show();
  }

  get isEmpty(): boolean {
    return !this.message.content && !this.message.reasoning;
  }
}

function problemOf(error: unknown): Problem {
  if (error instanceof ApiError) return { code: error.code, message: error.message };
  return { code: "connection", message: error instanceof Error ? error.message : String(error) };
}

async function answer(chatId: string, askedId: string): Promise<void> {
  const chat = chatOf(chatId);
  const asked = chat?.messages[askedId];
  if (!chat || !asked) return;
  const shownBefore = chat.leaf;
  const { state: _state, problem: _problem, ...clean } = asked;
  const message: Message = {
    id: freshId(), parent: askedId, role: "assistant", content: "", at: Date.now(), state: "writing",
    ...(chat.options.schema?.trim() ? { json: true } : {}),
  };
  change(chatId, (each) => ({ ...withMessage(withMessage(each, clean), message), leaf: message.id }));
  const draft = new Draft(chatId, message);
  const controller = new AbortController();
  setRunning(chatId, { controller, messageId: message.id });
  void keep(chatId);
  try {
    const body = requestFor(pathTo(chat, askedId), chat.options);
    await streamChat(body, controller.signal, (part) => draft.take(part));
    draft.end(undefined);
  } catch (error) {
    if (controller.signal.aborted) draft.end("stopped");
    else if (draft.isEmpty) refused(chatId, askedId, message.id, shownBefore, problemOf(error));
    else draft.end("failed", problemOf(error));
  } finally {
    setRunning(chatId, null);
    void keep(chatId);
  }
}

/** The server took no part of it: the answer goes, and the message says why. What was there before stays. */
function refused(chatId: string, askedId: string, answerId: string, shownBefore: string | null, problem: Problem): void {
  if (problem.code === "invalid_api_key") app.set({ keyNeeded: true, keyDialog: true });
  change(chatId, (chat) => {
    const rest = withoutBranch(chat, answerId);
    const asked = rest.messages[askedId];
    if (!asked) return rest;
    const others = Object.values(rest.messages).some((each) => each.parent === askedId);
    if (others) {
      const leaf = shownBefore && rest.messages[shownBefore] ? shownBefore : newestEnd(rest, askedId);
      return { ...rest, leaf };
    }
    return { ...withMessage(rest, { ...asked, state: "failed", problem }), leaf: askedId };
  });
  const asked = chatOf(chatId)?.messages[askedId];
  if (asked?.state !== "failed") notify(problem.message);
}
