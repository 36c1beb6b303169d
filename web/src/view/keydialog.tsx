// The API key, out of sight until it is asked for.

import { useEffect, useRef, useState } from "preact/hooks";
import { app } from "../state/app";
import { apiKey, isKeyKept, setApiKey } from "../state/key";
import { refresh } from "../state/server";
import { useStore } from "../state/store";

export function KeyDialog() {
  const open = useStore(app, (state) => state.keyDialog);
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open) dialog.current?.showModal();
    else dialog.current?.close();
  }, [open]);
  return (
    <dialog ref={dialog} aria-labelledby="key-title" onClose={() => app.set({ keyDialog: false })}>
      {open && <KeyForm />}
    </dialog>
  );
}

function KeyForm() {
  const [key, setKey] = useState(apiKey());
  const [keep, setKeep] = useState(isKeyKept());
  const close = () => app.set({ keyDialog: false });
  const save = (event: Event) => {
    event.preventDefault();
    setApiKey(key, keep);
    close();
    refresh();
  };
  return (
    <form onSubmit={save}>
      <h2 id="key-title">API key</h2>
      <p class="faint">Needed if the server was started with one. It goes to this server alone.</p>
      <label class="field">
        Key
        <input type="password" autocomplete="off" spellcheck={false} value={key} onInput={(event) => setKey(event.currentTarget.value)} />
      </label>
      <label class="check">
        <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.currentTarget.checked)} />
        Keep it in this browser after the tab is closed
      </label>
      <div class="dialog-buttons">
        <button type="button" onClick={close}>Cancel</button>
        <button type="submit" class="primary">Save</button>
      </div>
    </form>
  );
}
