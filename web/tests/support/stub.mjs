// A stand-in for `keel serve`: the built page under its own policy, and answers that a test can rely on.
import { createServer } from "node:http";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { answerTo } from "./answers.mjs";

const ASSETS = process.env.KEEL_PAGE ?? new URL("../../../crates/keel-server/assets/page/", import.meta.url).pathname;
const KINDS = { html: "text/html; charset=utf-8", js: "text/javascript", css: "text/css", svg: "image/svg+xml", txt: "text/plain" };
const MIB = 1 << 20;
export const CONTEXT = 4096;

const PLANNED = {
  weights: 21 * MIB, kv: 40 * MIB, recurrent: 6 * MIB, delta_log: MIB, checkpoints: 18 * MIB, activations: 9 * MIB,
  workspace: 3 * MIB, staging: MIB / 4, swap: 0, user: 0,
};

export async function startStub() {
  const stub = {
    /** Bodies of the chat requests that came. */
    requests: [],
    /** Bodies of the requests that had tokens counted. */
    counted: [],
    key: null,
    models: ["demo"],
    /** Whether the models can be shown pictures. */
    /** What its models take besides text: "image", "video". */
    sees: [],
    /** Whether videos are refused. */
    refuseVideos: false,
    /** Whether memory has been allocated yet. */
    allocated: true,
    running: 0,
    status,
    close: () => new Promise((resolve) => { server.closeAllConnections(); server.close(resolve); }),
  };
  const server = createServer((request, response) => {
    handle(stub, request, response).catch((error) => response.destroy(error));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  stub.url = `http://127.0.0.1:${server.address().port}/`;
  return stub;

  /** Devices that hold these shares of the plan. */
  function shares(parts) {
    return parts.map((part, i) => {
      const planned = Object.fromEntries(Object.entries(PLANNED).map(([name, bytes]) => [name, bytes * part]));
      return { device: `cuda:${i}`, planned, allocated: planned, peak: planned };
    });
  }

  function status() {
    const { kv, ...others } = PLANNED;
    const used = Math.min(kv, stub.running * 6 * MIB);
    const now = { ...others, "kv, in use": used, "kv, remembered": 4 * MIB, "kv, free": kv - used - 4 * MIB };
    const none = Object.fromEntries(Object.keys(PLANNED).map((name) => [name, 0]));
    const running = Array.from({ length: stub.running }, (_, i) => ({
      id: 7 + i, prompt_tokens: 312, cached_tokens: 256, prefilled_tokens: 312, generated_tokens: 48, pages: 2, pages_promised: 6,
      slot: i, drafted: 20, accepted: 15,
    }));
    return {
      model: stub.models[0], now: stub.allocated ? now : {}, planned: PLANNED, allocated: stub.allocated ? PLANNED : none,
      peak: stub.allocated ? PLANNED : none, waiting: 0, running, models: stub.models.map((id) => ({ id })), ...(stub.devices && { devices: shares(stub.devices) }),
    };
  }
}

async function handle(stub, request, response) {
  const { pathname } = new URL(request.url, stub.url);
  if (pathname === "/" || pathname.startsWith("/page/")) return asset(pathname, response);
  if (stub.key && request.headers.authorization !== `Bearer ${stub.key}`) {
    return refuse(response, 401, "invalid_api_key", "a valid API key is needed");
  }
  const body = await read(request);
  if (pathname === "/status") return json(response, 200, stub.status());
  if (pathname === "/v1/models") return json(response, 200, { data: stub.models.map((id) => ({ id, context_length: CONTEXT, input_modalities: ["text", ...stub.sees] })) });
  if (pathname === "/tokenize") {
    stub.counted.push(body);
    return json(response, 200, { count: Math.ceil(body.text.length / 4) });
  }
  if (pathname === "/v1/chat/completions") return chat(stub, body, response);
  return refuse(response, 404, "unknown_url", "no such endpoint");
}

function asset(pathname, response) {
  const name = pathname === "/" ? "index.html" : pathname.slice("/page/".length);
  try {
    const text = readFileSync(`${ASSETS}/${name}`);
    response.writeHead(200, {
      "content-type": KINDS[name.split(".").pop()],
      "content-security-policy": readFileSync(new URL("../../../crates/keel-server/assets/page/policy.txt", import.meta.url), "utf8"),
      "x-content-type-options": "nosniff",
    });
    response.end(text);
  } catch {
    response.writeHead(404).end();
  }
}

async function chat(stub, body, response) {
  stub.requests.push(body);
  const { content } = body.messages.at(-1);
  const text = typeof content === "string" ? content : (content.at(-1).text ?? "");
  if (text.includes("too long")) {
    const message = "the request needs 9000 tokens (prompt 7976, answer 1024), the context has 4096";
    return refuse(response, 400, "context_length_exceeded", message);
  }
  if (stub.refuseVideos && Array.isArray(content) && content.some(({ type }) => type === "video_url")) {
    return refuse(response, 400, "invalid_image", "video 1: this is not a video that is read here");
  }
  if (body.model !== undefined && !stub.models.includes(body.model)) {
    return refuse(response, 404, "model_not_found", `there is no model ${body.model}`);
  }
  if (text.includes("busy")) return refuse(response, 429, "queue_full", "3 requests wait already");
  const { parts, delayMs = 0, ending, finish = "stop" } = answerTo(text, stub.requests.length);
  response.writeHead(200, { "content-type": "text/event-stream" });
  const send = (event) => response.write(`data: ${JSON.stringify(event)}\n\n`);
  stub.running += 1;
  try {
    for (const part of parts) {
      if (response.destroyed) return;
      send({ choices: [{ index: 0, delta: typeof part === "string" ? { content: part } : part, finish_reason: null }] });
      await sleep(delayMs);
    }
    if (ending === "break") {
      // What was written has to arrive first.
      await sleep(100);
      return response.destroy();
    }
    if (ending === "error") {
      send({ error: { message: "the deadline has passed", code: "deadline_exceeded" } });
      return response.end();
    }
    send({ choices: [{ index: 0, delta: {}, finish_reason: finish }] });
    send({ choices: [], usage: { prompt_tokens: 20, completion_tokens: parts.length, prompt_tokens_details: { cached_tokens: 16 } } });
    response.end("data: [DONE]\n\n");
  } finally {
    stub.running -= 1;
  }
}

async function read(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return chunks.length > 0 ? JSON.parse(Buffer.concat(chunks).toString()) : undefined;
}

function json(response, status, value) {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(value));
}

function refuse(response, status, code, message) {
  json(response, status, { error: { message, code, type: "invalid_request_error", param: null } });
}
