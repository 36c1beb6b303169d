// How answers of a chat are made. What is left empty is the server's to choose.

import { useRef, useState } from "preact/hooks";
import { app, currentChat, currentOptions } from "../state/app";
import { setOptions } from "../state/chats";
import { useStore } from "../state/store";
import type { ChatOptions } from "../state/types";
import { schemaProblem } from "../text/schema";
import { PanelHead } from "./panel";

export function SettingsPanel() {
  const id = useStore(app, (state) => state.current);
  const inChat = useStore(app, (state) => currentChat(state) !== null);
  const options = useStore(app, currentOptions);
  const [clearings, setClearings] = useState(0);
  /** Sets a field, or takes it out. */
  const set = <K extends keyof ChatOptions>(name: K, value: ChatOptions[K] | undefined) => {
    const { [name]: _, ...rest } = options;
    setOptions(value === undefined || value === "" ? rest : { ...rest, [name]: value });
  };
  return (
    <aside class="panel" aria-label="Settings" key={id}>
      <PanelHead title="Settings" />
      <p class="faint">{inChat ? "They hold for this chat." : "They hold for new chats."} What is empty, the server decides.</p>
      <label class="field">
        System prompt
        <textarea rows={4} value={options.system ?? ""} placeholder="How the model should behave"
          onInput={(event) => set("system", event.currentTarget.value)} />
      </label>
      <Range label="Temperature" hint="0 always takes the likeliest token." value={options.temperature} min={0} max={2} step={0.05}
        set={(value) => set("temperature", value)} />
      <Range label="Top-p" hint="Only tokens that make up this share of the probability." value={options.topP} min={0} max={1} step={0.01}
        set={(value) => set("topP", value)} />
      <div class="pair">
        <Whole label="Seed" value={options.seed} min={0} set={(value) => set("seed", value)} />
        <Whole label="Length" hint="tokens" value={options.maxTokens} min={1} set={(value) => set("maxTokens", value)} />
      </div>
      <SchemaField key={clearings} value={options.schema ?? ""} set={(value) => set("schema", value)} />
      <label class="check">
        <input type="checkbox" checked={options.noReasoning ?? false}
          onChange={(event) => set("noReasoning", event.currentTarget.checked || undefined)} />
        Answer without reasoning, where the model can
      </label>
      <button type="button" onClick={() => { setOptions({}); setClearings(clearings + 1); }}>Clear all</button>
    </aside>
  );
}

interface RangeProps {
  label: string;
  hint: string;
  value: number | undefined;
  min: number;
  max: number;
  step: number;
  set: (value: number | undefined) => void;
}

/** A slider with the number next to it. */
function Range({ label, hint, value, min, max, step, set }: RangeProps) {
  const clamp = (number: number) => Math.min(max, Math.max(min, number));
  const id = `field-${label.toLowerCase()}`;
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <div class="range">
        <input type="range" aria-label={`${label}, slider`} min={min} max={max} step={step} value={value ?? 1}
          class={value === undefined ? "unset" : ""} onInput={(event) => set(event.currentTarget.valueAsNumber)} />
        <input id={id} type="number" min={min} max={max} step="any" placeholder="auto" value={value ?? ""} aria-describedby={`${id}-hint`}
          onChange={(event) => {
            const number = event.currentTarget.valueAsNumber;
            set(Number.isNaN(number) ? undefined : clamp(number));
          }} />
      </div>
      <span id={`${id}-hint`} class="faint">{hint}</span>
    </div>
  );
}

interface WholeProps {
  label: string;
  hint?: string;
  value: number | undefined;
  min: number;
  set: (value: number | undefined) => void;
}

function Whole({ label, hint, value, min, set }: WholeProps) {
  return (
    <label class="field">
      <span>{label} {hint && <span class="faint">({hint})</span>}</span>
      <input type="number" min={min} step={1} placeholder="auto" value={value ?? ""}
        onChange={(event) => {
          const number = Math.trunc(event.currentTarget.valueAsNumber);
          set(Number.isNaN(number) ? undefined : Math.min(Number.MAX_SAFE_INTEGER, Math.max(min, number)));
        }} />
    </label>
  );
}

/** A schema is in force only while it is JSON. Otherwise there is none, and the field says what is wrong. */
function SchemaField({ value, set }: { value: string; set: (value: string) => void }) {
  const [text, setText] = useState(value);
  const taken = useRef(value);
  if (value !== taken.current) {
    // Changed from outside, such as in another tab.
    taken.current = value;
    setText(value);
  }
  const problem = schemaProblem(text);
  const take = (next: string) => {
    setText(next);
    taken.current = schemaProblem(next) === null ? next.trim() : "";
    set(taken.current);
  };
  return (
    <label class="field">
      JSON schema
      <textarea rows={4} class="mono" spellcheck={false} value={text} placeholder='{"type": "object", "properties": {…}}'
        aria-invalid={problem !== null} aria-describedby="schema-hint" onInput={(event) => take(event.currentTarget.value)} />
      <span id="schema-hint" class={problem ? "wrong" : "faint"}>{problem ?? "Answers are JSON that follows it."}</span>
    </label>
  );
}
