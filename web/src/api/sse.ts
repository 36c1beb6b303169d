// Server-sent events out of a stream of text.

/** Takes text in pieces of any size and gives back the data of every event that is complete. */
export class EventReader {
  #rest = "";

  push(text: string): string[] {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop() ?? "";
    return lines
      .map((line) => line.replace(/\r$/, ""))
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5).trimStart());
  }
}
