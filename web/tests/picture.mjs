// Makes the picture of README.md from a running server: node tests/picture.mjs URL ../docs/page.webp
import { writeFileSync } from "node:fs";
import { ask, launch, say } from "./support/browser.mjs";

const [url, path] = process.argv.slice(2);
const browser = await launch();
const page = await browser.newPage({ viewport: { width: 1320, height: 800 }, colorScheme: "light" });
await page.goto(url);
await page.getByRole("button", { name: "Settings of this chat" }).click();
await page.getByLabel("Temperature", { exact: true }).fill("0.7");
await page.getByLabel("Seed").fill("11");
await page.getByLabel("Length").fill("60");
await page.getByRole("button", { name: "Memory", exact: true }).click();
for (const text of ["A boat that lies level", "Why do birds sing in the morning?"]) {
  await page.getByRole("button", { name: "New chat", exact: true }).click();
  await ask(page, text);
}
await page.getByRole("button", { name: "Settings of this chat" }).click();
await page.getByRole("button", { name: "New chat", exact: true }).click();
await page.getByLabel("Length").fill("400");
await page.getByRole("button", { name: "Memory", exact: true }).click();
await say(page, "Tell me a story about a dog and a ball.");
// Memory while an answer is being written.
await page.waitForFunction(() => document.querySelector(".answer .prose")?.textContent.length > 500 && document.querySelector("#running tbody tr"));
const png = (await page.screenshot()).toString("base64");
// The browser makes WebP of it, a third of the size. A blank page has no policy against it.
const blank = await browser.newPage();
const webp = await blank.evaluate(async (source) => {
  const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${source}`)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d").drawImage(image, 0, 0);
  const bytes = new Uint8Array(await (await canvas.convertToBlob({ type: "image/webp", quality: 0.92 })).arrayBuffer());
  return btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
}, png);
writeFileSync(path, Buffer.from(webp, "base64"));
await browser.close();
