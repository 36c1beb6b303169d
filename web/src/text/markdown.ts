// Markdown as elements. An answer is cut into blocks, so that a growing one renders only its last block again.

import { Marked, type Token, type Tokens } from "marked";
import { escapeHtml } from "./escape";
import { highlight } from "./highlight";
import { mathHtml, mathSyntax } from "./mathsyntax";
import { typeset } from "./math";
import { sanitise } from "./sanitise";

/** Tags that may stand in an answer as HTML. Others are shown as the text that they are: people ask about HTML. */
const INLINE_HTML = /^<\/?(?:b|br|del|details|em|i|kbd|mark|s|small|strong|sub|summary|sup|u)\s*\/?>$/i;

function rawHtml({ raw }: { raw: string }): string {
  const parts = raw.split(/(<[^<>]*>)/);
  return parts.map((part) => (INLINE_HTML.test(part) ? part : escapeHtml(part))).join("");
}

function code({ text, lang }: Tokens.Code): string {
  const language = (lang ?? "").trim().split(/[\s,{]/)[0]?.toLowerCase() ?? "";
  if (language === "math" || language === "latex-math") return mathHtml(text, true);
  return `<pre data-language="${escapeHtml(language)}"><code class="hljs">${highlight(text, language)}</code></pre>`;
}

const marked = new Marked({ gfm: true, breaks: false }, mathSyntax, {
  renderer: {
    code,
    html: rawHtml,
    // All headings are `h2`: other levels would break the page's outline. A class sets the size.
    heading({ tokens, depth }) {
      return `<h2 class="level-${depth}">${this.parser.parseInline(tokens)}</h2>\n`;
    },
    // The page loads nothing from elsewhere, so an image is a link to it.
    image({ href, text }) {
      return `<a class="image" href="${escapeHtml(href)}">${escapeHtml(text || "image")}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

/** A top-level part of a text. The same `source` and links give the same elements. */
export interface Block {
  source: string;
  /** Without one, the text is shown as it is. */
  token?: Token;
  /** The link definitions of the whole text, in a block that may refer to them. */
  links?: string;
}

/** A longer text is not read as Markdown. */
const CHARS_MAX = 400_000;

/** A text as it is, in one block. */
export function plainBlock(text: string): Block[] {
  return [{ source: text }];
}

export function blocksOf(text: string): Block[] {
  if (text.length > CHARS_MAX) return plainBlock(text);
  try {
    const tokens = marked.lexer(text);
    const links = JSON.stringify(tokens.links);
    const refers = ({ type, raw }: Token) => type !== "code" && raw.includes("[");
    return tokens
      .filter((token) => token.type !== "space" && token.type !== "def")
      .map((token) => ({ source: token.raw, token, links: refers(token) ? links : "" }));
  } catch {
    // Thousands of nested quotes or lists are more than the stack holds.
    return plainBlock(text);
  }
}

/** The elements of a block. */
export function elementsOf(block: Block): DocumentFragment {
  try {
    if (block.token) return formatted(block.token);
  } catch {
    // As above.
  }
  const fragment = document.createDocumentFragment();
  const text = document.createElement("p");
  text.className = "plain";
  text.textContent = block.source;
  fragment.append(text);
  return fragment;
}

function formatted(token: Token): DocumentFragment {
  const fragment = sanitise(marked.parser([token]));
  typeset(fragment);
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    scrollable(frame, "Table");
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** A keyboard can scroll it, and a screen reader names it. */
function scrollable(element: HTMLElement, name: string): void {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
}

/** Code with its language and a button that copies it; prose.tsx listens for the button. */
function frameCode(pre: HTMLPreElement): void {
  const language = pre.dataset.language ?? "";
  pre.removeAttribute("data-language");
  scrollable(pre, language ? `Code, ${language}` : "Code");
  const frame = document.createElement("div");
  frame.className = "code-frame";
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.dataset.copy = "";
  button.textContent = "Copy";
  bar.append(name, button);
  pre.replaceWith(frame);
  frame.append(bar, pre);
}
