// Chats: kept, renamed, deleted, exported, imported; and the versions within one.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { answers, ask, say, settled, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const row = (page, title) => page.locator(".chat-row", { hasText: title });
const menu = (page, title) => page.getByRole("button", { name: `More about “${title}”` });

async function saved(page, click) {
  const [download] = await Promise.all([page.waitForEvent("download"), click()]);
  return { name: download.suggestedFilename(), text: readFileSync(await download.path(), "utf8"), path: await download.path() };
}

/** The chats in the browser's storage. */
const stored = (page) => page.evaluate(() => new Promise((resolve) => {
  const opened = indexedDB.open("keel", 1);
  opened.onsuccess = () => {
    opened.result.transaction("chats").objectStore("chats").getAll().onsuccess = (event) => resolve(event.target.result);
  };
}));

/** The next time that the page reads a chat, it is told that it goes away before the answer comes. It stays, as a page
 * that comes back does. With `fails`, the transaction that is committed next is undone. */
const leavesAtNextRead = (page, { fails = false } = {}) => page.evaluate((fails) => {
  const { get } = IDBObjectStore.prototype;
  const { commit } = IDBTransaction.prototype;
  IDBObjectStore.prototype.get = function (...all) {
    IDBObjectStore.prototype.get = get;
    // What asked goes on first, and no answer comes before a microtask.
    queueMicrotask(() => dispatchEvent(new Event("pagehide")));
    return get.apply(this, all);
  };
  if (!fails) return;
  IDBTransaction.prototype.commit = function () {
    IDBTransaction.prototype.commit = commit;
    this.abort();
  };
}, fails);

async function rename(page, title, name) {
  await menu(page, title).click();
  await page.getByRole("button", { name: "Rename" }).click();
  await page.getByLabel("New name").fill(name);
  await page.keyboard.press("Enter");
}

test("chats are kept in the browser, and go on after a reload", () =>
  browser.visit({}, async ({ page, stub }) => {
    await ask(page, "First question");
    await ask(page, "Second question");
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await ask(page, "Another chat");
    await page.reload();
    await row(page, "First question").getByRole("button").first().click();
    assert.equal(await answers(page).count(), 2);
    await ask(page, "Third question");
    const sent = stub.requests.at(-1).messages;
    assert.deepEqual(sent.map((message) => message.role).join(" "), "user assistant user assistant user");
    assert.equal(sent[1].content, "Answer number 1 to “First question”.");
  }));

test("a chat is renamed, and a deleted one comes back", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "A name to change");
    await rename(page, "A name to change", "A better name");
    await row(page, "A better name").waitFor();
    await page.reload();
    await menu(page, "A better name").click();
    await page.getByRole("button", { name: "Delete" }).click();
    await row(page, "A better name").waitFor({ state: "detached" });
    await page.getByRole("button", { name: "Undo" }).click();
    await row(page, "A better name").waitFor();
    await menu(page, "A better name").click();
    await page.getByRole("button", { name: "Delete" }).click();
    await page.reload();
    await page.getByText("Kept in this browser").waitFor();
    await page.waitForTimeout(200);
    assert.equal(await page.locator(".chat-row").count(), 0);
  }));

test("a chat that is deleted as the page reloads stays deleted", () =>
  browser.visit({}, async ({ page }) => {
    for (let round = 0; round < 8; round += 1) {
      await ask(page, "Gone at once");
      await menu(page, "Gone at once").click();
      const reloaded = page.waitForEvent("load");
      // Microtasks that the click has queued run first, and nothing else does.
      await page.getByRole("button", { name: "Delete" }).evaluate((button) => {
        button.click();
        queueMicrotask(() => location.reload());
      });
      await reloaded;
      await page.getByText("Kept in this browser").waitFor();
      await page.waitForTimeout(200);
      assert.equal(await page.locator(".chat-row").count(), 0, `round ${round}`);
    }
  }));

