// Writing, stopping, reading along, files and settings.
import assert from "node:assert/strict";
import { test } from "node:test";
import { CONTEXT } from "../support/stub.mjs";
import { answers, ask, PHONE, say, settled, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const files = (page) => page.locator("input[type=file][multiple]");

test("Esc stops an answer, and the chat goes on from what there is", () =>
  browser.visit({}, async ({ page, stub }) => {
    await say(page, "slow");
    await page.getByText("word20").waitFor();
    await page.keyboard.press("Escape");
    await settled(page);
    await page.getByText("Stopped.").waitFor();
    const text = await answers(page).innerText();
    assert.ok(!text.includes("word399"));
    await ask(page, "Next");
    assert.match(stub.requests.at(-1).messages[1].content, /^word0 /);
  }));

test("the page stays where the reader is, and follows again at the end", () =>
  browser.visit({}, async ({ page }) => {
    await say(page, "slow");
    const log = page.locator(".log");
    const position = () => log.evaluate((box) => ({ top: box.scrollTop, rest: box.scrollHeight - box.scrollTop - box.clientHeight }));
    await page.getByText("word230").waitFor();
    assert.ok((await position()).top > 0 && (await position()).rest < 48, "it follows");
    await log.hover();
    await page.mouse.wheel(0, -300);
    await page.waitForTimeout(150);
    const before = await position();
    await page.getByText("word330").waitFor();
    const after = await position();
    assert.equal(after.top, before.top, "it does not move under a reader");
    assert.ok(after.rest > before.rest);
    await page.getByRole("button", { name: "To the latest message" }).click();
    await settled(page);
    assert.ok((await position()).rest < 48, "it follows again");
  }));

test("what a reader has selected stays selected while the answer grows", () =>
  browser.visit({}, async ({ page }) => {
    await say(page, "slow");
    await page.getByText("word40").waitFor();
    await page.evaluate(() => getSelection().selectAllChildren(document.querySelector(".answer .block p")));
    const selected = await page.evaluate(() => getSelection().toString());
    await page.getByText("word120").waitFor();
    assert.equal(await page.evaluate(() => getSelection().toString()), selected);
    assert.ok(selected.includes("word3"));
    await page.keyboard.press("Escape");
  }));

test("Enter sends, Shift+Enter begins a line, and nothing empty is sent", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.keyboard.press("Enter");
    await page.keyboard.type("one");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("two");
    await page.keyboard.press("Enter");
    await settled(page);
    assert.deepEqual(stub.requests.map((request) => request.messages[0].content), ["one\ntwo"]);
  }));

test("text files are attached by button, by drop and by paste; others are refused", () =>
  browser.visit({}, async ({ page, stub }) => {
    await files(page).setInputFiles([
      { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("some notes\n") },
      { name: "cat.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0x50, 0x4e, 0x47, 0xff]) },
    ]);
    await page.getByText("cat.png is not text").waitFor();
    await page.evaluate(() => {
      const data = new DataTransfer();
      data.items.add(new File(["dropped"], "drop.md"));
      window.dispatchEvent(new DragEvent("dragover", { dataTransfer: data, cancelable: true }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
      const pasted = new DataTransfer();
      pasted.items.add(new File(["pasted"], "paste.csv"));
      document.querySelector(".composer textarea").dispatchEvent(new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true }));
    });
    await page.locator(".chip").nth(2).waitFor();
    await page.getByRole("button", { name: "Take drop.md away" }).click();
    await ask(page, "Summarise");
    assert.equal(stub.requests[0].messages[0].content, "File notes.txt:\n```\nsome notes\n```\n\nFile paste.csv:\n```\npasted\n```\n\nSummarise");
    assert.equal(await page.locator(".chip").count(), 0);
    await page.locator(".file summary").first().click();
    assert.equal(await page.locator(".file pre").first().innerText(), "some notes\n");
  }));

test("tokens are counted while one writes, and too many are said so", () =>
  browser.visit({}, async ({ page }) => {
    await page.getByLabel("Your message").fill("x".repeat(400));
    await page.getByText(`About 100 of ${CONTEXT.toLocaleString("en")} tokens`).waitFor();
    await page.getByLabel("Your message").fill("x".repeat(20000));
    await page.getByText("Too long for the model: About 5,000").waitFor();
  }));

test("settings go with the request, and belong to their chat", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("System prompt").fill("Be brief.");
    await page.getByLabel("Temperature", { exact: true }).fill("0.3");
    await page.getByLabel("Top-p", { exact: true }).fill("7");
    await page.getByLabel("Seed").fill("42");
    await page.getByLabel("Length").fill("100");
    await page.getByLabel("JSON schema").fill("{");
    await page.getByText("Not JSON yet").waitFor();
    await page.getByLabel("JSON schema").fill('{"type": "object"}');
    await page.getByLabel("Answer without reasoning").check();
    await ask(page, "json please");
    const { messages, temperature, top_p, seed, max_tokens, response_format, reasoning_effort } = stub.requests[0];
    assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
    assert.deepEqual([temperature, top_p, seed, max_tokens, reasoning_effort], [0.3, 1, 42, 100, "none"]);
    assert.deepEqual(response_format.json_schema.schema, { type: "object" });
    assert.equal(await answers(page).locator("pre").innerText(), '{\n  "name": "Ada",\n  "age": 36\n}');
    await page.getByRole("button", { name: "Clear all" }).click();
    await ask(page, "Plain");
    assert.deepEqual(Object.keys(stub.requests[1]).sort(), ["messages", "stream", "stream_options"]);
    await page.reload();
    assert.equal(await page.getByLabel("Seed").inputValue(), "42", "new chats begin with what was set for new chats");
  }));

