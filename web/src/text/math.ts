// Mathematics as MathML, which browsers typeset themselves.

import temml from "temml";
import { cleanMath } from "./sanitise";

/** Longer input is shown as it is. */
const CHARS_MAX = 5_000;

/** Fills every element that mathsyntax.ts has marked. What cannot be read stays as it was written. */
export function typeset(fragment: DocumentFragment): void {
  for (const element of fragment.querySelectorAll<HTMLElement>(".math")) {
    const tex = element.textContent ?? "";
    if (tex.length > CHARS_MAX) continue;
    const displayMode = element.classList.contains("math-display");
    try {
      element.textContent = "";
      temml.render(tex, element, { displayMode, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 50] });
      cleanMath(element);
      if (displayMode) element.tabIndex = 0;
    } catch {
      element.replaceChildren(tex);
      element.classList.add("math-raw");
    }
  }
}
