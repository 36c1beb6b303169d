// What answers look like, and what a hostile one cannot do.
import assert from "node:assert/strict";
import { test } from "node:test";
import { answers, ask, say, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const REFUSED = [/status of (400|429)/];

test("Markdown, tables, code and mathematics", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "markdown");
    const prose = answers(page).locator(".prose");
    assert.equal(await prose.locator("h2.level-1").innerText(), "Level one");
    for (const tag of ["em", "strong", "del", "sub", "blockquote", "ul li ol li"]) assert.ok(await prose.locator(tag).count(), tag);
    assert.match(await prose.locator("ul").innerText(), /☑ done\s+☐ to do/);
    assert.deepEqual(await prose.locator("td").allInnerTexts(), ["small", "1,200", "fast", "large", "95", "slow"]);
    assert.equal(await prose.locator("td").nth(1).evaluate((cell) => getComputedStyle(cell).textAlign), "right");
    const link = prose.getByRole("link", { name: "link", exact: true });
    assert.deepEqual(
      await link.evaluate((a) => [a.href, a.target, a.rel]),
      ["https://example.com/a?b=c", "_blank", "noopener noreferrer nofollow"],
    );
    assert.equal(await prose.getByRole("link", { name: "a cat" }).getAttribute("href"), "https://example.com/cat.png");
    assert.equal(await prose.locator("img").count(), 0);
    assert.equal(await prose.locator(".code-bar span").innerText(), "rust");
    assert.ok((await prose.locator("pre .hljs-keyword").allInnerTexts()).includes("let"));
    assert.equal(await prose.locator("math").count(), 3);
    assert.equal(await prose.locator("math[display=block] mtd").count(), 4);
    assert.match(await prose.innerText(), /it costs \$5 or \$6/);
  }));

test("code and whole answers are copied as they were written", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "markdown");
    const clipboard = () => page.evaluate(() => navigator.clipboard.readText());
    await page.getByRole("button", { name: "Copy", exact: true }).nth(1).click();
    await page.getByText("Copied").waitFor();
    assert.match(await clipboard(), /^\/\/\/ Adds\.\nfn add\(a: u32, b: u32\) -> u32 \{\n {4}let sum/);
    await answers(page).locator(".actions").getByRole("button", { name: "Copy" }).click();
    await page.waitForTimeout(100);
    assert.match(await clipboard(), /^# Level \*\*one\*\*/);
  }));

test("nothing of a hostile answer runs, loads, submits or imitates the page", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "hostile");
    await page.waitForTimeout(300);
    assert.equal(await page.evaluate(() => window.hacked), undefined);
    const prose = answers(page).locator(".prose");
    assert.match(await prose.innerText(), /<script>window\.hacked = 1<\/script>/, "HTML is shown as the text that it is");
    assert.match(await prose.innerText(), /The end of it\./);
    const found = await prose.evaluate((root) => {
      const all = [...root.querySelectorAll("*")].filter((element) => !element.closest(".code-bar"));
      const attributes = all.flatMap((element) => [...element.attributes].map(({ name, value }) => ({ element: element.localName, name, value })));
      return {
        elements: all.map((element) => element.localName).filter((name) =>
          /^(script|style|iframe|object|embed|form|input|button|img|svg|animate|base|link|meta|textarea|select)$/.test(name)),
        handlers: attributes.filter(({ name }) => name.startsWith("on") || /^(src|srcdoc|formaction|action|xlink:href|id|name)$/.test(name)),
        links: attributes.filter(({ name, value }) => name === "href" && !/^https?:\/\//.test(value)),
        styles: attributes.filter(({ element, name }) => name === "style" && !["math", "mrow", "mo", "mi", "mtd", "mspace", "msup"].includes(element)),
        classes: attributes.filter(({ name, value }) => name === "class" && /icon-button|primary|banner/.test(value)),
      };
    });
    assert.deepEqual(found, { elements: [], handlers: [], links: [], styles: [], classes: [] });
    for (const name of ["click", "data", "vb", "local"]) assert.equal(await prose.getByRole("link", { name, exact: true }).count(), 0, name);
    await page.reload();
    await page.locator(".chat-name").first().click();
    await page.getByText("The end of it.").waitFor();
    assert.equal(await page.evaluate(() => window.hacked), undefined);
  }));