test("a schema is in force while it is JSON, and goes with all other settings", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    const field = page.getByLabel("JSON schema");
    await ask(page, "Hello");
    await field.fill('{"type": "object"}');
    await field.fill('{"type": "object"');
    await page.getByText("Not JSON yet, so not in force").waitFor();
    await ask(page, "Plain");
    assert.equal(stub.requests.at(-1).response_format, undefined);
    assert.equal(await field.inputValue(), '{"type": "object"', "what is being written stays");
    await page.getByRole("button", { name: "Clear all" }).click();
    assert.equal(await field.inputValue(), "");
    await field.fill('{"type": "array"}');
    await page.getByRole("button", { name: "Clear all" }).click();
    assert.equal(await field.inputValue(), "");
    await ask(page, "Plain again");
    assert.equal(stub.requests.at(-1).response_format, undefined);
  }));

test("a model is chosen where there are several", () =>
  browser.visit({ stub: { models: ["small", "large"] } }, async ({ page, stub }) => {
    await page.getByLabel("Model").selectOption("large");
    await ask(page, "Hello");
    assert.equal(stub.requests[0].model, "large");
  }));

test("tokens are counted by the model of the chat, also if it changes while one writes", () =>
  browser.visit({ stub: { models: ["small", "large"] } }, async ({ page, stub }) => {
    await page.getByLabel("Model").selectOption("large");
    await page.getByLabel("Your message").fill("x".repeat(400));
    await page.getByText("About 100 of").waitFor();
    await page.getByLabel("Model").selectOption("small");
    await page.waitForRequest((request) => request.url().endsWith("/tokenize"));
    await page.getByText("About 100 of").waitFor();
    assert.deepEqual(stub.counted.map(({ model }) => model), ["large", "small"]);
  }));

test("the key is asked for where it is needed, and lies behind a button", () =>
  browser.visit({ stub: { key: "secret" }, expectedErrors: [/status of 401/] }, async ({ page }) => {
    await page.getByText("This server asks for a key.").waitFor();
    assert.equal(await page.getByLabel("Key", { exact: true }).count(), 0);
    await page.getByRole("button", { name: "API key" }).click();
    assert.equal(await page.getByLabel("Key", { exact: true }).getAttribute("type"), "password");
    await page.getByLabel("Key", { exact: true }).fill("secret");
    await page.keyboard.press("Enter");
    await page.getByText("This server asks for a key.").waitFor({ state: "detached" });
    await ask(page, "Let me in");
    assert.equal(await page.evaluate(() => localStorage.getItem("keel-api-key")), null, "kept for the tab alone");
    assert.ok(!(await page.content()).includes("secret"));
    await page.reload();
    await page.locator(".plan-bar div").first().waitFor();
  }));

test("on a phone everything is there, one thing at a time", () =>
  browser.visit({ viewport: PHONE }, async ({ page }) => {
    await ask(page, "markdown");
    await page.getByRole("button", { name: "Chats", exact: true }).click();
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await ask(page, "Second");
    await page.getByRole("button", { name: "Memory", exact: true }).click();
    await page.locator(".plan-bar").waitFor();
    await page.keyboard.press("Escape");
    await page.locator(".plan-bar").waitFor({ state: "detached" });
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "no sideways scrolling");
  }));

const PIXEL = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg==", "base64");
const SEES = { stub: { sees: ["image", "video"] } };

