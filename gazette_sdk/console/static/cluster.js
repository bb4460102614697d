// Pages of the cluster as a whole: overview, brokers, stores, events.
import { useState } from "./vendor/hooks.js";
import { memberName, useCall, useEvents } from "./api.js";
import { Command, Empty, Facts, Failure, Linked, Loaded, Meter, Search, Sparkline, State, Table, bytes, clock, count, duration, html, journalLink, maybe, plural, rate, setQuery, severityTone, shardLink, since, to, useAnnounced, useHistory } from "./parts.js";

const REFRESH_MS = 3000;

/** Address of the page of a subject of problems and events. */
function subjectLink(kind, subject) {
  if (!subject) return "";
  switch (kind) {
    case "journal": case "route": return journalLink(subject);
    case "shard": return shardLink("", subject);
    case "member": return "#/brokers";
    case "application": return to(["shards"], { application: subject });
    case "store": return "#/stores";
    default: return "";
  }
}

// ---------------------------------------------------------------- overview

export function Overview() {
  const report = useCall("v1/cluster/report", undefined, REFRESH_MS);
  const { data, time } = report;
  const lag = data ? known(data.applications, "lagS", Math.max) : undefined;
  const histories = {
    append: useHistory(data?.appendRate, time), read: useHistory(data?.readRate, time),
    unstored: useHistory(data?.unstored === undefined ? undefined : Number(data.unstored), time), lag: useHistory(lag, time),
  };
  const problems = data?.problems?.length;
  useAnnounced(problems, () => `${plural(problems, "problem")} now`);
  return html`<section><div class="title"><h1>Overview</h1>${data?.cluster && html`<p class="dim mono">${data.cluster}</p>`}</div>
    <${Loaded} of=${report} what="the report of the cluster" rows=${8}>${(found) => html`<${Tiles} report=${found} />
      <div class="charts">
        <${Chart} title="Append" value=${rate(found.appendRate)} values=${histories.append} />
        <${Chart} title="Read" value=${rate(found.readRate)} values=${histories.read} />
        <${Chart} title="Not stored yet" value=${bytes(found.unstored)} note=${found.oldestUnstoredS ? `oldest ${duration(found.oldestUnstoredS)}` : ""} values=${histories.unstored} />
        ${(found.applications || []).length > 0 && html`<${Chart} title="Greatest lag" value=${duration(lag)} values=${histories.lag} />`}
      </div>
      <h2>What needs you</h2><${Problems} problems=${found.problems || []} report=${found} />
      ${(found.applications || []).length > 0 && html`<h2>Applications</h2><${Applications} applications=${found.applications} />`}
      <${Command} text="gazctl report" />`}<//></section>`;
}

function known(items, field, join) {
  const values = (items || []).map((item) => item[field]).filter((value) => value !== undefined && value !== null);
  return values.length ? join(...values.map(Number)) : undefined;
}

function Tile({ tone, number, word, href, more }) {
  return html`<a class=${`tile ${tone}`} href=${href}><b>${number}</b><span><${State} tone=${tone}>${word}<//>${more && html`<small>${more}</small>`}</span></a>`;
}

