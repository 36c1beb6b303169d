// The line above the conversation: what is shown, which model answers, and the buttons of the panels.

import { app, currentChat, currentOptions, isNarrow, modelOf, setTheme, showPanel, type Panel, type Theme } from "../state/app";
import { setOptions } from "../state/chats";
import { useStore } from "../state/store";
import { IconButton, type IconName } from "./icons";

const THEMES: Record<Theme, { next: Theme; icon: IconName; label: string }> = {
  auto: { next: "light", icon: "auto", label: "Colours: as the system says" },
  light: { next: "dark", icon: "sun", label: "Colours: light" },
  dark: { next: "auto", icon: "moon", label: "Colours: dark" },
};

export function Topbar() {
  const title = useStore(app, (state) => currentChat(state)?.title);
  const panel = useStore(app, (state) => state.panel);
  const theme = useStore(app, (state) => state.theme);
  const keyNeeded = useStore(app, (state) => state.keyNeeded);
  const toggle = (which: Panel) => showPanel(panel === which ? null : which);
  const openList = () => app.set({ sidebar: true, panel: isNarrow() ? null : panel });
  return (
    <header class="topbar">
      <IconButton icon="menu" label="Chats" class="narrow-only" onClick={openList} />
      <div class="topbar-title">
        <h1>{title ?? "New chat"}</h1>
        <ModelName />
      </div>
      <IconButton icon="sliders" label="Settings of this chat" pressed={panel === "settings"} onClick={() => toggle("settings")} />
      <IconButton icon="memory" label="Memory" pressed={panel === "memory"} onClick={() => toggle("memory")} />
      <IconButton icon="key" label="API key" class={keyNeeded ? "needed" : ""} onClick={() => app.set({ keyDialog: true })} />
      <IconButton icon={THEMES[theme].icon} label={THEMES[theme].label} onClick={() => setTheme(THEMES[theme].next)} />
    </header>
  );
}

function ModelName() {
  const models = useStore(app, (state) => state.models);
  const served = useStore(app, (state) => state.status?.model);
  const options = useStore(app, currentOptions);
  if (models.length < 2) return <span class="model">{models[0]?.id ?? served ?? ""}</span>;
  return (
    <select
      class="model"
      aria-label="Model"
      value={modelOf(options, models) ?? models[0]?.id ?? ""}
      onChange={(event) => setOptions({ ...options, model: event.currentTarget.value })}
    >
      {models.map((model) => <option key={model.id} value={model.id}>{model.id}</option>)}
    </select>
  );
}
