// The one way for text of a model to become elements. Nothing else in the page parses HTML: the content security policy
// demands trusted types, and only DOMPurify has a policy.

import DOMPurify, { type Config } from "dompurify";

const TAGS = [
  "a", "b", "blockquote", "br", "code", "dd", "del", "details", "div", "dl", "dt", "em", "h2", "hr", "i", "kbd", "li", "mark",
  "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
];

const HTML: Config & { RETURN_DOM_FRAGMENT: true } = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "class", "start", "align", "data-language"],
  // DOMPurify holds every value that is not declared safe against the pattern of addresses below.
  ADD_URI_SAFE_ATTR: ["start", "align", "data-language"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // No relative addresses either: a link in an answer must not call this server.
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const MATH: Config & { IN_PLACE: true } = {
  USE_PROFILES: { mathMl: true },
  ADD_TAGS: ["span"],
  // Temml's own; it takes none from the text, because it does not trust it.
  ADD_ATTR: ["class", "style"],
  FORBID_ATTR: ["href", "xlink:href", "src"],
  IN_PLACE: true,
};

/** Classes that the page's own renderer gives; a model cannot borrow others, such as those of buttons. */
const CLASS = /^(?:hljs(?:-[\w-]+)?|[a-z]+_|math|math-display|level-[1-6]|image)$/;

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.namespaceURI !== "http://www.w3.org/1999/xhtml") return;
  const classes = [...node.classList].filter((name) => CLASS.test(name));
  if (classes.length > 0) node.className = classes.join(" ");
  else node.removeAttribute("class");
  if (node.nodeName !== "A") return;
  const target = node.getAttribute("href");
  if (target === null) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  // Where it leads, whatever its text says.
  node.setAttribute("title", target);
});

/** HTML as elements, without anything that runs, loads, submits or imitates the page. */
export function sanitise(html: string): DocumentFragment {
  return DOMPurify.sanitize(html, HTML);
}

/** The same for MathML that was typeset from a model's text. */
export function cleanMath(element: HTMLElement): void {
  DOMPurify.sanitize(element, MATH);
}
