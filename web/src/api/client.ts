// Requests to the server that the page came from, with the key if there is one.

import { apiKey } from "../state/key";

/** An answer other than 2xx, or an error within a stream. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly code: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** The server cannot be reached, or the connection broke. */
export class ConnectionError extends Error {}

function headers(): Record<string, string> {
  const key = apiKey();
  return {
    "content-type": "application/json",
    ...(key ? { authorization: `Bearer ${key}` } : {}),
  };
}

async function refusal(response: Response): Promise<ApiError> {
  const body = await response.json().catch(() => undefined);
  const error = body?.error;
  const message = typeof error?.message === "string" ? error.message : `the server answered ${response.status}`;
  return new ApiError(message, String(error?.code ?? response.status), response.status);
}

/** Sends a request. `body` makes it a POST. */
export async function request(path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const init: RequestInit = { headers: headers(), signal: signal ?? null };
  if (body !== undefined) {
    init.method = "POST";
    init.body = JSON.stringify(body);
  }
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ConnectionError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The JSON of a reply. */
export async function json<T>(path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  return (await request(path, body, signal)).json() as Promise<T>;
}