test("an answer is stopped when its chat is deleted, and the chat that comes back goes on", () =>
  browser.visit({}, async ({ page, stub }) => {
    await say(page, "slow");
    await page.getByText("word20").waitFor();
    await menu(page, "slow").click();
    await page.getByRole("button", { name: "Delete" }).click();
    await row(page, "slow").waitFor({ state: "detached" });
    await page.getByRole("button", { name: "Undo" }).click();
    await page.getByText("Stopped.").waitFor();
    await settled(page);
    assert.ok(!(await answers(page).innerText()).includes("word399"));
    await page.waitForTimeout(500);
    assert.equal(stub.running, 0, "the server hears of it");
    await ask(page, "Next");
    assert.match(stub.requests.at(-1).messages[1].content, /^word0 /);
  }));

test("a chat that there was no room for is kept once another is deleted", () =>
  browser.visit({}, async ({ page }) => {
    const chat = (_, i) => ({ id: `c${i}`, title: `Chat ${i}.`, created: i, changed: i, messages: {}, leaf: null, options: {} });
    const text = JSON.stringify({ format: "keel-chats", version: 1, chats: Array.from({ length: 500 }, chat) });
    await page.getByLabel("A file of chats").setInputFiles({ name: "chats.json", mimeType: "application/json", buffer: Buffer.from(text) });
    await page.getByText("Imported 500 chats.").waitFor();
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await ask(page, "One too many");
    await page.getByText("This browser keeps 500 chats. Delete some to keep this one.").waitFor();
    await menu(page, "Chat 499.").click();
    await page.getByRole("button", { name: "Delete" }).click();
    await page.getByText("Deleted “Chat 499.”.").waitFor();
    await page.getByText("This browser keeps 500 chats.").waitFor({ state: "detached" });
    await page.reload();
    await row(page, "One too many").getByRole("button").first().click();
    assert.equal(await answers(page).count(), 1);
  }));

test("chats leave as Markdown and JSON, and come back", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "Please export me");
    await menu(page, "Please export me").click();
    const markdown = await saved(page, () => page.getByRole("button", { name: "Export as Markdown" }).click());
    assert.equal(markdown.name, "please-export-me.md");
    assert.ok(markdown.text.startsWith("# Please export me\n\n**You**\n\nPlease export me\n\n**Assistant**\n\nAnswer"), markdown.text);
    await page.getByRole("button", { name: "Export or import chats" }).click();
    const json = await saved(page, () => page.getByRole("button", { name: "Export all as JSON" }).click());
    assert.equal(JSON.parse(json.text).chats.length, 1);
    await page.getByLabel("A file of chats").setInputFiles(json.path);
    await page.getByText("Imported a chat.").waitFor();
    assert.equal(await page.locator(".chat-row").count(), 2);
    const wrong = join(tmpdir(), `keel-page-${process.pid}.json`);
    writeFileSync(wrong, '{"some": "file"}');
    await page.getByLabel("A file of chats").setInputFiles(wrong);
    await page.getByText("The file was not exported by this page.").waitFor();
  }));

test("another answer is a version next to the first", () =>
  browser.visit({}, async ({ page, stub }) => {
    await ask(page, "Say something");
    await page.getByRole("button", { name: "Another answer" }).click();
    await page.getByLabel("Version 2 of 2").waitFor();
    await settled(page);
    assert.match(await answers(page).innerText(), /Answer number 2/);
    assert.deepEqual(stub.requests[0].messages, stub.requests[1].messages);
    await page.getByRole("button", { name: "Earlier version" }).click();
    assert.match(await answers(page).innerText(), /Answer number 1/);
    await ask(page, "Go on");
    assert.match(stub.requests.at(-1).messages[1].content, /Answer number 1/);
    await page.getByRole("button", { name: "Later version" }).click();
    assert.equal(await answers(page).count(), 1);
  }));