test("a message, a title and a file with HTML in them are text, too", () =>
  browser.visit({}, async ({ page }) => {
    const evil = '<img src=x onerror="window.hacked=1"> javascript:alert(1)';
    await page.locator("input[type=file][multiple]").setInputFiles({ name: "<b onmouseover=alert(1)>.txt", mimeType: "text/plain", buffer: Buffer.from(evil) });
    await page.locator(".chip").waitFor();
    await ask(page, evil);
    assert.equal(await page.locator(".bubble").innerText(), evil);
    assert.equal(await page.locator(".chat-name span").first().innerText(), evil);
    assert.equal(await page.locator("img, .file b").count(), 0);
    assert.equal(await page.evaluate(() => window.hacked), undefined);
  }));

test("an answer that is nested deeper than anybody reads is shown as it is", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "nested");
    assert.match(await answers(page).innerText(), />>>> deep/);
    await ask(page, "And now?");
    assert.match(await answers(page).last().innerText(), /Answer number 2/);
  }));

test("the policy lets no code in that the server did not send", () =>
  browser.visit({ expectedErrors: [/security policy|trusted/i] }, async ({ page }) => {
    const outcome = await page.evaluate(() => {
      const script = document.createElement("script");
      try {
        script.textContent = "window.hacked = 1";
        document.body.append(script);
      } catch (error) {
        return error.name;
      }
      return String(window.hacked);
    });
    assert.match(outcome, /TypeError|undefined/);
    assert.equal(await page.evaluate(() => { try { document.body.insertAdjacentHTML("beforeend", "<b>x</b>"); return "in"; } catch { return "out"; } }), "out");
  }));

test("references become links when their definition comes", () =>
  browser.visit({}, async ({ page }) => {
    await ask(page, "references");
    const link = answers(page).getByRole("link", { name: "the manual" });
    assert.equal(await link.getAttribute("href"), "https://example.com/manual");
    assert.equal(await answers(page).getByRole("link").count(), 2);
  }));

test("reasoning is folded away", () =>
  browser.visit({}, async ({ page, stub }) => {
    await ask(page, "reason about it");
    const reasoning = answers(page).locator("details.reasoning");
    assert.equal(await reasoning.getAttribute("open"), null);
    assert.equal(await answers(page).locator(":scope > .prose").innerText(), "The answer is 4.");
    await reasoning.locator("summary").click();
    assert.equal(await reasoning.locator(".prose").innerText(), "First this, then that.");
    await ask(page, "And now?");
    assert.equal(stub.requests.at(-1).messages[1].content, "The answer is 4.", "reasoning is not sent again");
  }));

test("a message that is too long says so, and the chat goes on without it", () =>
  browser.visit({ expectedErrors: REFUSED }, async ({ page, stub }) => {
    await ask(page, "Short");
    await say(page, "This is too long");
    await page.getByText("Too long, not sent.").waitFor();
    assert.match(await page.locator(".problem").innerText(), /9000 tokens .*4096/);
    assert.equal(await answers(page).count(), 1);
    await ask(page, "Shorter");
    assert.deepEqual(stub.requests.at(-1).messages.map((message) => message.content), ["Short", "Answer number 1 to “Short”.", "Shorter"]);
    assert.equal(await page.locator(".problem").count(), 0);
  }));

test("a message that was refused is edited, tried again or removed", () =>
  browser.visit({ expectedErrors: REFUSED }, async ({ page, stub }) => {
    await say(page, "busy");
    await page.getByText("Not sent. 3 requests wait already").waitFor();
    await page.getByRole("button", { name: "Try again" }).click();
    await page.waitForFunction(() => document.querySelector(".problem") && !document.querySelector('[aria-label="Stop (Esc)"]'));
    assert.equal(stub.requests.length, 2);
    await page.getByRole("button", { name: "Edit and send again" }).click();
    await page.getByLabel("Edit your message").fill("calm");
    await page.getByLabel("Edit your message").press("Enter");
    await page.getByText("to “calm”").waitFor();
    await page.locator(".message.user").hover();
    await page.getByRole("button", { name: "Earlier version" }).click();
    await page.getByRole("button", { name: "Remove" }).click();
    assert.deepEqual(await page.locator(".bubble").allInnerTexts(), ["calm"]);
  }));

test("an answer that breaks off keeps what came, and says why it ended", () =>
  browser.visit({ expectedErrors: [/ERR_/] }, async ({ page }) => {
    await ask(page, "break off");
    assert.match(await answers(page).innerText(), /Half an ans[\s\S]*The answer broke off\. The connection to the server broke\./);
    await ask(page, "fail late");
    assert.match(await answers(page).last().innerText(), /Half an ans[\s\S]*the deadline has passed/);
    await ask(page, "cut");
    assert.match(await answers(page).last().innerText(), /The answer reached its length/);
  }));
