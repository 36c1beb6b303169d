// Files that take time to read, and what becomes of large pictures.
import assert from "node:assert/strict";
import { test } from "node:test";
import { answers, ask, say, settled, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const SEES = { stub: { sees: ["image", "video"] } };

test("the transparent parts of a large picture become white", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Attach pictures, videos and text files" }).waitFor();
    await page.evaluate(async () => {
      const canvas = new OffscreenCanvas(64, 64);
      canvas.getContext("2d");
      const clear = await canvas.convertToBlob({ type: "image/png" });
      const data = new DataTransfer();
      // Readers of PNG skip what follows its end; it makes the file large.
      data.items.add(new File([clear, new Uint8Array(600 << 10)], "clear.png", { type: "image/png" }));
      window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
    });
    await page.locator(".chip.picture").waitFor();
    await ask(page, "Look");
    const { url } = stub.requests[0].messages[0].content[0].image_url;
    const pixel = await page.evaluate(async (uri) => {
      const image = new Image();
      image.src = uri;
      await image.decode();
      const context = new OffscreenCanvas(64, 64).getContext("2d");
      context.drawImage(image, 0, 0);
      return [...context.getImageData(32, 32, 1, 1).data];
    }, url);
    assert.deepEqual(pixel, [255, 255, 255, 255]);
  }));

/** Drops a large picture whose reading takes as long as the page's `finish` is not called; `broken` ones then fail. */
const dropSlowly = (page, broken) => page.evaluate(async (broken) => {
  const canvas = new OffscreenCanvas(8, 8);
  canvas.getContext("2d").fillRect(0, 0, 8, 8);
  const blob = await canvas.convertToBlob({ type: "image/png" });
  const read = window.createImageBitmap.bind(window);
  window.createImageBitmap = async (file) => {
    await new Promise((resolve) => { window.finish = resolve; });
    if (broken) throw new Error("broken");
    return read(file);
  };
  const data = new DataTransfer();
  data.items.add(new File([blob, new Uint8Array(600 << 10)], "slow.png", { type: "image/png" }));
  window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
}, broken);

test("a message waits for a file that is still being read", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Attach pictures, videos and text files" }).waitFor();
    await dropSlowly(page, false);
    await page.getByText("Reading a file…").waitFor();
    await say(page, "What is this?");
    await page.waitForTimeout(200);
    assert.equal(stub.requests.length, 0);
    await page.evaluate(() => window.finish());
    await answers(page).first().waitFor();
    await settled(page);
    assert.deepEqual(stub.requests[0].messages[0].content.map(({ type }) => type), ["image_url", "text"]);
    assert.equal(await page.getByText("Reading a file…").count(), 0);
    assert.equal(await page.getByLabel("Your message").inputValue(), "");
  }));

test("a message whose file cannot be read stays with its writer, and so does one of another chat", () =>
  browser.visit(SEES, async ({ page, stub }) => {
    await ask(page, "First");
    await dropSlowly(page, true);
    await say(page, "What is this?");
    await page.evaluate(() => window.finish());
    await page.getByText("slow.png is not a picture").waitFor();
    assert.equal(await page.getByLabel("Your message").inputValue(), "What is this?");
    await dropSlowly(page, false);
    await page.getByLabel("Your message").press("Enter");
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await page.evaluate(() => window.finish());
    await page.waitForFunction(() => window.finish).then(() => page.waitForTimeout(200));
    assert.equal(stub.requests.length, 1);
    assert.equal(await page.getByLabel("Your message").inputValue(), "What is this?");
  }));
