// The memory panel.
import assert from "node:assert/strict";
import { test } from "node:test";
import { say, withBrowser } from "../support/browser.mjs";

const browser = withBrowser();
const sum = (values) => values.reduce((a, b) => a + b, 0);

test("the plan is drawn before anything is allocated", () =>
  browser.visit({ stub: { allocated: false } }, async ({ page, stub }) => {
    await page.locator(".plan-bar div").first().waitFor();
    const planned = stub.status().planned;
    const total = sum(Object.values(planned));
    const parts = await page.$$eval(".plan-bar div", (all) => all.map((part) => ({ category: part.dataset.category, width: part.offsetWidth, grow: Number(part.style.flexGrow) })));
    assert.deepEqual(parts.map((part) => part.category).sort(), Object.keys(planned).filter((name) => planned[name] > 0).sort());
    for (const { category, grow, width } of parts) {
      assert.ok(Math.abs(grow - planned[category] / total) < 1e-6, category);
      assert.ok(width > 0, category);
    }
    await page.getByText("0 B of it are allocated so far.").waitFor();
    assert.equal(stub.requests.length, 0);
  }));

test("areas add up to what is allocated, and what is free is not red", () =>
  browser.visit({}, async ({ page, stub }) => {
    await page.locator('.timeline [data-category="kv, free"]').waitFor();
    const areas = await page.$$eval(".timeline [data-category]", (all) => all.map((area) => ({
      category: area.dataset.category, bytes: Number(area.dataset.bytes), d: area.getAttribute("d"), fill: getComputedStyle(area).fill,
    })));
    assert.equal(sum(areas.map((area) => area.bytes)), sum(Object.values(stub.status().allocated)));
    assert.ok(areas.every((area) => /^M[\d.,L-]+Z$/.test(area.d)));
    assert.match(areas.find((area) => area.category === "kv, free").fill, /free-hatch/);
    const hues = await page.$$eval(".timeline .hatch, .swatch.c-free, .plan-bar div", (all) => all.map((each) => {
      const style = getComputedStyle(each);
      return each.matches(".hatch") ? style.stroke : style.backgroundColor === "rgba(0, 0, 0, 0)" ? style.backgroundImage : style.backgroundColor;
    }));
    for (const colour of hues.join(" ").matchAll(/rgb\((\d+), (\d+), (\d+)\)/g)) {
      const [red, green, blue] = colour.slice(1).map(Number);
      assert.ok(!(red > 150 && green < red / 2 && blue < red / 2), `${colour[0]} is red`);
    }
  }));

test("running requests have a row, and free pages shrink", () =>
  browser.visit({}, async ({ page }) => {
    await page.getByText("Nothing runs.").waitFor();
    await say(page, "slow");
    await page.locator("#running tbody tr").waitFor();
    assert.match(await page.locator("#running tbody tr").innerText(), /312\s+256\s+48\s+2 of 6\s+75%/);
    assert.match(await page.locator("#categories").innerText(), /in use\s+6\.00 MiB/);
    await page.keyboard.press("Escape");
    await page.getByText("Nothing runs.").waitFor();
  }));

test("a server that goes away is said so, and found again", () =>
  browser.visit({ expectedErrors: [/ERR_/] }, async ({ page }) => {
    await page.locator(".plan-bar div").first().waitFor();
    await page.route("**/status", (route) => route.abort());
    await page.getByText("The server cannot be reached.").waitFor();
    await page.unroute("**/status");
    await page.getByText("The server cannot be reached.").waitFor({ state: "detached" });
  }));

test("the panel closes, and stays so", () =>
  browser.visit({}, async ({ page }) => {
    await page.getByRole("button", { name: "Close memory" }).click();
    await page.reload();
    await page.getByLabel("Your message").waitFor();
    assert.equal(await page.locator(".panel").count(), 0);
    await page.getByRole("button", { name: "Memory", exact: true }).click();
    await page.locator(".panel").waitFor();
  }));

test("devices that share the model have a bar each, as long as what they hold", () =>
  browser.visit({ stub: { devices: [0.75, 0.25] } }, async ({ page }) => {
    await page.locator(".device").nth(1).waitFor();
    const bars = await page.$$eval(".device", (all) => all.map((each) => ({
      device: each.dataset.device, width: each.querySelector(".plan-bar").offsetWidth, text: each.innerText,
    })));
    assert.deepEqual(bars.map((bar) => bar.device), ["cuda:0", "cuda:1"]);
    assert.ok(Math.abs(bars[1].width / bars[0].width - 1 / 3) < 0.02, JSON.stringify(bars));
    assert.match(bars[0].text, /cuda:0 .* planned, .* at most so far/);
  }));