function Tiles({ report }) {
  const states = report.states || {};
  const of = (...names) => names.reduce((sum, name) => sum + Number(states[name] || 0), 0);
  const broken = of("JOURNAL_NO_PRIMARY", "JOURNAL_UNASSIGNED", "JOURNAL_WAITING");
  const short = of("JOURNAL_SHORT", "JOURNAL_SINGLE_ZONE");
  const stores = report.stores || [];
  const unhealthy = stores.filter((store) => store.healthy === false).length;
  const applications = report.applications || [];
  const sum = (field) => applications.reduce((total, one) => total + Number(one[field] || 0), 0);
  const zones = (report.zones || []).length;
  return html`<div class="tiles">
    <${Tile} tone="ok" number=${count(report.brokers)} word=${report.brokers === 1 ? "broker" : "brokers"} more=${`in ${plural(zones, "zone")}`} href="#/brokers" />
    <${Tile} tone=${broken ? "bad" : short ? "warn" : "ok"} number=${count(report.journals)} word=${Number(report.journals) === 1 ? "journal" : "journals"} href="#/journals"
      more=${broken ? `${count(broken)} without a primary` : short ? `${count(short)} short of replicas` : Number(report.journals) ? "all have their replicas" : "none yet"} />
    <${Tile} tone=${sum("failed") ? "bad" : sum("withoutPrimary") ? "warn" : applications.length ? "ok" : "idle"} number=${count(sum("shards"))} word=${sum("shards") === 1 ? "shard" : "shards"} href="#/shards"
      more=${sum("failed") ? `${count(sum("failed"))} failed` : sum("withoutPrimary") ? `${count(sum("withoutPrimary"))} without a primary` : applications.length ? `of ${plural(applications.length, "application")}` : "no application"} />
    <${Tile} tone=${unhealthy ? "bad" : stores.length ? "ok" : "idle"} number=${count(stores.length)} word=${stores.length === 1 ? "store" : "stores"} more=${unhealthy ? `${count(unhealthy)} ${unhealthy === 1 ? "fails" : "fail"}` : stores.length ? "healthy" : "none is used"} href="#/stores" />
  </div>`;
}

function Chart({ title, value, note, values }) {
  return html`<figure class="chart"><figcaption>${title}</figcaption><b>${maybe(value)}</b>${note && html`<small>${note}</small>`}<${Sparkline} values=${values} label=${`${title}, last minutes`} /></figure>`;
}

function Problems({ problems, report }) {
  if (!problems.length) {
    return html`<div class="calm"><span class="glyph" aria-hidden="true">✔</span><div><b>Nothing</b><p>${Number(report.journals) ? `All ${count(report.journals)} journals are served by ${plural(report.brokers, "broker")}.` : html`Create a first journal: <code>gazctl journals create examples/hello --partitions 0</code>`}</p></div></div>`;
  }
  return html`<ul class="problems">${problems.map((problem) => html`<li key=${problem.check + problem.subject}><${State} tone=${severityTone(problem.severity)}>${({ ERROR: "error", WARNING: "warning" })[problem.severity] || "note"}<//>
    <div><p><${Linked} href=${subjectLink(problem.kind, problem.subject)} subject=${problem.subject} text=${problem.text} />
      ${Number(problem.others) > 0 && html`<span class="dim"> and ${count(problem.others)} more</span>`}</p>
      ${problem.command && html`<${Command} text=${problem.command} />`}</div><small class="dim">${since(problem.sinceUs)}</small></li>`)}</ul>`;
}

function Applications({ applications }) {
  return html`<${Table} label="Applications" heads="Application, State, #Shards, #Processes, #Lag, #Lag in bytes">${applications.map((one) => html`<tr key=${one.name}><td><a href=${to(["shards"], { application: one.name })}>${one.name}</a></td>
      <td>${one.error ? html`<${State} tone="warn" title=${one.error}>no answer<//>` : Number(one.failed) ? html`<${State} tone="bad">${count(one.failed)} failed<//>` : Number(one.withoutPrimary) ? html`<${State} tone="warn">${count(one.withoutPrimary)} without a primary<//>` : Number(one.recovering) ? html`<${State} tone="busy">${count(one.recovering)} recovering<//>` : html`<${State} tone="ok">all run<//>`}</td>
      <td class="num">${count(one.shards)}</td><td class="num">${count(one.processes)}</td><td class="num">${maybe(duration(one.lagS))}</td><td class="num">${maybe(bytes(one.lagBytes))}</td></tr>`)}<//>`;
}

// ---------------------------------------------------------------- brokers

