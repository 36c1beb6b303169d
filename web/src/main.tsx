// Starts the page.

import { render } from "preact";
import "./style/index.css";
import { app, applyTheme } from "./state/app";
import { restoreChats } from "./state/chats";
import { followServer, refresh } from "./state/server";
import { App } from "./view/app";

applyTheme();
const root = document.querySelector("#app");
if (root) render(<App />, root);
void restoreChats();
followServer();

// Opening the memory panel asks for the latest numbers at once.
let panel = app.state.panel;
app.subscribe(() => {
  if (app.state.panel === panel) return;
  panel = app.state.panel;
  refresh();
});
