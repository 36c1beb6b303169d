// The AI SDK by three of its providers: an answer, a stream, a tool that is called and answered, an object, errors.

import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.KEEL_URL ?? "http://127.0.0.1:8080";
const name = process.env.KEEL_MODEL ?? "demo";
const apiKey = process.env.KEEL_API_KEY ?? "none";
const prompt = "Tell me a story about a dog.";
const asked = { temperature: 0, maxRetries: 0, prompt };

const providers = {
  compatible: createOpenAICompatible({ name: "keel", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true }),
  chat: { languageModel: (id) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).chat(id) },
  responses: { languageModel: (id) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).responses(id) },
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey }),
};

for (const [way, provider] of Object.entries(providers)) {
  const model = provider.languageModel(name);
  const whole = await generateText({ model, maxOutputTokens: 20, ...asked });
  assert.ok(whole.text.length > 10, way);
  assert.equal(whole.usage.outputTokens, 20, way);

  const stream = streamText({ model, maxOutputTokens: 20, ...asked });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text, way);
  assert.equal(await stream.finishReason, "length", way);

  const calls = [];
  const weather = tool({
    description: "Tells the weather.",
    inputSchema: z.object({ city: z.enum(["Bern", "Rome"]) }),
    execute: async ({ city }) => {
      calls.push(city);
      return `sunny in ${city}`;
    },
  });
  const called = await generateText({
    model,
    maxOutputTokens: 80,
    tools: { weather },
    stopWhen: stepCountIs(2),
    // The first step has to call, the second may answer.
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    ...asked,
  });
  assert.ok(calls.length >= 1 && ["Bern", "Rome"].includes(calls[0]), way);
  assert.equal(called.steps.length, 2, way);

  const schema = z.object({ kind: z.enum(["cat", "dog"]), legs: z.union([z.literal(2), z.literal(4)]) });
  const { object } = await generateObject({ model, maxOutputTokens: 100, schema, ...asked });
  assert.ok(["cat", "dog"].includes(object.kind), way);

  const failing = (id, said) => generateText({ model: provider.languageModel(id), maxOutputTokens: 5, maxRetries: 0, prompt: said });
  const failed = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status && error.message.length > 10;
  await assert.rejects(failing("other", prompt), failed(404), way);
  await assert.rejects(failing(name, "a long story ".repeat(50_000)), failed(400), way);
  console.log(`the AI SDK works by ${way}`);
}
