// What both panels at the right have in common.

import { showPanel } from "../state/app";
import { IconButton } from "./icons";

export function PanelHead({ title }: { title: string }) {
  return (
    <div class="panel-head">
      <h2>{title}</h2>
      <IconButton icon="close" label={`Close ${title.toLowerCase()}`} onClick={() => showPanel(null)} />
    </div>
  );
}