test("pictures are attached by button, by drop and by paste, shown, and sent with their message", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Attach pictures, videos and text files" }).waitFor();
    await files(page).setInputFiles([
      { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("some notes") },
      { name: "cat.png", mimeType: "image/png", buffer: PIXEL },
    ]);
    await page.evaluate((bytes) => {
      const picture = (name) => new File([Uint8Array.from(bytes)], name, { type: "image/png" });
      const data = new DataTransfer();
      data.items.add(picture("drop.png"));
      window.dispatchEvent(new DragEvent("dragover", { dataTransfer: data, cancelable: true }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
      const pasted = new DataTransfer();
      pasted.items.add(picture("paste.png"));
      document.querySelector(".composer textarea").dispatchEvent(new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true }));
    }, [...PIXEL]);
    await page.locator(".chip.picture").nth(2).waitFor();
    await page.getByRole("button", { name: "Take drop.png away" }).click();
    await ask(page, "What is this?");
    const uri = `data:image/png;base64,${PIXEL.toString("base64")}`;
    const picture = { type: "image_url", image_url: { url: uri } };
    const text = { type: "text", text: "File notes.txt:\n```\nsome notes\n```\n\nWhat is this?" };
    assert.deepEqual(stub.requests[0].messages[0].content, [picture, picture, text]);
    assert.equal(await page.locator(".chip").count(), 0);
    const shown = page.locator(".message.user .pictures img");
    assert.equal(await shown.count(), 2);
    assert.equal(await shown.first().evaluate((image) => image.naturalWidth), 2, "the page's policy lets it be seen");
    await ask(page, "And now?");
    assert.deepEqual(stub.requests[1].messages[0].content, [picture, picture, text], "the next turn brings them again");
  }));

/** Records a short video in the page, so that the browser can play it; its bytes and a file of each kind come back. */
async function record(page) {
  const bytes = await page.evaluate(async () => {
    const canvas = document.createElement("canvas");
    canvas.width = 64;
    canvas.height = 48;
    const context = canvas.getContext("2d");
    const recorder = new MediaRecorder(canvas.captureStream(20), { mimeType: "video/webm" });
    const parts = [];
    recorder.ondataavailable = ({ data }) => parts.push(data);
    const ended = new Promise((resolve) => { recorder.onstop = resolve; });
    recorder.start();
    for (let frame = 0; frame < 12; frame++) {
      context.fillStyle = `hsl(${30 * frame} 80% 50%)`;
      context.fillRect(0, 0, 64, 48);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    recorder.stop();
    await ended;
    return [...new Uint8Array(await new Blob(parts).arrayBuffer())];
  });
  return Buffer.from(bytes);
}

test("videos are attached by button, by drop and by paste, shown with their first frame, and sent with their message", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    const film = await record(page);
    await files(page).setInputFiles([
      { name: "cat.png", mimeType: "image/png", buffer: PIXEL },
      { name: "button.webm", mimeType: "video/webm", buffer: film },
    ]);
    await page.getByRole("button", { name: "Take button.webm away" }).click();
    await page.evaluate((bytes) => {
      const data = new DataTransfer();
      data.items.add(new File([Uint8Array.from(bytes)], "drop.webm", { type: "video/webm" }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
      const pasted = new DataTransfer();
      // A kind that this browser cannot play, and that the system gave no type.
      pasted.items.add(new File(["RIFF....AVI "], "paste.avi", { type: "" }));
      document.querySelector(".composer textarea").dispatchEvent(new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true }));
    }, [...film]);
    await page.locator(".chip.video").nth(1).waitFor();
    await ask(page, "What moves?");
    const [picture, dropped, pasted, text] = stub.requests[0].messages[0].content;
    assert.equal(picture.type, "image_url");
    assert.deepEqual(dropped, { type: "video_url", video_url: { url: `data:video/webm;base64,${film.toString("base64")}` } });
    assert.ok(pasted.video_url.url.startsWith("data:video/x-msvideo;base64,"), pasted.video_url.url.slice(0, 40));
    assert.deepEqual(text, { type: "text", text: "What moves?" });
    assert.equal(await page.locator(".chip").count(), 0);
    const shown = page.locator(".message.user video");
    await page.waitForFunction(() => document.querySelector(".message.user video")?.readyState >= 2);
    assert.deepEqual(await shown.evaluate((video) => [video.videoWidth, video.videoHeight, video.controls]), [64, 48, true]);
    await page.getByText("This browser cannot play it. The model is sent it.").waitFor();
  }));

test("a model that takes pictures alone is offered no videos", () =>
  browser.visit({ stub: { sees: ["image"] } }, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Attach pictures and text files" }).waitFor();
    await files(page).setInputFiles([
      { name: "film.mp4", mimeType: "video/mp4", buffer: Buffer.from("no matter") },
      { name: "cat.png", mimeType: "image/png", buffer: PIXEL },
    ]);
    await page.getByText("film.mp4 is a video, and this model takes pictures alone.").waitFor();
    await page.locator(".chip.picture").waitFor();
    assert.equal(await page.locator(".chip").count(), 1);
    await ask(page, "What is this?");
    assert.deepEqual(stub.requests[0].messages[0].content.map(({ type }) => type), ["image_url", "text"]);
  }));

