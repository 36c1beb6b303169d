// The models of the server, and the one that is chosen, when they change.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ask, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();

test("a remembered model that the server no longer has is not asked for", () =>
  browser.visit({ stub: { models: ["small", "large"] } }, async ({ page, stub }) => {
    await page.getByLabel("Model", { exact: true }).selectOption("large");
    await ask(page, "Hello");
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await page.getByLabel("Model", { exact: true }).selectOption("large");
    stub.models = ["small"];
    await page.reload();
    await page.locator("span.model", { hasText: "small" }).waitFor();
    await page.getByLabel("Your message").fill("x".repeat(400));
    await page.getByText("About 100 of").waitFor();
    await ask(page, "Still there?");
    assert.equal(stub.counted.at(-1).model, undefined);
    assert.equal(stub.requests.at(-1).model, undefined);
    await page.locator(".chat-name", { hasText: "Hello" }).click();
    await ask(page, "And here?");
    assert.equal(stub.requests.at(-1).model, undefined);
    stub.models = ["other", "large"];
    await page.reload();
    await page.locator(".chat-name", { hasText: "Hello" }).click();
    assert.equal(await page.getByLabel("Model", { exact: true }).inputValue(), "large", "the choice is remembered");
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByRole("button", { name: "Clear all" }).click();
    assert.equal(await page.getByLabel("Model", { exact: true }).inputValue(), "other");
  }));

test("models that change between two looks at the server are read again", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.locator("span.model", { hasText: "demo" }).waitFor();
    stub.models = ["small", "large"];
    await page.getByLabel("Model", { exact: true }).selectOption("large");
    await ask(page, "Hello");
    assert.equal(stub.requests.at(-1).model, "large");
  }));

test("a page that comes back into view reads the models again, also if they have the same names", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.getByRole("button", { name: "Attach text files" }).waitFor();
    await page.locator(".plan-bar div").first().waitFor();
    stub.sees = ["image"];
    await page.evaluate(() => document.dispatchEvent(new Event("visibilitychange")));
    await page.getByRole("button", { name: "Attach pictures and text files" }).waitFor();
  }));
