// The server's endpoints that the page uses.

export interface Sequence {
  id: number;
  prompt_tokens: number;
  cached_tokens: number;
  prefilled_tokens: number;
  generated_tokens: number;
  pages: number;
  pages_promised: number;
  slot: number;
  drafted: number;
  accepted: number;
}

export type Bytes = Record<string, number>;

export interface Status {
  model: string;
  /** Bytes now, by what they are for: the pages of keys and values are divided by who holds them. */
  now: Bytes;
  planned: Bytes;
  allocated: Bytes;
  peak: Bytes;
  waiting: number;
  running: Sequence[];
}

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export interface Delta {
  content?: string;
  reasoning_content?: string;
}

export class ApiError extends Error {}

function headers(): HeadersInit {
  const key = document.querySelector<HTMLInputElement>("#key")?.value ?? "";
  const json = { "content-type": "application/json" };
  return key ? { ...json, authorization: `Bearer ${key}` } : json;
}

async function expectOk(response: Response): Promise<Response> {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(body?.error?.message ?? `the server answered ${response.status}`);
}

export async function status(): Promise<Status> {
  const response = await expectOk(await fetch("/status", { headers: headers() }));
  return response.json();
}

/** Streams an answer; each delta is handed over as it comes. */
export async function chat(messages: Message[], signal: AbortSignal, onDelta: (delta: Delta) => void): Promise<void> {
  const body = JSON.stringify({ messages, stream: true });
  const init = { method: "POST", headers: headers(), body, signal };
  const response = await expectOk(await fetch("/v1/chat/completions", init));
  if (!response.body) throw new ApiError("the answer has no body");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.message);
      onDelta(event.choices?.[0]?.delta ?? {});
    }
  }
}