export function Brokers() {
  const members = useCall("v1/cluster/members", undefined, REFRESH_MS);
  useAnnounced(members.data?.members?.filter((one) => !one.error).map((one) => memberName(one.id)).join(" "), () => "the members have changed");
  return html`<section><div class="title"><h1>Brokers</h1></div><${Loaded} of=${members} what="the members of the cluster">${({ members: all = [] }) => {
    const brokers = all.filter((one) => one.component === "broker");
    const others = all.filter((one) => one.component !== "broker");
    const zones = [...new Set(brokers.map((one) => one.id.zone))].sort();
    return html`<div class="zones">${zones.map((zone) => html`<section key=${zone} class="zone" aria-label=${`Zone ${zone}`}><h2><span><span class="dim">zone</span> ${zone}</span><small>${plural(brokers.filter((one) => one.id.zone === zone).length, "broker")}</small></h2>
        ${brokers.filter((one) => one.id.zone === zone).map((one) => html`<${Broker} key=${memberName(one.id)} member=${one} />`)}</section>`)}</div>
      ${zones.length === 0 && html`<${Empty} title="No broker is announced"><p>Start one: <code>gazette serve</code></p><//>`}
      ${others.length > 0 && html`<h2>Processes of applications</h2><${Processes} members=${others} />`}
      <h2>What would move</h2><p class="dim">The brokers' own allocator, as a dry run:</p>
      ${brokers.slice(0, 1).map((one) => html`<${Command} key="drain" text=${`gazette allocator simulate --drain ${memberName(one.id)}`} />`)}
      <${Command} text="gazctl brokers list" />`;
  }}<//></section>`;
}

const LATE_S = 0.25;

function memberState(member) {
  if (member.error) return ["bad", "no answer"];
  if (member.exiting) return ["busy", "drains"];
  if (member.loopLagS !== undefined && member.loopLagS !== null && member.loopLagS > LATE_S) return ["warn", "too busy"];
  return ["ok", "serves"];
}

function Broker({ member }) {
  const [tone, word] = memberState(member);
  const load = Number(member.limit) ? Number(member.replicas || 0) / Number(member.limit) : 0;
  return html`<article class=${`card broker ${tone}`}><h3>${member.id.suffix}<${State} tone=${tone}>${word}<//></h3>
    <div class="load"><span><b>${count(member.replicas || 0)}</b> replicas <span class="dim">of ${count(member.limit)}</span></span><span><b>${count(member.primaries || 0)}</b> primaries</span></div>
    <${Meter} value=${member.replicas || 0} of=${member.limit} tone=${load > 0.9 ? "warn" : ""} label=${`${Math.round(load * 100)} % of its room is used`} />
    ${member.error ? html`<p class="mono problem">${member.error}</p>` : html`<${Facts} of=${[["Loop lag", maybe(duration(member.loopLagS))], ["Lease", maybe(duration(member.leaseLeftS))], ["Disk free", maybe(bytes(member.diskFree))], ["Started", maybe(since(member.startedUs))],
      ["Version", html`${member.version || html`<span class="dim">of other make</span>`}${member.python ? html`<span class="dim"> Python ${member.python}</span>` : ""}`],
      ["Keys", (member.keyIds || []).join(", ") || html`<span class="dim">none named</span>`]]} />`}
    <p class="dim mono endpoint">${member.endpoint}</p></article>`;
}

function Processes({ members }) {
  return html`<${Table} label="Processes of applications" heads="Application, Process, State, #Shards, #Primaries, #Loop lag, Version, Endpoint">
    ${members.map((one) => { const [tone, word] = memberState(one); return html`<tr key=${one.component + memberName(one.id)}><td><a href=${to(["shards"], { application: one.component })}>${one.component}</a></td><td class="mono">${memberName(one.id)}</td><td><${State} tone=${tone} title=${one.error}>${word}<//></td>
      <td class="num">${count(one.replicas || 0)}</td><td class="num">${count(one.primaries || 0)}</td><td class="num">${maybe(duration(one.loopLagS))}</td><td>${one.version}</td><td class="mono dim">${one.endpoint}</td></tr>`; })}<//>`;
}

// ---------------------------------------------------------------- stores

