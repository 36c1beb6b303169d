import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "../support/load.mjs";

const { EventReader } = await load("api/sse.ts");
const { asPrompt, readTextFile, FILE_BYTES_MAX } = await load("text/files.ts");
const { ATTACHED_BYTES_MAX, NOTHING, sendingProblem, sentBytesOf, withMore } = await load("text/attached.ts");
const { isVideo, readVideo } = await load("text/videos.ts");
const { toJson, toMarkdown, fromJson, fileName } = await load("text/export.ts");
const { lastGood } = await load("state/tree.ts");
const { bytes, seconds, tokens } = await load("text/format.ts");

test("events are read whatever pieces they come in", () => {
  const whole = 'data: {"a": "ä"}\r\n\r\n: ping\n\ndata: [DONE]\n\n';
  for (let cut = 0; cut <= whole.length; cut += 1) {
    const reader = new EventReader();
    const events = [...reader.push(whole.slice(0, cut)), ...reader.push(whole.slice(cut))];
    assert.deepEqual(events, ['{"a": "ä"}', "[DONE]"]);
  }
});

test("files come before the text, in fences that they do not close", () => {
  const files = [{ name: "a.md", text: "```\ncode\n```\n" }, { name: "b.txt", text: "x" }];
  assert.equal(asPrompt({ content: "Why?", files }), "File a.md:\n````\n```\ncode\n```\n````\n\nFile b.txt:\n```\nx\n```\n\nWhy?");
  assert.equal(asPrompt({ content: "Why?" }), "Why?");
});

test("what is no text, or too large, is refused with its name", async () => {
  const file = (name, content) => Object.assign(new Blob([content]), { name });
  assert.deepEqual(await readTextFile(file("a.txt", "Grüße")), { name: "a.txt", text: "Grüße" });
  await assert.rejects(readTextFile(file("a.png", new Uint8Array([0x89, 0x50, 0xff]))), /a\.png is not text/);
  await assert.rejects(readTextFile(file("z.bin", "a\0b")), /z\.bin is not text/);
  await assert.rejects(readTextFile(file("big", new Uint8Array(FILE_BYTES_MAX + 1))), /big has more than 1\.00 MiB; up to 1\.00 MiB/);
});

test("videos are the kinds that the server reads, and no other file is taken for one", () => {
  const is = (name, type) => isVideo({ name, type });
  for (const type of ["video/mp4", "video/webm;codecs=vp9", "video/quicktime", "video/x-matroska", "video/vnd.avi"]) assert.ok(is("a", type), type);
  assert.ok(is("A.MKV", "") && is("a.avi", ""));
  for (const [name, type] of [["main.ts", "video/mp2t"], ["a.ts", ""], ["a.ogv", "video/ogg"], ["a.mp4", "text/plain"]]) {
    assert.ok(!is(name, type), `${name} ${type}`);
  }
});

test("a size above a limit never reads as the limit", async () => {
  const large = Object.assign(new Blob([new Uint8Array((5 << 20) + 1)], { type: "video/mp4" }), { name: "large.mp4" });
  await assert.rejects(readVideo(large), /large\.mp4 has more than 5\.00 MiB; videos of up to 5\.00 MiB can be attached\./);
});

test("all attachments of a request have one bound, which has room for one of the largest videos", () => {
  const video = { name: "a.mp4", uri: `data:video/mp4;base64,${"A".repeat(4 * Math.ceil((5 << 20) / 3))}` };
  const one = withMore(NOTHING, { videos: [video] }, 0);
  assert.deepEqual(one.videos, [video]);
  assert.throws(() => withMore(one, { videos: [video] }, 0), /13\.3 MiB as they are sent; up to 6\.68 MiB can be sent\. Attach less\./);
  const path = [{ id: "a", parent: null, role: "user", content: "Look", at: 1, videos: [video], files: [{ name: "f", text: "é\n" }] }];
  assert.equal(sentBytesOf(path), video.uri.length + 6, "as JSON in UTF-8");
  assert.throws(() => withMore(NOTHING, { pictures: [{ name: "p", uri: "x".repeat(10_000) }] }, sentBytesOf(path)), /earlier messages/);
  assert.equal(sendingProblem(NOTHING, ATTACHED_BYTES_MAX), null);
  assert.throws(() => withMore(NOTHING, { videos: Array(3).fill({ name: "v", uri: "" }) }, 0), /Up to 2 videos/);
  assert.throws(() => withMore(NOTHING, { pictures: Array(9).fill({ name: "p", uri: "" }) }, 0), /Up to 8 pictures/);
});