test("an edited message is sent again, and the one before stays", () =>
  browser.visit({}, async ({ page, stub }) => {
    await ask(page, "Old words");
    await ask(page, "Follow-up");
    await page.locator(".message.user").first().hover();
    await page.getByRole("button", { name: "Edit and send again" }).first().click();
    await page.getByLabel("Edit your message").fill("New words");
    await page.getByLabel("Edit your message").press("Enter");
    await page.getByText("to “New words”").waitFor();
    await settled(page);
    assert.deepEqual(stub.requests.at(-1).messages, [{ role: "user", content: "New words" }]);
    await page.locator(".message.user").first().hover();
    await page.getByRole("button", { name: "Earlier version" }).click();
    assert.deepEqual(await page.locator(".bubble").allInnerTexts(), ["Old words", "Follow-up"]);
    await page.getByRole("button", { name: "Edit and send again" }).first().click();
    await page.getByLabel("Edit your message").press("Escape");
    await page.getByLabel("Edit your message").waitFor({ state: "detached" });
  }));

test("a branch is a chat of its own", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "Trunk");
    await ask(page, "More");
    await page.getByRole("button", { name: "Branch into a new chat from here" }).first().click();
    await row(page, "Trunk (branch)").waitFor();
    assert.equal(await answers(page).count(), 1);
    await ask(page, "Elsewhere");
    await page.locator(".chat-row:not(.current) .chat-name").click();
    assert.deepEqual(await page.locator(".bubble").allInnerTexts(), ["Trunk", "More"]);
  }));

test("two chats are written at once, and another tab follows", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    await say(page, "slow one");
    await answers(page).first().waitFor();
    await page.getByRole("button", { name: "New chat", exact: true }).click();
    await ask(page, "Quick one");
    const other = await profile.newPage();
    await other.goto(stub.url);
    await row(other, "Quick one").waitFor();
    await ask(page, "Quick two");
    await row(other, "Quick one").getByRole("button").first().click();
    await other.getByText("to “Quick two”").waitFor();
    await row(page, "slow one").getByRole("button").first().click();
    await settled(page);
    assert.match(await answers(page).innerText(), /word399/);
  }));

test("two tabs that go on with one chat keep the messages of both", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    await ask(page, "Begin");
    const other = await profile.newPage();
    await other.goto(stub.url);
    await row(other, "Begin").getByRole("button").first().click();
    await say(page, "slow one");
    await page.getByText("word20").waitFor();
    await ask(other, "Quick one");
    await answers(other).getByText("to “Quick one”").waitFor();
    await settled(page);
    await answers(page).last().waitFor();
    await page.waitForTimeout(300);
    for (const each of [page, other]) {
      await each.reload();
      await row(each, "Begin").getByRole("button").first().click();
      const [kept] = await stored(each);
      const messages = Object.values(kept.messages);
      const text = messages.map(({ content }) => content).join("\n");
      for (const part of ["Begin", "slow one", "word399", "Quick one", "to “Quick one”"]) assert.ok(text.includes(part), part);
      assert.equal(messages.length, 6);
      assert.deepEqual(messages.filter(({ state }) => state).map(({ state }) => state), []);
    }
  }));

test("an answer of a tab that was closed can be asked for again in another", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    const other = await profile.newPage();
    await other.goto(stub.url);
    await other.getByLabel("Your message").waitFor();
    await say(other, "slow one");
    await row(page, "slow one").getByRole("button").first().click();
    await page.getByText("Another tab is writing this answer, or was closed before its end.").waitFor();
    await other.close();
    await page.getByRole("button", { name: "Another answer" }).click();
    await page.getByText("word399").waitFor();
    await settled(page);
    await page.getByRole("button", { name: "Earlier version" }).click();
    await page.reload();
    await row(page, "slow one").getByRole("button").first().click();
    assert.equal(await page.getByLabel(/Version . of 2/).count(), 1);
  }));

test("a chat that is deleted in one tab goes from another, where its answer stops", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    await say(page, "slow one");
    await page.getByText("word20").waitFor();
    const other = await profile.newPage();
    await other.goto(stub.url);
    await menu(other, "slow one").click();
    await other.getByRole("button", { name: "Delete" }).click();
    await row(page, "slow one").waitFor({ state: "detached" });
    await page.waitForTimeout(500);
    assert.equal(stub.running, 0);
    await page.reload();
    await page.getByText("Kept in this browser").waitFor();
    await page.waitForTimeout(200);
    assert.equal(await page.locator(".chat-row").count(), 0);
  }));

