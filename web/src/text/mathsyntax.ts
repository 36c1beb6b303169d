// Where mathematics stands in Markdown: $x$, $$x$$, \(x\), \[x\]. Only marks it; math.ts typesets.

import type { MarkedExtension, Tokens } from "marked";
import { escapeHtml } from "./escape";

interface MathToken extends Tokens.Generic {
  text: string;
  display: boolean;
}

// A price is no formula: the opening $ stands before, the closing one after something that is not a space, and no
// digit follows.
// Lengths are bounded, so that a text of many openings without an end takes no time that grows with its square.
const INLINE = [
  /^\$\$((?:[^$\\]|\\[\s\S]){1,2000}?)\$\$/,
  /^\$(?!\s)((?:[^$\\\n]|\\[^\n]){0,1000}?(?:[^$\\\s]|\\[^\n]))\$(?!\d)/,
  /^\\\(([\s\S]{1,1000}?)\\\)/,
  /^\\\[([\s\S]{1,2000}?)\\\]/,
];
const BLOCK = [/^ {0,3}\$\$([\s\S]{1,5000}?)\$\$[ \t]*(?:\n|$)/, /^ {0,3}\\\[([\s\S]{1,5000}?)\\\][ \t]*(?:\n|$)/];

function match(source: string, patterns: RegExp[]): RegExpExecArray | undefined {
  for (const pattern of patterns) {
    const found = pattern.exec(source);
    if (found?.[1]?.trim()) return found;
  }
  return undefined;
}

function html(token: Tokens.Generic): string {
  const { text, display } = token as MathToken;
  return mathHtml(text, display);
}

/** The element that math.ts fills. */
export function mathHtml(tex: string, display: boolean): string {
  return `<span class="math${display ? " math-display" : ""}">${escapeHtml(tex.trim())}</span>`;
}

export const mathSyntax: MarkedExtension = {
  extensions: [
    {
      name: "mathBlock",
      level: "block",
      start: (source) => source.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
      tokenizer(source): MathToken | undefined {
        const found = match(source, BLOCK);
        return found && { type: "mathBlock", raw: found[0], text: found[1] ?? "", display: true };
      },
      renderer: html,
    },
    {
      name: "math",
      level: "inline",
      start: (source) => source.match(/\$|\\[([]/)?.index,
      tokenizer(source): MathToken | undefined {
        const found = match(source, INLINE);
        if (!found) return undefined;
        const display = found[0].startsWith("$$") || found[0].startsWith("\\[");
        return { type: "math", raw: found[0], text: found[1] ?? "", display };
      },
      renderer: html,
    },
  ],
};
