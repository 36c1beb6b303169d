// What the server tells about itself.

import { json } from "./client";

/** Bytes by category. */
export type Bytes = Record<string, number>;

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

/** One of the devices that share the model. */
export interface Device {
  device: string;
  planned: Bytes;
  allocated: Bytes;
  peak: Bytes;
}

export interface Status {
  model: string;
  /** Bytes now; the pages of keys and values are divided by who holds them. */
  now: Bytes;
  planned: Bytes;
  allocated: Bytes;
  peak: Bytes;
  waiting: number;
  running: Sequence[];
  /** Present if several devices share the model. */
  devices?: Device[];
  /** All models of the server. */
  models?: { id: string }[];
}

export interface Model {
  id: string;
  context_length?: number;
  input_modalities?: string[];
}

export function readStatus(): Promise<Status> {
  return json("/status");
}

export async function readModels(): Promise<Model[]> {
  return (await json<{ data: Model[] }>("/v1/models")).data;
}

/** Tokens of a text. A server of several models loads the one that counts, so it has to be the chat's. */
export async function countTokens(text: string, model: string | undefined, signal: AbortSignal): Promise<number> {
  const body = model ? { text, model } : { text };
  return (await json<{ count: number }>("/tokenize", body, signal)).count;
}