export function Stores() {
  const report = useCall("v1/cluster/report", undefined, REFRESH_MS);
  return html`<section><div class="title"><h1>Stores</h1></div><${Loaded} of=${report} what="the stores">${({ stores = [] }) => (stores.length ? html`<div class="cards">${stores.map((store) => html`<article class="card" key=${store.url}>
      <h2 class="mono">${store.url}</h2>
      <p>${store.healthy === true ? html`<${State} tone="ok">healthy<//>` : store.healthy === false ? html`<${State} tone="bad">fails<//>` : html`<${State} tone="idle">not checked: no broker uses it<//>`}${Number(store.sinceUs) ? html` <span class="dim">for ${since(store.sinceUs).replace(/ ago$/, "")}</span>` : ""}</p>
      ${store.error && html`<pre class="problem" tabindex="0">${store.error}</pre>`}
      <${Facts} of=${[["Journals", count(store.journals)], ["Not stored yet", maybe(bytes(store.unstored))]]} />
      <${Command} text=${`gazctl journals store-health ${store.url}`} /></article>`)}</div>`
    : html`<${Empty} title="No store is used"><p>A journal without a store keeps its content on brokers only. The spec of a journal names its stores.</p><//>`)}<//></section>`;
}

// ---------------------------------------------------------------- events

const KINDS = ["member", "journal", "route", "store", "shard", "log", "audit"];

export function Events({ at }) {
  const { kind = "", q = "", severe = "" } = at.query;
  const [text, setText] = useState(q);
  const [frozen, setFrozen] = useState(null);
  const log = useEvents();
  const kept = frozen || log;
  const grave = kept.events.findLast((one) => one.severity === "ERROR");
  // Those of the first moment are not news.
  useAnnounced(kept.total ? grave?.id || "" : undefined, () => grave?.text || "");
  const needle = q.toLowerCase();
  const shown = kept.events.toReversed().filter((event) => (!kind || event.kind === kind) && (!severe || event.severity !== "INFO" && event.severity) && (!needle || `${event.subject} ${event.text} ${event.member}`.toLowerCase().includes(needle)));
  return html`<section><div class="bar"><h1>Events</h1><${Search} label="Filter events" placeholder="subject, text or member" value=${text} onInput=${(value) => { setText(value); setQuery({ q: value }); }} />
      <div class="chips" role="group" aria-label="Kind"><button class="chip" aria-pressed=${String(!kind)} onClick=${() => setQuery({ kind: "" })}>all</button>${KINDS.map((each) => html`<button key=${each} class="chip" aria-pressed=${String(each === kind)} onClick=${() => setQuery({ kind: each === kind ? "" : each })}>${each}</button>`)}</div>
      <label class="check"><input type="checkbox" checked=${severe === "1"} onChange=${() => setQuery({ severe: severe ? "" : "1" })} /> warnings only</label>
      <button class="live" aria-pressed=${String(!frozen)} onClick=${() => setFrozen(frozen ? null : log)}><span aria-hidden="true">${frozen ? "▶" : "■"}</span> ${frozen ? `Continue${log.total > frozen.total ? ` (${log.total - frozen.total} new)` : ""}` : "Pause"}</button></div>
    ${log.error && (kept.events.length ? html`<p class="stale" role="status"><${State} tone="warn">Connecting again<//> ${log.error.message}</p>` : html`<${Failure} error=${log.error} what="the events of the cluster" />`)}
    ${shown.length ? html`<ol class="events">${shown.map((event) => html`<li key=${event.id} class=${severityTone(event.severity)}><time class="mono dim">${clock(Number(event.timeUs) / 1000)}</time>
        <${State} tone=${severityTone(event.severity)}>${event.kind}<//>
        <div><${Linked} href=${subjectLink(event.kind, event.subject)} subject=${event.subject} text=${event.text} /></div><span class="mono dim member">${event.member}</span></li>`)}</ol>`
      : !log.error && html`<${Empty} glyph="◐" title=${kept.events.length ? "No event matches" : "No event yet"}><p>${kept.events.length ? html`${count(kept.events.length)} are kept; change the filter.` : "Members that join and leave, journals that move, failing stores and shards, and warnings of logs appear here."}</p><//>`}
    <${Command} text="curl -sN -H 'Authorization: Bearer …' ADDRESS/v1/cluster/events" /></section>`;
}
