// axe-core finds nothing, in any view, on phone and desktop, light and dark; and nothing is wider than the screen.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ask, assertAccessible, DESKTOP, LAPTOP, PHONE, say, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const ERRORS = [/status of 400/, /ERR_/];

/** The views, each from the one before. */
async function everyView(page, where, narrow) {
  const check = async (view) => {
    await assertAccessible(page, `${where}: ${view}`);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${where}: ${view} scrolls sideways`);
  };
  await check("welcome");
  await ask(page, "reason");
  await ask(page, "markdown");
  await page.locator(".reasoning summary").click();
  await check("answers");
  await ask(page, "break off");
  await say(page, "too long");
  await page.locator(".message.failed").waitFor();
  await check("problems");
  await page.getByRole("button", { name: "Edit and send again" }).last().click();
  await page.getByLabel("Edit your message").waitFor();
  await check("editing");
  await page.getByLabel("Edit your message").press("Escape");
  if (narrow) await page.getByRole("button", { name: "Memory", exact: true }).click();
  await page.locator(".plan-bar div").first().waitFor();
  await check("memory");
  if (narrow) await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "Settings of this chat" }).click();
  await page.getByLabel("JSON schema").fill("{");
  await check("settings");
  if (narrow) await page.getByRole("button", { name: "Close settings" }).click();
  await page.getByRole("button", { name: "API key" }).click();
  await check("key");
  await page.keyboard.press("Escape");
  if (narrow) await page.getByRole("button", { name: "Chats", exact: true }).click();
  await page.getByRole("button", { name: /^More about/ }).click();
  await check("menu");
}

for (const colorScheme of ["light", "dark"]) {
  test(`desktop, ${colorScheme}`, () =>
    browser.visit({ viewport: DESKTOP, colorScheme, expectedErrors: ERRORS }, ({ page }) => everyView(page, `desktop ${colorScheme}`, false)));
  test(`phone, ${colorScheme}`, () =>
    browser.visit({ viewport: PHONE, colorScheme, expectedErrors: ERRORS }, ({ page }) => everyView(page, `phone ${colorScheme}`, true)));
}

test("colours follow the system, or the button", () =>
  browser.visit({ viewport: LAPTOP, colorScheme: "dark" }, async ({ page }) => {
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const dark = await background();
    await page.getByRole("button", { name: "Colours: as the system says" }).click();
    const light = await background();
    assert.notEqual(light, dark);
    await page.reload();
    await page.getByRole("button", { name: "Colours: light" }).click();
    assert.equal(await background(), dark);
    await assertAccessible(page, "laptop, dark by choice");
  }));
