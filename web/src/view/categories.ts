// The categories of memory in the order in which they are drawn, with their names and colours.

interface Look {
  name: string;
  /** Class that gives the colour, in memory.css. */
  class: string;
}

const LOOKS: Record<string, Look> = {
  weights: { name: "Weights", class: "c-weights" },
  kv: { name: "Keys and values", class: "c-kv" },
  "kv, in use": { name: "in use", class: "c-kv" },
  "kv, remembered": { name: "remembered", class: "c-remembered" },
  "kv, free": { name: "free", class: "c-free" },
  recurrent: { name: "Recurrent states", class: "c-recurrent" },
  delta_log: { name: "Delta log", class: "c-delta" },
  checkpoints: { name: "Checkpoints", class: "c-checkpoints" },
  activations: { name: "Activations", class: "c-activations" },
  workspace: { name: "Workspace", class: "c-workspace" },
  staging: { name: "Staging", class: "c-staging" },
  swap: { name: "Swap", class: "c-swap" },
  vision: { name: "Vision", class: "c-vision" },
  features: { name: "Features of pictures", class: "c-features" },
  host: { name: "Host", class: "c-host" },
  user: { name: "User", class: "c-user" },
};

/** Drawn from the bottom; what is free lies on top. */
const ORDER = [
  "weights", "recurrent", "delta_log", "checkpoints", "activations", "workspace", "staging", "vision", "features", "host", "swap", "user",
  "kv", "kv, in use", "kv, remembered", "kv, free",
];

export function look(category: string): Look {
  return LOOKS[category] ?? { name: category, class: "c-user" };
}

/** The categories that hold anything, in drawing order; ones that are not known come before the keys and values. */
export function ordered(categories: Iterable<string>): string[] {
  const rank = (category: string) => {
    const index = ORDER.indexOf(category);
    return index < 0 ? ORDER.indexOf("user") + 0.5 : index;
  };
  return [...new Set(categories)].sort((a, b) => rank(a) - rank(b));
}