const chat = {
  id: "c", title: "A chat", created: 1, changed: 2, leaf: "b", options: { system: "Be kind.", temperature: 0.5 },
  messages: {
    a: { id: "a", parent: null, role: "user", content: "Hi", at: 1, files: [{ name: "f", text: "t" }] },
    b: { id: "b", parent: "a", role: "assistant", content: "**Hello**", at: 2, reasoning: "A greeting." },
    x: { id: "x", parent: "a", role: "assistant", content: "Other", at: 3 },
  },
};

test("an exported chat comes back with all its versions", () => {
  assert.deepEqual(fromJson(toJson([chat])), [chat]);
});

test("what the server refused, and what broke off, comes back as such", () => {
  const problem = { code: "queue_full", message: "3 requests wait already" };
  const refused = { id: "d", parent: "b", role: "user", content: "Again", at: 4, state: "failed", problem };
  const ended = { ...chat.messages.x, state: "stopped" };
  const whole = { ...chat, leaf: "d", messages: { ...chat.messages, x: ended, d: refused } };
  const [read] = fromJson(toJson([whole]));
  assert.deepEqual(read, whole);
  assert.equal(lastGood(read), "b");
  const writing = { ...whole, messages: { ...whole.messages, x: { ...ended, state: "writing" } } };
  assert.deepEqual(fromJson(toJson([writing])), [whole]);
});

test("a schema that is no JSON object is dropped", () => {
  const schemas = ["{", "[1]", "null", '{"type": "object"}'].map((schema) => {
    const [read] = fromJson(toJson([{ ...chat, options: { schema } }]));
    return read.options;
  });
  assert.deepEqual(schemas, [{}, {}, {}, { schema: '{"type": "object"}' }]);
});

test("pictures and videos come back, and addresses in their place do not", () => {
  const shown = {
    pictures: [{ name: "p", uri: "data:image/png;base64,AA==" }],
    videos: [{ name: "v", uri: "data:video/mp4;base64,AA==" }],
  };
  const looking = { ...chat, messages: { ...chat.messages, a: { ...chat.messages.a, ...shown } } };
  assert.deepEqual(fromJson(toJson([looking])), [looking]);
  const strange = {
    pictures: [{ name: "p", uri: "https://example.org/a.png" }, { name: "q", uri: "data:text/html,x" }, { uri: "data:image/png," }, 3],
    videos: [{ name: "v", uri: "data:image/png;base64,AA==" }, { name: 3, uri: "data:video/mp4," }],
  };
  const odd = { ...chat, messages: { ...chat.messages, a: { ...chat.messages.a, ...strange } } };
  assert.deepEqual(fromJson(toJson([odd])), [chat]);
});

test("Markdown holds what is shown", () => {
  const text = toMarkdown(chat);
  for (const part of ["# A chat", "Be kind.", "File f:", "Hi", "A greeting.", "**Hello**"]) assert.ok(text.includes(part), part);
  assert.ok(!text.includes("Other"));
});

test("a file that is none of ours is refused, and strange fields are dropped", () => {
  const file = (chats) => JSON.stringify({ format: "keel-chats", version: 1, chats });
  assert.throws(() => fromJson("{"), /not JSON/);
  assert.throws(() => fromJson("null"), /not exported/);
  assert.throws(() => fromJson('{"format": "other"}'), /not exported/);
  for (const damage of [null, {}, { ...chat, messages: { a: {} } }, { ...chat, leaf: 3 }, { ...chat, messages: { a: { ...chat.messages.a, role: "robot" } } }]) {
    assert.throws(() => fromJson(file([damage])), /damaged/);
  }
  const odd = { ...chat.messages.b, counts: { prompt: "many" }, problem: 7, state: "dancing" };
  const [read] = fromJson(file([{ ...chat, options: { seed: "one", topP: 0.5 }, messages: { ...chat.messages, b: odd } }]));
  assert.deepEqual(read.messages.b, chat.messages.b);
  assert.deepEqual(read.options, { topP: 0.5 });
});

test("numbers and names are readable", () => {
  assert.deepEqual([bytes(0), bytes(1023), bytes(1536), bytes(5e9)], ["0 B", "1023 B", "1.50 KiB", "4.66 GiB"]);
  assert.deepEqual([seconds(0.04), seconds(12.3), seconds(120), seconds(125)], ["0.0 s", "12 s", "2 min", "2 min 5 s"]);
  assert.deepEqual([tokens(1), tokens(2500)], ["1 token", "2,500 tokens"]);
  assert.equal(fileName("Ärger / mit: <b>", "md"), "arger-mit-b.md");
  assert.equal(fileName("日本", "json"), "chat.json");
});