test("a lost connection to the storage is opened again", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "First question");
    await page.evaluate(() => {
      const { transaction } = IDBDatabase.prototype;
      let lost;
      IDBDatabase.prototype.transaction = function (...all) {
        lost ??= this;
        if (this === lost) throw new DOMException("The connection was closed.", "InvalidStateError");
        return transaction.apply(this, all);
      };
    });
    await ask(page, "Second question");
    assert.equal(await page.locator(".banner").count(), 0);
    await page.reload();
    await row(page, "First question").getByRole("button").first().click();
    assert.deepEqual(await page.locator(".bubble").allInnerTexts(), ["First question", "Second question"]);
  }));

test("a storage that could not be opened is tried again", () =>
  browser.visit({}, async ({ page }) => {
    await page.addInitScript(() => {
      const { open } = IDBFactory.prototype;
      let left = 2;
      IDBFactory.prototype.open = function (...all) {
        left -= 1;
        if (left < 0) return open.apply(this, all);
        // A version lower than that of the database makes a request fail.
        open.call(this, "other", 2);
        return open.call(this, "other", 1);
      };
    });
    await page.reload();
    await page.getByText("This browser does not keep chats").waitFor();
    await ask(page, "Kept after all");
    await page.getByText("This browser does not keep chats").waitFor({ state: "detached" });
    assert.deepEqual((await stored(page)).map(({ title }) => title), ["Kept after all"]);
  }));

test("a change that is not written yet is written as its page goes away", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "Old name");
    await leavesAtNextRead(page);
    await rename(page, "Old name", "New name");
    await row(page, "New name").waitFor();
    await page.reload();
    await row(page, "New name").waitFor();
    assert.equal(await page.locator(".chat-row").count(), 1);
  }));

test("a chat whose last write fails as its page goes away stays in a page that comes back", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "Trunk");
    await leavesAtNextRead(page, { fails: true });
    await page.getByRole("button", { name: "Branch into a new chat from here" }).click();
    await page.getByText("This browser does not keep chats").waitFor();
    await rename(page, "Trunk (branch)", "Branch");
    await page.getByText("This browser does not keep chats").waitFor({ state: "detached" });
    await row(page, "Branch").waitFor();
    assert.deepEqual((await stored(page)).map(({ title }) => title).sort(), ["Branch", "Trunk"]);
  }));

test("a change that fails as its page goes away is written with the next one", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "Old name");
    await leavesAtNextRead(page, { fails: true });
    await rename(page, "Old name", "New name");
    await row(page, "New name").waitFor();
    await ask(page, "Next");
    await row(page, "New name").waitFor();
    assert.deepEqual((await stored(page)).map(({ title }) => title), ["New name"]);
  }));

test("a page that goes away and comes back has the news of another tab", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    await ask(page, "Old name");
    const other = await profile.newPage();
    await other.goto(stub.url);
    await row(other, "Old name").waitFor();
    await leavesAtNextRead(page);
    await rename(other, "Old name", "New name");
    await row(page, "New name").waitFor();
  }));

test("a page that goes away and comes back has its chats, also after its storage was cleared", () =>
  browser.visit({}, async ({ page, stub, profile }) => {
    await ask(page, "Old name");
    const other = await profile.newPage();
    await other.goto(stub.url);
    await row(other, "Old name").waitFor();
    await page.evaluate(() => new Promise((resolve, reject) => {
      const request = indexedDB.deleteDatabase("keel");
      request.onsuccess = resolve;
      request.onerror = reject;
    }));
    await leavesAtNextRead(page);
    const left = page.evaluate(() => new Promise((resolve) => addEventListener("pagehide", () => resolve())));
    await rename(other, "Old name", "New name");
    await left;
    await page.waitForTimeout(200);
    assert.equal(await page.locator(".chat-row").count(), 1);
    assert.equal(await answers(page).count(), 1);
  }));
