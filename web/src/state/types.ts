// What a chat consists of. This form is also that of an exported file.

/** A text file that goes with a message. */
export interface TextFile {
  name: string;
  text: string;
}

/** A picture that goes with a message. */
export interface Picture {
  name: string;
  /** A data URI. */
  uri: string;
}

/** A video that goes with a message. */
export interface Video {
  name: string;
  /** A data URI. */
  uri: string;
}

export interface Problem {
  code: string;
  message: string;
}

export interface Counts {
  prompt: number;
  cached: number;
  completion: number;
  /** Seconds from the request to the first token, and from there to the last. */
  waitSeconds: number;
  writeSeconds: number;
}

export interface Message {
  id: string;
  /** The message before it; `null` begins a chat. Messages with the same parent are versions of each other. */
  parent: string | null;
  role: "user" | "assistant";
  content: string;
  /** Milliseconds since 1970. */
  at: number;
  files?: TextFile[];
  pictures?: Picture[];
  videos?: Video[];
  reasoning?: string;
  reasoningSeconds?: number;
  /** Complete, unless it says something else. */
  state?: "writing" | "stopped" | "failed";
  problem?: Problem;
  /** The answer ended because no more tokens were allowed. */
  cut?: boolean;
  /** The answer follows a JSON schema. */
  json?: boolean;
  counts?: Counts;
}

/** How answers of a chat are made. What is not set is the server's to choose. */
export interface ChatOptions {
  model?: string;
  system?: string;
  temperature?: number;
  topP?: number;
  seed?: number;
  maxTokens?: number;
  schema?: string;
  noReasoning?: boolean;
}

export interface Chat {
  id: string;
  title: string;
  /** The user gave the title. */
  named?: boolean;
  created: number;
  changed: number;
  messages: Record<string, Message>;
  /** The last message of the version that is shown. */
  leaf: string | null;
  options: ChatOptions;
}
