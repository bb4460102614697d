// Pages of shards: the list of an application, and one shard.
import { useEffect, useState } from "./vendor/hooks.js";
import { COMPONENT, CallError, atMember, call, mayApply, memberName, useApplications, useCall, usePages, useToken } from "./api.js";
import { Change, Command, Empty, Facts, Failure, Labels, Loaded, Meter, Search, Skeleton, Stale, State, StateFilter, Table, Tabs, VirtualTable, bytes, clock, count, duration, html, journalLink, maybe, plural, quoted, setQuery, shardLink, shardState, to, useAnnounced, useSearch } from "./parts.js";

const SORTS = { id: "BY_ID", state: "BY_SHARD_STATE", lag: "BY_LAG_SECONDS", bytes: "BY_LAG_BYTES" };
const REFRESH_MS = 3000;

const COLUMNS = [
  { name: "name", title: "Shard", sort: "id", cell: (row) => html`<a href=${shardLink(row.application, row.id)} title=${row.id}>${row.id}</a>` },
  { name: "state", title: "State", sort: "state", cell: (row) => html`<${State} tone=${shardState(row.state)[0]} title=${row.error}>${shardState(row.state)[1]}<//>` },
  { name: "primary", title: "Primary", cell: (row) => maybe(row.primaryName, "no primary") },
  { name: "replicas", title: "Standbys", cell: (row) => html`<span title=${row.others.join("\n")}>${row.others.join("  ") || html`<span class="dim">none</span>`}</span>` },
  { name: "lag", title: "Lag", sort: "lag", cell: (row) => maybe(duration(row.lagS)) },
  { name: "bytes", title: "Lag in bytes", sort: "bytes", cell: (row) => maybe(bytes(row.lagBytes)) },
  { name: "recovery", title: "Progress", cell: (row) => (row.error ? html`<span class="problem-line" title=${row.error}>${row.error.split("\n")[0]}</span>` : html`<${Recovery} row=${row} />`) },
];

function Recovery({ row }) {
  const all = Number(row.recoveryBytes || 0);
  if (!all || row.state === "PRIMARY") return null;
  const share = Math.min(1, Number(row.recoveredBytes || 0) / all);
  return html`<span class="recovery"><${Meter} value=${share} of=${1} label=${`${Math.round(share * 100)} % recovered`} />${Math.round(share * 100)} % of ${bytes(all)}</span>`;
}

