// A chat completion, streamed.

import { ApiError, ConnectionError, request } from "./client";
import { EventReader } from "./sse";

export type ContentPart =
  | { type: "text"; text: string }
  | { type: "image_url"; image_url: { url: string } }
  | { type: "video_url"; video_url: { url: string } };

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string | ContentPart[];
}

/** The fields of a request that the page uses. */
export interface ChatRequest {
  model?: string;
  messages: ChatMessage[];
  temperature?: number;
  top_p?: number;
  seed?: number;
  max_tokens?: number;
  reasoning_effort?: "none";
  response_format?: { type: "json_schema"; json_schema: { name: string; schema: unknown; strict: true } };
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

/** What came: text, reasoning, the reason of the end, or the token counts. */
export interface Part {
  content?: string;
  reasoning?: string;
  finish?: string;
  usage?: Usage;
}

function part(event: {
  choices?: { delta?: { content?: string; reasoning_content?: string }; finish_reason?: string }[];
  usage?: Usage;
}): Part {
  const choice = event.choices?.[0];
  const result: Part = {};
  if (choice?.delta?.content) result.content = choice.delta.content;
  if (choice?.delta?.reasoning_content) result.reasoning = choice.delta.reasoning_content;
  if (choice?.finish_reason) result.finish = choice.finish_reason;
  if (event.usage) result.usage = event.usage;
  return result;
}

/** Streams an answer; each part is handed over as it comes. Ends when the answer does. */
export async function streamChat(body: ChatRequest, signal: AbortSignal, onPart: (part: Part) => void): Promise<void> {
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("/v1/chat/completions", whole, signal);
  if (!response.body) throw new ConnectionError("The answer has no body.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (;;) {
    const { done, value } = await read(reader, signal);
    // The stream ends with a mark, so an end without it is a broken connection.
    if (done) throw new ConnectionError("The connection to the server broke.");
    for (const data of events.push(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, String(event.error.code), 200);
      onPart(part(event));
    }
  }
}

async function read(reader: ReadableStreamDefaultReader<string>, signal: AbortSignal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ConnectionError("The connection to the server broke.");
  }
}
