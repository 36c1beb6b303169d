import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "../support/load.mjs";

const { pathTo, childrenOf, newestEnd, withMessage, withoutBranch, branchAt, lastGood } = await load("state/tree.ts");

const message = (id, parent, role = "user", more = {}) => ({ id, parent, role, content: id, at: Number(id.slice(1)), ...more });

/** m1 has two answers, m2 and m3; m2 goes on to m4. */
function chat() {
  const messages = [message("m1", null), message("m2", "m1", "assistant"), message("m3", "m1", "assistant"), message("m4", "m2")];
  return {
    id: "c", title: "T", created: 0, changed: 0, leaf: "m4", options: { seed: 1 },
    messages: Object.fromEntries(messages.map((each) => [each.id, each])),
  };
}
const ids = (messages) => messages.map((each) => each.id).join(" ");

test("a path leads from the first message to the last", () => {
  assert.equal(ids(pathTo(chat(), "m4")), "m1 m2 m4");
  assert.equal(ids(pathTo(chat(), null)), "");
});

test("versions are ordered by time, and the newest continuation is found", () => {
  assert.equal(ids(childrenOf(chat(), "m1")), "m2 m3");
  assert.equal(newestEnd(chat(), "m2"), "m4");
  assert.equal(newestEnd(chat(), "m1"), "m3");
});

test("adding leaves the old chat as it was", () => {
  const before = chat();
  const after = withMessage(before, message("m9", "m4", "assistant"));
  assert.equal(Object.keys(before.messages).length, 4);
  assert.equal(after.messages.m9.parent, "m4");
  assert.equal(after.changed, 9);
});

test("removing takes what follows along, and shows a neighbour", () => {
  const rest = withoutBranch(chat(), "m2");
  assert.equal(Object.keys(rest.messages).join(" "), "m1 m3");
  assert.equal(rest.leaf, "m3");
  assert.equal(withoutBranch(chat(), "m1").leaf, null);
  assert.equal(withoutBranch(chat(), "none").leaf, "m4");
});

test("a branch is a chat of its own with the path alone", () => {
  const branch = branchAt(chat(), "m2", 77);
  assert.notEqual(branch.id, "c");
  assert.equal(Object.keys(branch.messages).join(" "), "m1 m2");
  assert.deepEqual([branch.leaf, branch.created, branch.options.seed], ["m2", 77, 1]);
});

test("a message that was refused is passed over", () => {
  const failed = withMessage(chat(), message("m5", "m4", "user", { state: "failed" }));
  assert.equal(lastGood({ ...failed, leaf: "m5" }), "m4");
  const first = { ...chat(), messages: { m1: message("m1", null, "user", { state: "failed" }) }, leaf: "m1" };
  assert.equal(lastGood(first), null);
});

test("a damaged chat whose messages form a ring ends", () => {
  const ring = { ...chat(), messages: { m1: message("m1", "m2"), m2: message("m2", "m1") }, leaf: "m2" };
  assert.equal(pathTo(ring, "m2").length, 2);
  assert.ok(newestEnd(ring, "m1"));
  assert.equal(Object.keys(withoutBranch(ring, "m1").messages).length, 0);
});
