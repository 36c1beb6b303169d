// The conversation.

import { ApiError, chat, type Message } from "./api";

function element<T extends HTMLElement>(selector: string): T {
  const found = document.querySelector<T>(selector);
  if (!found) throw new Error(`the page has no ${selector}`);
  return found;
}

export function setUpChat(): void {
  const log = element<HTMLDivElement>("#messages");
  const form = element<HTMLFormElement>("#form");
  const input = element<HTMLTextAreaElement>("#input");
  const send = element<HTMLButtonElement>("#send");
  const stop = element<HTMLButtonElement>("#stop");
  const reset = element<HTMLButtonElement>("#reset");
  let messages: Message[] = [];
  let running: AbortController | undefined;

  function show(kind: string, text: string): HTMLDivElement {
    const message = document.createElement("div");
    message.className = `message ${kind}`;
    message.textContent = text;
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return message;
  }

  async function say(text: string): Promise<void> {
    messages.push({ role: "user", content: text });
    show("user", text);
    const bubble = show("assistant", "");
    const reasoning = document.createElement("span");
    reasoning.className = "reasoning";
    const answer = document.createElement("span");
    let content = "";
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    try {
      await chat(messages, running.signal, (delta) => {
        if (delta.reasoning_content) {
          if (!reasoning.isConnected) bubble.prepend(reasoning);
          reasoning.textContent += delta.reasoning_content;
        }
        if (delta.content) {
          if (!answer.isConnected) bubble.append(answer);
          content += delta.content;
          answer.textContent = content;
        }
        log.scrollTop = log.scrollHeight;
      });
    } catch (error) {
      const wasStopped = error instanceof DOMException && error.name === "AbortError";
      if (!wasStopped) show("error", error instanceof ApiError ? error.message : "the server cannot be reached");
    }
    messages.push({ role: "assistant", content });
    if (!bubble.hasChildNodes()) bubble.remove();
    running = undefined;
    send.disabled = false;
    stop.disabled = true;
    input.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || running) return;
    input.value = "";
    void say(text);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  reset.addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    input.focus();
  });
  input.focus();
}
