// Pictures of the page in its states, for looking at: node tests/shots.mjs FOLDER [URL of a running server].
import { mkdirSync } from "node:fs";
import { DESKTOP, LAPTOP, PHONE, ask, launch, say } from "./support/browser.mjs";
import { startStub } from "./support/stub.mjs";

const folder = process.argv[2] ?? "shots";
mkdirSync(folder, { recursive: true });
const browser = await launch();
const stub = await startStub();
const url = process.argv[3] ?? stub.url;

async function shoot(name, viewport, colorScheme, steps) {
  const profile = await browser.newContext({ viewport, colorScheme, hasTouch: viewport === PHONE, reducedMotion: "reduce" });
  const page = await profile.newPage();
  page.setDefaultTimeout(10_000);
  await page.goto(url);
  await page.getByLabel("Your message").waitFor();
  await page.waitForTimeout(1200);
  try {
    await steps(page);
    await page.waitForTimeout(300);
    await page.screenshot({ path: `${folder}/${name}.png` });
  } catch (error) {
    console.error(name, String(error).split("\n")[0]);
  }
  await profile.close();
}

const welcome = async () => {};
const chat = async (page) => {
  await ask(page, "What is the fastest way to sort? Please reason.");
  await ask(page, "Show me markdown");
};
const scrolled = (to) => async (page) => {
  await chat(page);
  await page.locator(".log").evaluate((log, at) => (log.scrollTop = at), to);
};
for (const scheme of ["light", "dark"]) {
  await shoot(`desktop-welcome-${scheme}`, DESKTOP, scheme, welcome);
  await shoot(`desktop-chat-${scheme}`, DESKTOP, scheme, scrolled(0));
  await shoot(`desktop-chat-end-${scheme}`, DESKTOP, scheme, chat);
  await shoot(`phone-chat-${scheme}`, PHONE, scheme, scrolled(250));
  await shoot(`phone-memory-${scheme}`, PHONE, scheme, async (page) => {
    await say(page, "slow");
    await page.getByRole("button", { name: "Memory", exact: true }).click();
    await page.waitForTimeout(1500);
  });
  await shoot(`desktop-settings-${scheme}`, DESKTOP, scheme, async (page) => {
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("JSON schema").fill("{");
  });
}
await shoot("phone-list", PHONE, "light", async (page) => {
  await ask(page, "A first chat about sailing boats and the wind");
  await page.getByRole("button", { name: "Chats", exact: true }).click();
  await page.waitForTimeout(400);
});
await shoot("phone-welcome", PHONE, "dark", welcome);
await shoot("laptop-chat", LAPTOP, "light", chat);
await shoot("desktop-problems", DESKTOP, "light", async (page) => {
  await ask(page, "One");
  await ask(page, "break off");
  await say(page, "This is too long");
  await page.locator(".problem").nth(1).waitFor();
});
await shoot("desktop-edit", DESKTOP, "dark", async (page) => {
  await ask(page, "One");
  await page.getByRole("button", { name: "Another answer" }).click();
  await page.getByLabel("Version 2 of 2").waitFor();
  await page.locator(".message.user").hover();
  await page.getByRole("button", { name: "Edit and send again" }).click();
});
await shoot("desktop-running", DESKTOP, "dark", async (page) => {
  await say(page, "slow");
  await page.waitForTimeout(2500);
});
await shoot("desktop-key", DESKTOP, "light", (page) => page.getByRole("button", { name: "API key" }).click());
await shoot("desktop-menu", DESKTOP, "light", async (page) => {
  await ask(page, "One");
  await page.getByRole("button", { name: /More about/ }).click();
});
await browser.close();
await stub.close();
