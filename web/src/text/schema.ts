// JSON schemas that a user writes or imports.

/** What is wrong with the text of a schema. An empty text is none, and is right. */
export function schemaProblem(text: string): string | null {
  if (text.trim() === "") return null;
  try {
    const schema: unknown = JSON.parse(text);
    return typeof schema === "object" && schema !== null && !Array.isArray(schema) ? null : "A schema is a JSON object.";
  } catch (error) {
    return `Not JSON yet, so not in force: ${error instanceof Error ? error.message : error}`;
  }
}
