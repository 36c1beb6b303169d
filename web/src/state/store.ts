// A value with listeners, and the hook that ties a component to a part of it.

import { useEffect, useState } from "preact/hooks";

export class Store<S extends object> {
  #state: S;
  #listeners = new Set<() => void>();

  constructor(state: S) {
    this.#state = state;
  }

  get state(): S {
    return this.#state;
  }

  /** Replaces the fields named. */
  set(change: Partial<S>): void {
    this.#state = { ...this.#state, ...change };
    for (const listener of [...this.#listeners]) listener();
  }

  /** Calls `listener` after every change until the function that it returns is called. */
  subscribe(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/** A part of a store. The component renders again only when this part changes, by identity. */
export function useStore<S extends object, T>(store: Store<S>, select: (state: S) => T): T {
  const [, again] = useState(0);
  const selected = select(store.state);
  useEffect(() => {
    let last = selected;
    const check = () => {
      const next = select(store.state);
      if (Object.is(next, last)) return;
      last = next;
      again((count) => count + 1);
    };
    check();
    return store.subscribe(check);
  });
  return selected;
}
