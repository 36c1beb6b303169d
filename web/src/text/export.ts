// Chats as files, and back.

import type { Chat, ChatOptions, Message, Picture } from "../state/types";
import { pathTo } from "../state/tree";
import { asPrompt } from "./files";
import { schemaProblem } from "./schema";

const FORMAT = "keel-chats";
const VERSION = 1;

/** All versions of all messages, for keeping and for importing again. */
export function toJson(chats: Chat[]): string {
  return JSON.stringify({ format: FORMAT, version: VERSION, chats }, null, 2);
}

/** The version that is shown, for reading. */
export function toMarkdown(chat: Chat): string {
  const parts = [`# ${chat.title}`];
  if (chat.options.system?.trim()) parts.push(`**System**\n\n${chat.options.system.trim()}`);
  for (const message of pathTo(chat, chat.leaf)) {
    parts.push(`**${message.role === "user" ? "You" : "Assistant"}**`);
    if (message.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
    parts.push(asPrompt(message).trim());
  }
  return `${parts.join("\n\n")}\n`;
}

/** The chats of a file. What is not one is refused, because it comes from outside. */
export function fromJson(text: string): Chat[] {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const { format, version, chats } = (file ?? {}) as Record<string, unknown>;
  if (format !== FORMAT || version !== VERSION || !Array.isArray(chats)) {
    throw new Error("The file was not exported by this page.");
  }
  return chats.map(checkChat);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

const isText = (value: unknown): value is string => typeof value === "string";
const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);
const isId = (value: unknown): value is string | null => value === null || isText(value);

function damaged(): Error {
  return new Error("A chat in the file is damaged.");
}

function checkChat(value: unknown): Chat {
  if (!isRecord(value)) throw damaged();
  const { id, title, named, created, changed, messages, leaf, options } = value;
  if (!isText(id) || !isText(title) || !isNumber(created) || !isNumber(changed) || !isId(leaf)) throw damaged();
  if (!isRecord(messages) || !isRecord(options)) throw damaged();
  const checked = Object.values(messages).map(checkMessage);
  const chat: Chat = {
    id, title, created, changed, leaf,
    messages: Object.fromEntries(checked.map((message) => [message.id, message])),
    options: checkOptions(options),
  };
  return named === true ? { ...chat, named } : chat;
}

/** The fields that are needed, and those of the others that have the right form. */
function checkMessage(value: unknown): Message {
  if (!isRecord(value)) throw damaged();
  const { id, parent, role, content, at, files, pictures, videos, reasoning, cut, json, state, problem } = value;
  if (!isText(id) || !isId(parent) || !isText(content) || !isNumber(at)) throw damaged();
  if (role !== "user" && role !== "assistant") throw damaged();
  const message: Message = { id, parent, role, content, at };
  if (Array.isArray(files)) {
    message.files = files.filter((file) => isRecord(file) && isText(file.name) && isText(file.text));
  }
  const shown = shownOf(pictures, "data:image/");
  if (shown.length > 0) message.pictures = shown;
  const films = shownOf(videos, "data:video/");
  if (films.length > 0) message.videos = films;
  if (isText(reasoning)) message.reasoning = reasoning;
  if (cut === true) message.cut = true;
  if (json === true) message.json = true;
  // Without its state, a message that the server refused would go with each later request.
  if (state === "stopped" || state === "failed") message.state = state;
  if (state === "writing") message.state = "stopped";
  if (isRecord(problem) && isText(problem.code) && isText(problem.message)) {
    message.problem = { code: problem.code, message: problem.message };
  }
  return message;
}

/** The pictures or videos of a list. Their URIs begin with `scheme`: none is an address to be fetched. */
function shownOf(value: unknown, scheme: string): Picture[] {
  if (!Array.isArray(value)) return [];
  const right = value.filter((each) => isRecord(each) && isText(each.name) && isText(each.uri) && each.uri.startsWith(scheme));
  return right.map(({ name, uri }) => ({ name, uri }));
}

function checkOptions(value: Record<string, unknown>): ChatOptions {
  const options: ChatOptions = {};
  for (const name of ["model", "system", "schema"] as const) {
    const text = value[name];
    if (isText(text)) options[name] = text;
  }
  if (options.schema !== undefined && schemaProblem(options.schema) !== null) delete options.schema;
  for (const name of ["temperature", "topP", "seed", "maxTokens"] as const) {
    const number = value[name];
    if (isNumber(number)) options[name] = number;
  }
  if (value.noReasoning === true) options.noReasoning = true;
  return options;
}

/** A file name out of a title. */
export function fileName(title: string, extension: string): string {
  const name = title.normalize("NFKD").replace(/\p{M}/gu, "").replace(/[^\w-]+/g, "-").replace(/^-+|-+$/g, "").toLowerCase();
  return `${name.slice(0, 50) || "chat"}.${extension}`;
}

/** Has the browser save a text. */
export function download(name: string, text: string, type: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