test("a video that is too large is refused, and so are more than two, and what the server says is shown", () =>
  browser.visit({ ...SEES, expectedErrors: [/400/] }, async ({ page, stub }) => {
    const drop = (names, size) => page.evaluate(([names, size]) => {
      const data = new DataTransfer();
      for (const name of names) data.items.add(new File([new Uint8Array(size)], name, { type: "video/mp4" }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
    }, [names, size]);
    await drop(["large.mp4"], (5 << 20) + 1);
    await page.getByText("large.mp4 has more than 5.00 MiB; videos of up to 5.00 MiB can be attached.").waitFor();
    await drop(["one.mp4", "two.mp4"], 3 << 20);
    await page.getByText("The attachments would have 8.00 MiB as they are sent; up to 6.68 MiB can be sent. Attach less.").waitFor();
    await page.getByRole("button", { name: "Take one.mp4 away" }).click();
    await drop(["a.mp4", "b.mp4", "c.mp4"], 9);
    await page.getByText("Up to 2 videos can be attached to one message.").waitFor();
    assert.equal(await page.locator(".chip.video").count(), 2);
    stub.refuseVideos = true;
    await page.getByLabel("Your message").fill("Look");
    await page.keyboard.press("Enter");
    await page.getByText("video 1: this is not a video that is read here").waitFor();
  }));

test("a large picture is sent smaller, and one that is broken is refused", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    await page.evaluate(async () => {
      const canvas = new OffscreenCanvas(2400, 1200);
      const context = canvas.getContext("2d");
      const noise = context.createImageData(2400, 1200);
      for (let at = 0; at < noise.data.length; at += 65536) crypto.getRandomValues(noise.data.subarray(at, at + 65536));
      for (let i = 3; i < noise.data.length; i += 4) noise.data[i] = 255;
      context.putImageData(noise, 0, 0);
      const blob = await canvas.convertToBlob({ type: "image/png" });
      const data = new DataTransfer();
      data.items.add(new File([blob], "large.png", { type: "image/png" }));
      data.items.add(new File([new Uint8Array(600 << 10)], "broken.png", { type: "image/png" }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
    });
    await page.getByText("broken.png is not a picture").waitFor();
    await page.locator(".chip.picture").waitFor();
    await ask(page, "Look");
    const { url } = stub.requests[0].messages[0].content[0].image_url;
    assert.equal(url.slice(0, 23), "data:image/jpeg;base64,");
    const size = await page.evaluate(async (uri) => {
      const image = new Image();
      image.src = uri;
      await image.decode();
      return [image.naturalWidth, image.naturalHeight];
    }, url);
    assert.deepEqual(size, [1536, 768]);
  }));

test("the Enter that confirms a word of an input method sends nothing", () =>
  browser.visit({}, async ({ page, stub }) => {
    // Safari sends it after the composition has ended, with this code alone.
    const confirm = (label, key) => page.getByLabel(label).evaluate((area, key) => {
      area.dispatchEvent(new KeyboardEvent("keydown", { key, keyCode: 229, bubbles: true, cancelable: true }));
    }, key);
    await page.getByLabel("Your message").fill("日本");
    await confirm("Your message", "Enter");
    await page.waitForTimeout(100);
    assert.equal(stub.requests.length, 0);
    await ask(page, "日本語");
    await page.locator(".message.user").hover();
    await page.getByRole("button", { name: "Edit and send again" }).click();
    await confirm("Edit your message", "Enter");
    await confirm("Edit your message", "Escape");
    await page.waitForTimeout(100);
    assert.equal(await page.getByLabel("Edit your message").count(), 1);
    assert.equal(stub.requests.length, 1);
  }));

test("on a phone Esc closes what lies on top of the chat before it stops the answer", () =>
  browser.visit({ viewport: PHONE }, async ({ page, stub }) => {
    await say(page, "slow");
    await page.getByText("word20").waitFor();
    await page.getByRole("button", { name: "Memory", exact: true }).click();
    await page.locator(".plan-bar").waitFor();
    await page.keyboard.press("Escape");
    await page.locator(".plan-bar").waitFor({ state: "detached" });
    await page.getByRole("button", { name: "Chats", exact: true }).click();
    await page.keyboard.press("Escape");
    await page.locator(".page:not(.with-sidebar)").waitFor();
    assert.equal(stub.running, 1);
    await page.keyboard.press("Escape");
    await page.getByText("Stopped.").waitFor();
  }));
