// A headless Chromium, and a page that fails its test when it loads from elsewhere, throws, or breaks its policy.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before } from "node:test";
import { chromium } from "playwright-core";
import { startStub } from "./stub.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export const DESKTOP = { width: 1440, height: 900 };
export const LAPTOP = { width: 1024, height: 700 };
export const PHONE = { width: 390, height: 844 };

export function launch() {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
  });
}

/** A browser and a stand-in server for the tests of one file. */
export function withBrowser() {
  const context = {};
  before(async () => {
    context.browser = await launch();
  });
  after(async () => {
    await context.browser?.close();
  });
  /** Runs a test on a fresh profile and a fresh server. */
  context.visit = async (options, run) => {
    const stub = options.url ? { url: options.url } : await startStub();
    Object.assign(stub, options.stub);
    const profile = await context.browser.newContext({
      viewport: options.viewport ?? DESKTOP,
      colorScheme: options.colorScheme ?? "light",
      hasTouch: options.viewport === PHONE,
      permissions: ["clipboard-read", "clipboard-write"],
      // axe is evaluated by the debugger, which the page's policy does not bind.
      reducedMotion: "reduce",
    });
    try {
      const page = await watchedPage(profile, stub.url, options.expectedErrors ?? []);
      await page.goto(stub.url);
      await page.getByLabel("Your message").waitFor();
      await run({ page, stub, profile });
      assert.deepEqual(page.problems, []);
    } finally {
      await profile.close();
      await stub.close?.();
    }
  };
  return context;
}

export async function watchedPage(profile, url, expectedErrors) {
  const page = await profile.newPage();
  page.setDefaultTimeout(30_000);
  page.problems = [];
  page.on("request", (request) => {
    if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(url)) page.problems.push(`foreign: ${request.url()}`);
  });
  page.on("pageerror", (error) => page.problems.push(`error: ${error}`));
  page.on("console", (message) => {
    if (message.type() !== "error" && !/security policy|trusted/i.test(message.text())) return;
    if (!expectedErrors.some((pattern) => pattern.test(message.text()))) page.problems.push(`console: ${message.text()}`);
  });
  return page;
}

/** Types a message and sends it by keyboard. */
export async function say(page, text) {
  await page.getByLabel("Your message").fill(text);
  await page.getByLabel("Your message").press("Enter");
}

/** Waits until nothing is being written. */
export async function settled(page) {
  await page.getByRole("button", { name: "Stop (Esc)" }).waitFor({ state: "detached", timeout: 180_000 });
}

export async function ask(page, text) {
  const before = await answers(page).count();
  await say(page, text);
  await answers(page).nth(before).waitFor();
  await settled(page);
}

export const answers = (page) => page.locator(".message.answer");

/** Everything that axe-core has rules for, best practices among them. */
export async function assertAccessible(page, where) {
  await page.evaluate(AXE);
  const { violations, passes } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const found = violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`);
  assert.deepEqual(found, [], where);
  assert.ok(passes.length > 20, "axe has looked at the page");
}
