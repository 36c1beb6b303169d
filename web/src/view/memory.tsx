// Memory: the plan, which is there before anything runs, and what is done with it.

import type { Bytes, Device, Sequence, Status } from "../api/server";
import { app } from "../state/app";
import { history } from "../state/history";
import { useStore } from "../state/store";
import { bytes } from "../text/format";
import { look, ordered } from "./categories";
import { PanelHead } from "./panel";
import { Timeline } from "./timeline";

export function MemoryPanel() {
  const status = useStore(app, (state) => state.status);
  return (
    <aside class="panel" aria-label="Memory">
      <PanelHead title="Memory" />
      {status ? <Report status={status} /> : <p class="faint">Nothing is known yet.</p>}
    </aside>
  );
}

const total = (report: Bytes) => Object.values(report).reduce((sum, each) => sum + each, 0);

function Report({ status }: { status: Status }) {
  const allocated = total(status.allocated);
  const planned = total(status.planned);
  return (
    <>
      <section aria-label="Plan">
        <p class="total"><strong>{bytes(planned)}</strong> planned before the start</p>
        <PlanBar planned={status.planned} />
        <p class="faint">
          {allocated === planned ? "Exactly this is allocated, and it never grows." : `${bytes(allocated)} of it are allocated so far.`}
        </p>
      </section>
      {status.devices && <Devices devices={status.devices} />}
      <section aria-label="Now">
        <Timeline samples={history()} planned={status.planned} />
        <Categories status={status} />
      </section>
      <section aria-label="Requests">
        <h3>Requests <span class="faint">{status.running.length} running, {status.waiting} waiting</span></h3>
        {status.running.length > 0 ? <Sequences running={status.running} /> : <p class="faint">Nothing runs. Answers appear here while they are written.</p>}
      </section>
    </>
  );
}

/** The plan of each device as a bar of its own; the longest is that of the device that has most. */
function Devices({ devices }: { devices: Device[] }) {
  const most = Math.max(...devices.map((device) => total(device.planned)), 1);
  return (
    <section aria-label="Devices">
      <h3>Devices <span class="faint">{devices.length} share the model</span></h3>
      {devices.map(({ device, planned, peak }) => (
        <div key={device} class="device" data-device={device}>
          <p>{device} <span class="faint">{bytes(total(planned))} planned, {bytes(total(peak))} at most so far</span></p>
          <div style={{ width: `${(100 * total(planned)) / most}%` }}><PlanBar planned={planned} of={device} /></div>
        </div>
      ))}
    </section>
  );
}

/** The plan as one bar; each part is as wide as its share. */
function PlanBar({ planned, of }: { planned: Bytes; of?: string }) {
  const parts = ordered(Object.keys(planned)).filter((category) => (planned[category] ?? 0) > 0);
  const all = total(planned) || 1;
  return (
    <div class="plan-bar" role="img" aria-label={of ? `The plan of ${of} by category` : "The plan by category; the table has its numbers"}>
      {parts.map((category) => (
        <div key={category} class={look(category).class} data-category={category} style={{ flexGrow: (planned[category] ?? 0) / all }}
          title={`${look(category).name}: ${bytes(planned[category] ?? 0)}`} />
      ))}
    </div>
  );
}

function Categories({ status }: { status: Status }) {
  const { now, planned, allocated, peak } = status;
  const used = ordered(Object.keys(planned)).filter((category) => (planned[category] ?? 0) > 0 || (peak[category] ?? 0) > 0);
  const parts = ordered(Object.keys(now)).filter((category) => category.startsWith("kv, "));
  return (
    <div class="table" tabIndex={0} role="group" aria-label="Bytes by category">
      <table id="categories">
        <thead><tr><th scope="col">Category</th><th scope="col">planned</th><th scope="col">now</th><th scope="col">peak</th></tr></thead>
        <tbody>
          {used.map((category) => (
            <tr key={category}>
              <th scope="row"><Swatch category={category} />{look(category).name}</th>
              <td>{bytes(planned[category] ?? 0)}</td>
              <td>{bytes(allocated[category] ?? 0)}</td>
              <td>{bytes(peak[category] ?? 0)}</td>
            </tr>
          ))}
          {parts.map((category) => (
            <tr key={category} class="part">
              <th scope="row"><Swatch category={category} />{look(category).name}</th>
              <td />
              <td>{bytes(now[category] ?? 0)}</td>
              <td />
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Swatch({ category }: { category: string }) {
  return <span class={`swatch ${look(category).class}`} />;
}

function Sequences({ running }: { running: Sequence[] }) {
  return (
    <div class="table" tabIndex={0} role="group" aria-label="Running requests">
      <table id="running">
        <thead>
          <tr><th scope="col">Request</th><th scope="col">prompt</th><th scope="col">reused</th><th scope="col">written</th><th scope="col">pages</th><th scope="col">drafts</th></tr>
        </thead>
        <tbody>
          {running.map((each) => (
            <tr key={each.id}>
              <th scope="row">{each.id}</th>
              <td>{each.prefilled_tokens < each.prompt_tokens ? `${each.prefilled_tokens} of ${each.prompt_tokens}` : each.prompt_tokens}</td>
              <td>{each.cached_tokens}</td>
              <td>{each.generated_tokens}</td>
              <td>{each.pages} of {each.pages_promised}</td>
              <td>{each.drafted > 0 ? `${Math.round((100 * each.accepted) / each.drafted)}%` : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
