// Keys.

/** Whether a key belongs to an input method, such as the Enter that confirms a Japanese word. Safari ends the
 * composition before that Enter, and marks it with code 229 alone. */
export function isComposing(event: KeyboardEvent): boolean {
  return event.isComposing || event.keyCode === 229;
}
