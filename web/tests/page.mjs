// Clicks through a chat in headless Chromium and reads the chart. A server must run; see README.md.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const url = process.env.KEEL_URL ?? "http://127.0.0.1:8080/";
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"],
});
const page = await browser.newPage();
const foreign = [];
const errors = [];
page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("data:") || foreign.push(request.url()));
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => message.type() === "error" && errors.push(message.text()));

await page.goto(url);
const answer = page.locator(".message.assistant");

// By keyboard alone: the input has the focus, Enter sends.
await page.keyboard.type("Tell me a story about a dog.");
await page.keyboard.press("Enter");
await page.waitForFunction(() => (document.querySelector(".message.assistant")?.textContent ?? "").length > 20);
await page.waitForFunction(() => document.querySelector("#running tbody tr") || !document.querySelector("#send").disabled);
await page.waitForFunction(() => !document.querySelector("#send").disabled, undefined, { timeout: 60000 });
assert.equal(await page.locator(".message.user").count(), 1);

// By mouse: a second turn, and a stop.
await page.fill("#input", "And then?");
await page.click("#send");
// One that is stopped before it has said anything leaves no message.
await page.waitForFunction(() => document.querySelectorAll(".message.assistant")[1]?.textContent);
await page.click("#stop", { timeout: 5000 }).catch(() => {});
await page.waitForFunction(() => !document.querySelector("#send").disabled, undefined, { timeout: 60000 });
assert.equal(await answer.count(), 2);

// The chart has an area for each category, which adds up to what is allocated.
await page.waitForFunction(() => Number(document.querySelector("#chart path")?.dataset.samples) >= 3);
const areas = await page.$$eval("#chart path", (paths) =>
  paths.map((p) => ({ category: p.dataset.category, bytes: Number(p.dataset.bytes), d: p.getAttribute("d") })));
assert.ok(areas.some((a) => a.category === "weights" && a.bytes > 1e6), JSON.stringify(areas));
assert.ok(areas.every((a) => /^M[\d.,L-]+Z$/.test(a.d)), "the areas are drawn");
const status = await (await fetch(new URL("/status", url))).json();
const sum = (bytes) => Object.values(bytes).reduce((a, b) => a + b, 0);
assert.equal(areas.reduce((a, b) => a + b.bytes, 0), sum(status.allocated));
assert.ok(await page.locator("#plan tbody tr").count() >= 5);

// A phone: one column, nothing wider than the screen.
await page.setViewportSize({ width: 375, height: 700 });
assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= 375), "no sideways scrolling");

await page.click("#reset");
assert.equal(await page.locator(".message").count(), 0);
assert.deepEqual(foreign, [], "nothing comes from elsewhere");
assert.deepEqual(errors, []);
if (process.env.SCREENSHOT) await page.screenshot({ path: process.env.SCREENSHOT });
await browser.close();
console.log("the page works");
