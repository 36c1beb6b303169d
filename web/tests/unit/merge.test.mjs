// What several tabs change in one chat.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "../support/load.mjs";

const { merged, withoutStale } = await load("state/merge.ts");

const message = (id, parent, more = {}) => ({ id, parent, role: "user", content: id, at: Number(id.slice(1)), ...more });
const chat = (messages, leaf, more = {}) => ({
  id: "c", title: "T", created: 0, changed: 0, leaf, options: {},
  messages: Object.fromEntries(messages.map((each) => [each.id, each])), ...more,
});
/** As a chat comes out of the browser's storage: equal, and no object is the same. */
const copy = (value) => structuredClone(value);
const ids = ({ messages }) => Object.keys(messages).sort().join(" ");
const nothing = () => false;
const base = chat([message("m1", null), message("m2", "m1")], "m2");
const plus = (before, ...more) => chat([...Object.values(before.messages), ...more], more.at(-1).id);

test("messages of both tabs stay", () => {
  const mine = plus(base, message("m3", "m2"));
  const stored = copy(plus(base, message("m4", "m2"), message("m5", "m4")));
  const both = merged(mine, stored, base, nothing);
  assert.equal(ids(both), "m1 m2 m3 m4 m5");
  assert.equal(both.leaf, "m3", "this tab goes on showing its own");
});

test("what another tab adds after the end is shown", () => {
  const stored = copy(plus(base, message("m3", "m2")));
  assert.equal(merged(base, stored, base, nothing).leaf, "m3");
  const writes = (id) => id === "m2";
  assert.equal(merged(base, stored, base, writes).leaf, "m2", "but not while this tab writes the end");
});

test("what one tab removes is removed, unless a message follows it that stays", () => {
  const shorter = chat([base.messages.m1], "m1");
  assert.equal(ids(merged(base, copy(shorter), base, nothing)), "m1");
  assert.equal(merged(base, copy(shorter), base, nothing).leaf, "m1");
  assert.equal(ids(merged(shorter, copy(base), base, nothing)), "m1");
  const mine = plus(base, message("m3", "m2"));
  assert.equal(ids(merged(mine, copy(shorter), base, nothing)), "m1 m2 m3");
  const stored = copy(plus(base, message("m4", "m2")));
  assert.equal(ids(merged(shorter, stored, base, nothing)), "m1 m2 m4");
});

test("a message is as the tab has it that changed it or writes it", () => {
  const changed = { ...base.messages.m2, content: "changed" };
  const mine = chat([base.messages.m1, changed], "m2");
  assert.equal(merged(mine, copy(base), base, nothing).messages.m2.content, "changed");
  assert.equal(merged(base, copy(mine), base, nothing).messages.m2.content, "changed");
  assert.equal(merged(base, copy(mine), base, (id) => id === "m2").messages.m2.content, "m2");
});

test("title and options are as the tab has them that changed them", () => {
  const mine = { ...base, options: { seed: 1 } };
  const stored = { ...copy(base), title: "New", named: true };
  const both = merged(mine, stored, base, nothing);
  assert.deepEqual([both.title, both.named, both.options], ["New", true, { seed: 1 }]);
});

test("without a base nothing is lost", () => {
  const mine = plus(base, message("m3", "m2"));
  assert.equal(ids(merged(mine, copy(plus(base, message("m4", "m2"))), undefined, nothing)), "m1 m2 m3 m4");
});

test("an unfinished answer is replaced by its end, not the other way round", () => {
  const writing = message("m2", "m1", { content: "one", state: "writing" });
  const unfinished = chat([base.messages.m1, writing], "m2");
  const ended = chat([base.messages.m1, { ...writing, state: "stopped" }], "m2");
  assert.equal(withoutStale(unfinished, ended).messages.m2, ended.messages.m2);
  const grown = chat([base.messages.m1, { ...writing, content: "one two" }], "m2");
  assert.equal(withoutStale(grown, ended).messages.m2.content, "one two");
  assert.equal(withoutStale(ended, unfinished).messages.m2.state, "stopped");
  assert.deepEqual(withoutStale(unfinished, undefined), unfinished);
});