export function Shards({ at }) {
  const { q = "", sort = "-state", state = "", application = "" } = at.query;
  const { applications, members } = useApplications();
  const chosen = applications.find((one) => one.name === application) || applications[0];
  const [text, search] = useSearch(q);
  const descending = sort.startsWith("-");
  const by = sort.replace(/^-/, "");
  const query = { search: q, sort: SORTS[by] || "BY_ID", descending, states: state ? [state] : [] };
  const pages = usePages(chosen ? atMember(chosen.member, "v1/shards/page") : null, query, REFRESH_MS);
  const failed = Number(pages.states?.FAILED || 0);
  useAnnounced(pages.time && failed, () => `${plural(failed, "shard")} failed`);
  if (!chosen) {
    return html`<section><div class="title"><h1>Shards</h1></div><${Loaded} of=${members} what="the members of the cluster">${() => html`<${Empty} title="No application runs">
      <p>Shards are run by processes of an application, which are found in the cluster's Etcd:</p><${Command} text="gazette run-consumer MODULE:APPLICATION" /><//>`}<//></section>`;
  }
  return html`<section class="fill"><div class="bar"><h1>Shards</h1>
      ${applications.length > 1 && html`<label class="inline">of <select aria-label="Application" value=${chosen.name} onChange=${(event) => setQuery({ application: event.target.value, state: "", q: "" })}>${applications.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
      ${applications.length === 1 && (chosen.name || pages.application) && html`<span class="dim">of <b>${chosen.name || pages.application}</b></span>`}
      <${Search} label="Search shards" placeholder="id, or label=value" value=${text} onInput=${search} />
      <${StateFilter} states=${pages.states} describe=${shardState} chosen=${state} onChoose=${(value) => setQuery({ state: value })} /></div>
    <${Stale} error=${pages.error} time=${pages.time} />
    ${pages.error && !pages.time ? html`<${Failure} error=${pages.error} what="its shards" onRetry=${pages.reload} />`
      : pages.isLoading ? html`<${Skeleton} rows=${10} />`
      : pages.total === 0 ? html`<${Empty} title=${q || state ? "No shard matches" : "The application has no shards yet"}><p>${q || state ? html`<button onClick=${() => setQuery({ q: "", state: "" })}>Show all</button>` : "Each journal that it reads gets a shard."}</p><//>`
      : html`<${VirtualTable} label="Shards" kind="shards" columns=${COLUMNS} total=${pages.total} row=${(index) => { const row = pages.rows.get(index); return row && { ...row, application: chosen.name }; }} keyOf=${(row) => row.id}
        sort=${{ by, descending }} onSort=${(name) => setQuery({ sort: name === by ? (descending ? name : `-${name}`) : name === "id" ? name : `-${name}` })} onShow=${pages.show} onOpen=${(row) => { location.hash = shardLink(chosen.name, row.id); }} />`}
    <footer class="foot"><span>${plural(pages.total, "shard")}</span><${Command} text=${failed ? "gazctl shards list --errors" : "gazctl shards list --lag"} /></footer></section>`;
}

// ---------------------------------------------------------------- one shard

const TABS = [["status", "Status"], ["state", "State"], ["spec", "Spec"]];

export function Shard({ at }) {
  const [, application, ...rest] = at.segments;
  const id = rest.join("/");
  const tab = TABS.some(([each]) => each === at.query.tab) ? at.query.tab : "status";
  const { applications, members } = useApplications();
  const candidates = application === "-" || COMPONENT === "consumer" ? applications : applications.filter(({ name }) => name === application);
  const [index, setIndex] = useState(0);
  const chosen = candidates[index];
  const query = { selector: { include: { labels: [{ name: "id", value: id }] } }, limit: 1 };
  const page = useCall(chosen ? atMember(chosen.member, "v1/shards/page") : null, query, REFRESH_MS);
  const list = useCall(chosen && tab !== "state" ? atMember(chosen.member, "v1/shards/list") : null, { selector: query.selector }, REFRESH_MS);
  const row = page.data?.rows?.find((one) => one.id === id);
  const isElsewhere = page.data && !row && index + 1 < candidates.length;
  useEffect(() => { if (isElsewhere) setIndex(index + 1); }, [isElsewhere]);
  useAnnounced(row?.state, (state) => `${id} is ${shardState(state)[1]}`);
  const title = html`<h1 class="path"><a href=${to(["shards"], { application: chosen?.name || "" })}>${chosen?.name || page.data?.application || "shards"}</a><span class="dim"> / </span><b>${id}</b></h1>`;
  if (!chosen) return html`<section><div class="title">${title}</div><${Loaded} of=${members} what="the members of the cluster">${() => html`<${Empty} title="No process of the application answers" />`}<//></section>`;
  if (!row) {
    return html`<section><div class="title">${title}</div>${page.error ? html`<${Failure} error=${page.error} what="this shard" onRetry=${page.reload} />`
      : page.data && !isElsewhere ? html`<${Empty} title="There is no such shard"><p><a href="#/shards">All shards</a></p><//>` : html`<${Skeleton} />`}</section>`;
  }
  const names = (page.data.members || []).map(memberName);
  const primary = row.primary === undefined || row.primary === null ? "" : names[row.primary];
  const [tone, word] = shardState(row.state);
  const shard = list.data?.shards?.find((one) => one.spec?.id === id);
  return html`<section><div class="title">${title}
      <dl class="summary"><div><dt>State</dt><dd><${State} tone=${tone}>${word}<//></dd></div><div><dt>Primary</dt><dd>${primary || "none"}</dd></div>
        <div><dt>Lag</dt><dd>${maybe(duration(row.lagS))}</dd></div><div><dt>Not read</dt><dd>${maybe(bytes(row.lagBytes))}</dd></div>
        ${Number(row.watermarkUs) > 0 && html`<div><dt>Complete through</dt><dd>${clock(Number(row.watermarkUs) / 1000, false)}</dd></div>`}</dl></div>
    <${Stale} error=${page.error} time=${page.time} />
    <div class="bar under"><${Tabs} label="Views of the shard" tabs=${TABS} current=${tab} onChoose=${(value) => setQuery({ tab: value === "status" ? "" : value })} /></div>
    <div id="panel" role="tabpanel" aria-labelledby=${`tab-${tab}`} class="panel">
      ${tab === "status" ? html`<${Status} row=${row} names=${names} primary=${primary} shard=${shard} member=${chosen.member} onChange=${() => { page.reload(); list.reload(); }} />`
        : tab === "state" ? html`<${ShardState} id=${id} member=${chosen.member} query=${at.query} isRunning=${row.state === "PRIMARY"} />`
        : html`<${ShardSpec} shard=${shard} error=${list.error} id=${id} />`}</div></section>`;
}

/** Address of the record that an error names. */
function recordOf(text) {
  const found = /([\w./;=%-]+\/[\w./;=%-]+)(?: at offset |:)(\d+)/.exec(text);
  return found && journalLink(found[1], { offset: found[2] });
}

function Status({ row, names, primary, shard, member: asked, onChange }) {
  const sources = Object.entries(row.readThrough || {});
  const errors = shard ? (shard.status || []).flatMap((status, index) => (status.errors || []).map((text) => [memberName(shard.route?.members?.[index]), text])) : [];
  const shown = errors.length ? errors : row.error ? [[primary, row.error]] : [];
  return html`${shown.map(([member, text]) => html`<article class="card failed" key=${member}><h2><${State} tone="bad">Failed<//>${member && html`<span class="dim"> at ${member}</span>`}</h2>
      <pre class="problem" tabindex="0">${text}</pre>
      ${recordOf(text) && html`<p><a href=${recordOf(text)}>Show the record</a></p>`}
      <p>A shard starts anew when it is taken from its process. If one record is at fault, mend the handler, or pass over it. Skipping is a command, because it cuts the record out of its journal and saves it in a file of yours:</p>
      <${Command} text=${unassignCommand(row.id)} /><${Command} text=${`gazctl shards skip ${quoted(row.id)} --save skipped.jsonl`} /></article>`)}
    <${Unassign} id=${row.id} holder=${shown.map(([member]) => member).filter(Boolean).join(" and ")} member=${asked} isFailed=${shown.length > 0} onChange=${onChange} />
    ${Number(row.recoveryBytes) > 0 && row.state !== "PRIMARY" && html`<article class="card"><h2>Recovery</h2><${Recovery} row=${row} /><p class="dim">${bytes(row.recoveredBytes || 0)} of ${bytes(row.recoveryBytes)} are read from its log.</p></article>`}
    <div class="cards wide"><article class="card"><h2>Sources</h2>${sources.length ? html`<${Table} label="Sources" heads="Journal, #Read through">${sources.map(([journal, offset]) => html`<tr key=${journal}><td><a class="mono" href=${journalLink(journal)}>${journal}</a></td><td class="num mono"><a href=${journalLink(journal, { offset })} title="Messages from here on">${offset}</a></td></tr>`)}<//>` : html`<p class="dim">Not known, or not permitted.</p>`}</article>
      <article class="card"><h2>Processes</h2><ul class="plain">${(row.members || []).map((index) => html`<li key=${index}><span class="mono">${names[index]}</span> ${index === row.primary ? html`<span class="tag">primary</span>` : html`<span class="tag quiet-tag">standby</span>`} ${shard?.status?.[(row.members || []).indexOf(index)] && html`<span class="dim">${String(shard.status[(row.members || []).indexOf(index)].code || "").toLowerCase()}</span>`}</li>`)}</ul>
        ${row.recoveryLog && html`<h2>Recovery log</h2><a class="mono" href=${journalLink(row.recoveryLog)}>${row.recoveryLog}</a>`}</article></div>
    <${Command} text=${`gazctl shards list -l ${quoted(`id=${row.id}`)} --lag --errors`} />`;
}

const unassignCommand = (id) => `gazctl shards unassign -l ${quoted(`id=${id}`)} --failed`;

/** Change that has a failed shard start anew. */
function Unassign({ id, holder, member, isFailed, onChange }) {
  const token = useToken();
  const run = async () => {
    const answer = await call(atMember(member, "v1/shards/unassign"), { shards: [id], onlyFailed: true });
    onChange();
    if (answer.status && answer.status !== "OK") throw new CallError(409, `${id} was assigned anew meanwhile: ${answer.status.toLowerCase().replace(/_/g, " ")}`);
    return answer.shards?.length ? `${id} was unassigned, and starts anew.` : `${id} has not failed any more: nothing was changed.`;
  };
  return html`<${Change} label="Unassign" title="Unassign the failed shard" noun="shard" name=${id} command=${unassignCommand(id)} isOffered=${isFailed && mayApply(token)} run=${run}>
    <p>It is taken from ${holder ? html`<b class="mono">${holder}</b>` : "its process"}. The application assigns it again, to this process or to another one, which restores its state and reads on after the last commit. If the cause is still there, it fails again.</p><//>`;
}

const WHATS = [["", "Keys and values"], ["tables", "Tables"], ["windows", "Windows"], ["timers", "Timers"]];

function ShardState({ id, member, query, isRunning }) {
  const what = query.what || "";
  const key = query.key || "";
  const [text, setText] = useState(key);
  const body = { shard: id, what, limit: 100, ...(key ? { key } : {}) };
  const answer = useCall(isRunning ? atMember(member, "v1/shards/state") : null, body, 5000);
  const command = `gazctl shards state ${quoted(id)}${key ? ` ${quoted(key)}` : ""}${what ? ` --what ${what}` : ""}`;
  if (!isRunning) return html`<${Empty} title="The state is read from a running primary"><p>The shard has none now. Its files are restored from its log by:</p><${Command} text=${`gazctl shards recover --id ${quoted(id)} --dir ./recovered`} /><//>`;
  return html`<div class="bar"><div class="chips" role="group" aria-label="Part of the state">${WHATS.map(([value, title]) => html`<button key=${value} class="chip" aria-pressed=${String(value === what)} onClick=${() => setQuery({ what: value })}>${title}</button>`)}</div>
      <form class="filter" onSubmit=${(event) => { event.preventDefault(); setQuery({ key: text }); }}><${Search} label="Key" placeholder="one key; Enter" value=${text} onInput=${(value) => { setText(value); if (!value) setQuery({ key: "" }); }} /></form></div>
    <${Loaded} of=${answer} what="the state of shards">${({ entries = [], more }) => (entries.length ? html`<${Table} label="State" heads="Place, Key, Value">${entries.map((entry, index) => html`<tr key=${index}><td class="dim">${entry.place}</td><td class="mono">${entry.key}</td><td class="mono value">${entry.value}</td></tr>`)}<//>${more && html`<p class="dim">These are the first ${count(entries.length)}. Give a key to see another.</p>`}`
      : html`<${Empty} title=${key ? "There is no such key" : "Nothing here"} />`)}<//><${Command} text=${command} />`;
}

function ShardSpec({ shard, error, id }) {
  if (!shard) return error ? html`<${Failure} error=${error} what="its spec" />` : html`<${Skeleton} />`;
  const { spec } = shard;
  const facts = [["Sources", (spec.sources || []).map(({ journal }) => journal).join(", ")], ["Standbys", spec.hotStandbys], ["Recovery logs below", spec.recoveryLogPrefix], ["Hints below", spec.hintPrefix],
    ["Transactions", `${spec.minTxnDuration || "0s"} to ${spec.maxTxnDuration || "0s"}`], ["Disabled", spec.disable ? "yes" : "no"], ["Created, changed", `${shard.createRevision}, ${shard.modRevision}`]];
  return html`<div class="cards wide"><article class="card"><h2>Spec</h2><${Facts} mono="mono" of=${facts.map(([name, value]) => [name, String(value ?? "") || "none"])} /></article>
    <article class="card"><h2>Labels</h2><${Labels} of=${spec.labels?.labels || []} /></article></div>
    <${Command} text=${`gazctl shards edit -l ${quoted(`id=${id}`)}`} />`;
}
