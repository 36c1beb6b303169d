// The API key: kept for this tab, or in this browser if the user says so.

const NAME = "keel-api-key";

function stores(): Storage[] {
  try {
    return [sessionStorage, localStorage];
  } catch {
    // A browser may forbid storage; then the key lives as long as the page.
    return [];
  }
}

let current = stores().map((store) => store.getItem(NAME)).find(Boolean) ?? "";

export function apiKey(): string {
  return current;
}

export function isKeyKept(): boolean {
  return stores()[1]?.getItem(NAME) != null;
}

/** Takes a key; an empty one forgets. */
export function setApiKey(key: string, keep: boolean): void {
  current = key.trim();
  const [session, local] = stores();
  session?.removeItem(NAME);
  local?.removeItem(NAME);
  if (current) (keep ? local : session)?.setItem(NAME, current);
}
