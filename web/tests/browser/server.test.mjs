// The page with a real `keel serve` and the built-in model: KEEL_BIN names the program.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { answers, ask, assertAccessible, say, settled, withBrowser } from "../support/browser.mjs";

const PROGRAM = process.env.KEEL_BIN ?? new URL("../../../target/release/keel", import.meta.url).pathname;
const missing = existsSync(PROGRAM) ? false : `${PROGRAM} is not there: cargo build --release --bin keel`;
const browser = withBrowser();
let server;
let url;

/** Starts the server on a free port, which its log names. */
async function start() {
  server = spawn(PROGRAM, ["serve", "--port", "0", "--context", "1024"], { stdio: ["ignore", "pipe", "pipe"] });
  let log = "";
  const collect = (chunk) => (log += chunk);
  server.stdout.on("data", collect);
  server.stderr.on("data", collect);
  for (let waited = 0; waited < 120_000; waited += 100) {
    const found = /http:\/\/[\w.]+:\d+/.exec(log);
    if (found && (await fetch(`${found[0]}/health`).catch(() => null))?.ok) return `${found[0]}/`;
    if (server.exitCode !== null) break;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`keel serve does not answer:\n${log}`);
}

before(async () => {
  if (!missing) url = await start();
});
after(() => server?.kill());

test("the server sends the files and the policy that the other tests use", { skip: missing }, async () => {
  const assets = new URL("../../../crates/keel-server/assets/page/", import.meta.url);
  const reply = await fetch(url);
  assert.equal(reply.headers.get("content-encoding"), "gzip", "fetch takes gzip, as browsers do");
  assert.equal(reply.headers.get("content-security-policy"), readFileSync(new URL("policy.txt", assets), "utf8"));
  for (const name of ["app.js", "app.css", "icon.svg", "licences.txt"]) {
    const sent = await (await fetch(`${url}page/${name}`)).text();
    assert.ok(sent === readFileSync(new URL(name, assets), "utf8"), `${name} is the committed one`);
  }
});

test("a story, a stop, and memory that adds up", { skip: missing }, () =>
  browser.visit({ url }, async ({ page }) => {
    // Machines that test are busy, and the model tells stories to the end of its context.
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("Length").fill("40");
    await page.getByRole("button", { name: "Memory", exact: true }).click();
    await ask(page, "Tell me a story about a dog.");
    assert.ok((await answers(page).innerText()).length > 40);
    assert.match(await answers(page).locator(".speed").innerText(), /\d+ tokens/);
    await say(page, "And then?");
    await page.waitForFunction(() => document.querySelectorAll(".answer .prose p").length > 1);
    await page.keyboard.press("Escape");
    await settled(page);
    await page.getByText("Nothing runs.").waitFor();
    const areas = await page.$$eval(".timeline [data-category]", (all) => all.map((area) => Number(area.dataset.bytes)));
    const { allocated } = await (await fetch(`${url}status`)).json();
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    assert.equal(sum(areas), sum(Object.values(allocated)));
    await page.getByText("Exactly this is allocated").waitFor();
    await assertAccessible(page, "a chat with a real server");
  }));

test("a message beyond the context is shown as too long, and the chat goes on", { skip: missing }, () =>
  browser.visit({ url, expectedErrors: [/status of 400/] }, async ({ page }) => {
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("Length").fill("40");
    await ask(page, "Hello!");
    await page.getByLabel("Your message").fill("once upon a time ".repeat(800));
    await page.getByText("Too long for the model").waitFor();
    await page.getByLabel("Your message").press("Enter");
    await page.getByText("Too long, not sent.").waitFor();
    assert.match(await page.locator(".problem").innerText(), /1024/);
    await ask(page, "Something short.");
    assert.equal(await answers(page).count(), 2);
  }));

test("settings reach the model: a seed repeats, a length cuts, a schema holds", { skip: missing }, () =>
  browser.visit({ url }, async ({ page }) => {
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("Temperature", { exact: true }).fill("1");
    await page.getByLabel("Seed").fill("7");
    await page.getByLabel("Length").fill("24");
    await ask(page, "Tell me a story.");
    const first = await answers(page).locator(".prose").innerText();
    await page.getByText("The answer reached its length").waitFor();
    await page.getByRole("button", { name: "Another answer" }).click();
    await page.getByLabel("Version 2 of 2").waitFor();
    await settled(page);
    assert.equal(await answers(page).locator(".prose").innerText(), first);
    await page.getByLabel("Length").fill("200");
    await page.getByLabel("JSON schema").fill('{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}');
    await ask(page, "Is it so?");
    assert.equal(typeof JSON.parse(await answers(page).last().locator("pre").innerText()).ok, "boolean");
  }));
