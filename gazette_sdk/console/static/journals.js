// Pages of journals: the list, and one journal with its messages, fragments, replicas and spec.
import { useEffect, useMemo, useState } from "./vendor/hooks.js";
import { CallError, TAILS, atMember, call, claimsOf, content, first, holding, journalUrl, mayApply, memberName, offsetsOf, pause, resolved, typesOf, useAnswer, useApplications, useCall, usePages, useToken, whileShown } from "./api.js";
import { Change, Command, Copy, Empty, Facts, Failure, Fragment, Labels, Loaded, Path, Search, Skeleton, Stale, State, StateFilter, Table, Tabs, VirtualTable, bytes, clock, count, duration, html, journalLink, journalState, maybe, plural, quoted, rate, setQuery, shardLink, shardState, shortClock, since, to, useAnnounced, useKeys, useSearch } from "./parts.js";

const SORTS = { name: "BY_NAME", state: "BY_STATE", replication: "BY_REPLICATION", head: "BY_HEAD", rate: "BY_RATE", size: "BY_SIZE", unstored: "BY_UNSTORED" };
const REFRESH_MS = 5000;

// ---------------------------------------------------------------- list

const labelsOf = (row) => (row.labels?.labels || []).filter(({ name }) => name !== "name" && name !== "prefix");

/** Label of a journal. */
function labelOf(labels, name) {
  return (labels?.labels || []).find((label) => label.name === name)?.value || "";
}

const LIST_COLUMNS = [
  { name: "name", title: "Name", sort: "name", cell: (row) => html`<a href=${journalLink(row.name)} title=${`${row.name}\n${labelsOf(row).map(({ name, value }) => `${name}=${value}`).join("\n")}`}>${row.name}</a>` },
  { name: "state", title: "State", sort: "state", cell: (row) => {
    const [tone, word] = journalState(row.state);
    return html`<${State} tone=${tone}>${row.state === "JOURNAL_SHORT" ? `${row.memberNames.length} of ${row.replication} replicas` : word}<//>`;
  } },
  { name: "primary", title: "Primary", cell: (row) => maybe(row.primaryName, "no primary") },
  { name: "replicas", title: "Replicas", sort: "replication", cell: (row) => html`<span title=${row.others.join("\n")}>${row.others.join("  ") || html`<span class="dim">no other</span>`}</span>` },
  { name: "head", title: "End", sort: "head", cell: (row) => maybe(bytes(row.head)) },
  { name: "rate", title: "Rate", sort: "rate", cell: (row) => maybe(rate(row.rate)) },
  { name: "size", title: "Size", sort: "size", cell: (row) => maybe(bytes(row.size)) },
  { name: "unstored", title: "Not stored", sort: "unstored", cell: (row) => maybe(bytes(row.unstored)) },
];

export function Journals({ at }) {
  const { q = "", sort = "name", state = "" } = at.query;
  const [text, search] = useSearch(q);
  const descending = sort.startsWith("-");
  const by = sort.replace(/^-/, "");
  const query = { search: q, sort: SORTS[by] || "BY_NAME", descending, states: state ? [state] : [] };
  const pages = usePages("v1/journals/page", query, REFRESH_MS);
  const command = listCommand(q);
  const isEmpty = !pages.isLoading && !pages.error && pages.total === 0;
  return html`<section class="fill">
    <div class="bar"><h1>Journals</h1><${Search} label="Search journals by name or label" placeholder="name, or label=value" value=${text} onInput=${search} />
      <${StateFilter} states=${pages.states} describe=${journalState} chosen=${state} onChoose=${(value) => setQuery({ state: value })} /><${CreatePartitions} isOffered=${Boolean(pages.time)} onChange=${pages.reload} /></div>
    <${Stale} error=${pages.error} time=${pages.time} />
    ${pages.error && !pages.time ? html`<${Failure} error=${pages.error} what="the list of journals" onRetry=${pages.reload} />`
      : pages.isLoading ? html`<${Skeleton} rows=${12} />`
      : isEmpty ? (q || state ? html`<${Empty} title="No journal matches"><p>Search for a part of a name, or <code>label=value</code>.</p><button onClick=${() => setQuery({ q: "", state: "" })}>Show all</button><//>`
        : html`<${Empty} title="There are no journals yet"><p>Create one in a terminal:</p><${Command} text="gazctl journals create examples/hello --partitions 0" /><//>`)
      : html`<${VirtualTable} label="Journals" kind="journals" columns=${LIST_COLUMNS} total=${pages.total} row=${(index) => pages.rows.get(index)} keyOf=${(row) => row.name}
          sort=${{ by, descending }} onSort=${(name) => setQuery({ sort: name === by ? (descending ? name : `-${name}`) : name === "name" ? name : `-${name}` })}
          onShow=${pages.show} onOpen=${(row) => { location.hash = journalLink(row.name); }} />`}
    <footer class="foot"><span>${plural(pages.total, "journal")}${q ? html` match <b>${q}</b>` : ""}</span><${Command} text=${command} /></footer>
  </section>`;
}

// ---------------------------------------------------------------- partitions

/** Greatest number of a partition: names end in three digits, so that their order is that of numbers. */
const PARTITION_MAX = 999;
/** Most partitions of one call: larger ones are for the command. */
const NEW_PARTITIONS_MAX = 32;

/** Partitions of a topic in order: {number, spec} of journals TOPIC/part-NNN. */
async function partitionsOf(topic, signal) {
  const selector = { include: { labels: [{ name: "prefix", value: `${topic}/` }] } };
  const listed = await first("v1/journals/list", { selector }, signal);
  return (listed?.journals || []).flatMap(({ spec }) => {
    const found = spec.name.startsWith(`${topic}/part-`) && /^\d{3}$/.exec(spec.name.slice(topic.length + 6));
    return found ? [{ number: Number(found[0]), spec }] : [];
  }).sort((a, b) => a.number - b.number);
}

const partitionName = (topic, number) => `${topic}/part-${String(number).padStart(3, "0")}`;

/** Change that creates further partitions of a topic, like its last one. */
function CreatePartitions({ isOffered, onChange }) {
  const token = useToken();
  const [typed, setTyped] = useState("");
  const [text, setText] = useState("1");
  const [known, setKnown] = useState({ topic: "", partitions: /** @type {{number: number, spec: any}[]} */ ([]), error: /** @type {any} */ (null) });
  useEffect(() => {
    const aborter = new AbortController();
    if (!typed) return undefined;
    pause(150, aborter.signal).then(async () => {
      if (aborter.signal.aborted) return;
      try {
        // A name that no journal can have is not asked for.
        const partitions = /^[\w+./=%-]+$/.test(typed) ? await partitionsOf(typed, aborter.signal) : [];
        setKnown({ topic: typed, partitions, error: null });
      } catch (error) {
        if (!aborter.signal.aborted) setKnown({ topic: typed, partitions: [], error });
      }
    });
    return () => aborter.abort();
  }, [typed, token]);
  const isKnown = Boolean(typed) && known.topic === typed;
  const last = isKnown ? known.partitions.at(-1) : undefined;
  const most = last ? Math.min(NEW_PARTITIONS_MAX, PARTITION_MAX - last.number) : NEW_PARTITIONS_MAX;
  const number = /^\d+$/.test(text) ? Number(text) : 0;
  const isPossible = last !== undefined && number >= 1 && number <= most;
  const names = isPossible ? Array.from({ length: number }, (_, index) => partitionName(known.topic, last.number + 1 + index)) : [];
  const command = isPossible ? `gazctl topics grow ${quoted(typed)} --partitions ${last.number + 1 + number}` : "";
  const run = async () => {
    const { suspend, ...spec } = last?.spec;
    const changes = names.map((name) => ({ expectModRevision: "0", upsert: { ...spec, name } }));
    const answer = await call("v1/journals/apply", { changes });
    onChange();
    if (answer.status && answer.status !== "OK") {
      throw new CallError(409, answer.status === "ETCD_TRANSACTION_FAILED" ? "A journal of one of these names exists by now: nothing was created." : answer.status.toLowerCase().replace(/_/g, " "));
    }
    return `${names.length === 1 ? names[0] : `${names[0]} to ${names.at(-1)}`} ${names.length === 1 ? "was" : "were"} created.`;
  };
  const hint = !typed ? "Its partitions are the journals NAME/part-000, NAME/part-001 and so on."
    : !isKnown ? "Looking for its partitions…"
    : !last ? `There is no journal ${typed}/part-000, and none after it.`
    : most < 1 ? "It has as many partitions as a topic can have."
    : isPossible ? "" : `Give a number from 1 to ${most}.`;
  return html`<${Change} label="Create partitions" title="Create partitions of a topic" noun="topic" name=${isPossible ? typed : ""} command=${command} isOffered=${isOffered && mayApply(token)} run=${run} onType=${setTyped}>
    <label>New partitions<input class="short" type="number" min="1" max=${most} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    ${isKnown && known.error ? html`<${Failure} error=${known.error} what="the partitions of a topic" isOnce=${true} />` : hint && html`<p class="dim" role="status">${hint}</p>`}
    ${isPossible && html`<div><p>These journals are created, with the spec of <b class="mono">${last.spec.name}</b>:</p><ul class="plain mono names" tabindex="0" aria-label="New journals">${names.map((name) => html`<li key=${name}>${name}</li>`)}</ul></div>
      <p>Messages whose partition is the hash of a key may go to another one from then on, and the state of shards does not move with them. The command refuses that where it would split the state of a shard; this page does not look. A topic never shrinks.</p>`}<//>`;
}

function listCommand(q) {
  if (q.includes("=")) return `gazctl journals list -l ${quoted(q)} --heads`;
  if (q.endsWith("/")) return `gazctl journals list -l ${quoted(`prefix=${q}`)} --heads`;
  return `gazctl journals list --heads${q ? ` | grep ${quoted(q)}` : ""}`;
}

// ---------------------------------------------------------------- one journal

const TABS = [["messages", "Messages"], ["fragments", "Fragments"], ["replicas", "Replicas"], ["spec", "Spec"], ["readers", "Readers"]];

const named = (name) => ({ include: { labels: [{ name: "name", value: name }] } });

export function Journal({ at }) {
  const name = at.segments.slice(1).join("/");
  const tab = TABS.some(([each]) => each === at.query.tab) ? at.query.tab : "messages";
  const page = useCall("v1/journals/page", { selector: named(name), limit: 1 }, REFRESH_MS);
  const [, setLoaded] = useState(null);
  useEffect(() => {
    if (tab === "messages" && !decoder) import("./decode.js").then((found) => setLoaded(decoder = found), (error) => setLoaded(() => { throw error; }));
  }, [tab]);
  const found = page.data?.rows?.[0];
  if (!found) {
    return html`<section><${Title} name=${name} />${page.error ? html`<${Failure} error=${page.error} what="this journal" onRetry=${page.reload} />`
      : page.data ? html`<${Failure} error=${new CallError(404, `there is no journal ${name}`)} what="this journal" />` : html`<${Skeleton} />`}</section>`;
  }
  const row = resolved(found, page.data.members || []);
  return html`<section class="fill">
    <${Title} name=${name} row=${row} /><${Stale} error=${page.error} time=${page.time} />
    <div class="bar under"><${Tabs} label="Views of the journal" tabs=${TABS} current=${tab} onChoose=${(value) => setQuery({ tab: value === "messages" ? "" : value })} /></div>
    <div id="panel" role="tabpanel" aria-labelledby=${`tab-${tab}`} class="panel fill">
      ${tab === "messages" ? decoder ? html`<${Messages} name=${name} row=${row} query=${at.query} />` : html`<${Skeleton} rows=${8} />`
        : tab === "fragments" ? html`<${Fragments} name=${name} row=${row} />`
        : tab === "replicas" ? html`<${Replicas} row=${row} />`
        : tab === "spec" ? html`<${Spec} name=${name} />`
        : html`<${Readers} name=${name} />`}
    </div></section>`;
}

function Title({ name, row }) {
  const [tone, word] = row ? journalState(row.state) : [];
  useAnnounced(word, () => `${name} is ${word}`);
  return html`<div class="title"><h1><${Path} name=${name} /></h1>
    ${row && html`<dl class="summary"><div><dt>State</dt><dd><${State} tone=${tone}>${word}<//></dd></div>
      <div><dt>Content</dt><dd>${labelOf(row.labels, "content-type") || html`<span class="dim">bytes</span>`}</dd></div>
      <div><dt>Primary</dt><dd>${row.primaryName || "none"}</dd></div>
      ${[["End", bytes(row.head)], ["Size", bytes(row.size)], ["Rate", rate(row.rate)], ["Not stored", bytes(row.unstored)]].map(([title, text]) => html`<div key=${title}><dt>${title}</dt><dd>${maybe(text)}</dd></div>`)}</dl>`}</div>`;
}

// ---------------------------------------------------------------- messages

/** Decoders, which only messages need. @type {typeof import("./decode.js")} */
let decoder;
const ROWS_MAX = 2000;
/** Content that is decoded at a time, and time after which the page is drawn. */
const PIECE_BYTES = 64 * 1024;
const WORK_MS = 20;
/** Time between two looks at rows that are read in bulk. */
const BULK_MS = 100;
const STEP_BYTES = 64 * 1024 * 1024;
const STATES = {
  outside: ["ok", "committed"], committed: ["ok", "committed"], pending: ["busy", "pending"],
  "rolled back": ["bad", "rolled back"], duplicate: ["idle", "duplicate"],
  acknowledges: ["ok", "acknowledges"], "rolls back": ["bad", "rolls back"],
};
const isCommitted = (message) => STATES[message.state][1] === "committed";

/** Sign of a message's place in its transaction. */
function bracket({ flags, clock: stamp, state, isFirst }) {
  if (stamp === null || (flags !== decoder.CONTINUE && flags !== decoder.ACKNOWLEDGE)) return "";
  if (flags === decoder.ACKNOWLEDGE) return state === decoder.ACK_ROLLBACK ? "┘✖" : "┘✔";
  if (isFirst) return "┌";
  return state === decoder.PENDING ? "┊" : "│";
}

const MESSAGE_COLUMNS = [
  { name: "offset", title: "Offset", cell: (row) => row.begin },
  { name: "time", title: "Time", cell: (row) => row.time !== null && html`<span title=${clock(row.time)}>${shortClock(row.time)}</span>` },
  { name: "producer", title: "Producer", cell: (row) => row.producer && html`<span title=${row.producer}><i class=${`hue hue${parseInt(row.producer.slice(-2), 16) % 8}`} aria-hidden="true"></i>${row.producer.slice(0, 6)}</span>` },
  { name: "tx", title: "Tx", cell: (row) => html`<span aria-hidden="true">${bracket(row)}</span>` },
  { name: "status", title: "Status", cell: (row) => (row.clock === null ? html`<${State} tone="idle">no UUID<//>` : html`<${State} tone=${STATES[row.state][0]}>${STATES[row.state][1]}<//>`) },
  { name: "message", title: "Message", cell: (row) => html`<span class=${row.error ? "broken" : ""}>${withoutUuid(row)}</span>` },
];

function withoutUuid(row) {
  const text = row.text.slice(0, 1000);
  return row.kind === "json" ? text.replace(/^\{"(?:UUID|uuid)":"[^"]*",?/, "{") : text;
}

/**
 * Tail or scan of a journal, outside of the components: it fills a ring of rows, and says at most
 * once for each frame of the screen, and ten times a second in bulk, that they have changed.
 */
class Scan {
  constructor(onChange) {
    this.onChange = onChange;
    this.name = this.kind = "";
    this.cutter = this.sequencer = /** @type {any} */ (null);
    this.isLive = this.isLast = this.isMasked = false;
    this.types = undefined;
    /** @type {null | ((message: object) => unknown)} */
    this.filter = null;
    this.rows = [];
    this.hits = 0;
    this.scanned = 0;
    this.dropped = 0;
    this.phase = "idle"; // queued, reading, waiting, step, paused, ended
    this.error = null;
    this.offset = this.workMs = this.shown = 0;
    this.head = 0;
    this.from = 0;
    this.frame = 0;
    this.aborter = null;
  }

  /** Begin at an offset. */
  async start(name, kind, from, { known: given, isLive, isLast, filter }) {
    this.stop();
    Object.assign(this, { name, kind, isLive, isLast, filter, cutter: null, sequencer: new decoder.Sequencer(), rows: [], hits: 0, scanned: 0, dropped: 0, error: null, phase: "reading" });
    const { signal } = (this.aborter = new AbortController());
    this.changed();
    try {
      this.types = kind === "fixed" ? await typesOf(name, signal) : undefined;
      const known = given || await offsetsOf(name, signal);
      this.head = known.head;
      const wanted = typeof from === "function" ? await from(known, signal) : from;
      const target = Math.max(known.begin, Math.min(wanted, known.head));
      const seek = isLast ? 4 * decoder.SEEK_BYTES : kind === "hex" ? 0 : decoder.SEEK_BYTES;
      const begin = Math.max(known.begin, target > known.begin ? target - seek : target);
      this.target = isLast ? known.begin : target;
      this.offset = this.from = begin;
      this.cutter = new decoder.Cutter(kind, begin > known.begin);
      await this.#run(signal);
    } catch (error) {
      this.#failed(error, signal);
    }
  }

  /** Continue after a step, or after a stop. */
  async resume() {
    const { signal } = (this.aborter = new AbortController());
    this.from = this.offset;
    try {
      await this.#run(signal);
    } catch (error) {
      this.#failed(error, signal);
    }
  }

  stop() {
    this.aborter?.abort();
    if (this.phase !== "idle" && this.phase !== "ended") this.phase = "paused";
  }

  #run(signal) {
    return this.isLive ? holding(TAILS, signal, () => this.#read(signal), () => { this.phase = "queued"; this.changed(); }) : this.#read(signal);
  }

  async #read(signal) {
    this.phase = "reading";
    for (let failures = 0; !signal.aborted;) {
      if (!this.isLive && this.offset >= this.head) {
        this.phase = "ended";
        break;
      }
      if (this.offset >= this.head) this.phase = "waiting";
      this.changed();
      try {
        let isEmpty = true;
        for await (const chunk of content(this.name, this.offset, this.isLive, signal)) {
          isEmpty = false;
          failures = 0;
          this.error = null;
          await this.#takeAll(chunk, signal);
          if (signal.aborted) return;
          if (!this.isLive && this.offset - this.from >= STEP_BYTES && this.offset < this.head) {
            this.phase = "step";
            this.changed();
            return;
          }
        }
        if (isEmpty && this.isLive) await pause(500, signal);
        if (!this.isLive && this.offset < this.head && ++failures > 3) throw new CallError(0, "the broker ended the read");
      } catch (error) {
        if (signal.aborted) return;
        if (error.status >= 400 && error.status < 500 && error.status !== 416 && error.status !== 429) throw error;
        if (!this.isLive && failures > 3) throw error;
        this.error = error;
        failures++;
        this.changed();
        await pause(Math.min(4000, 250 * 2 ** failures), signal);
      }
    }
    this.changed();
  }

  #failed(error, signal) {
    if (signal.aborted) return;
    this.error = error;
    this.phase = "ended";
    this.changed();
  }

  /** Take content in pieces, between which the page is drawn and answers keys. */
  async #takeAll(found, signal) {
    const length = found.frames ? 1 : found.bytes.length;
    for (let at = 0; at < length && !signal.aborted; at += PIECE_BYTES) {
      const began = performance.now();
      this.#take(found.frames ? found : { offset: found.offset + at, bytes: found.bytes.subarray(at, at + PIECE_BYTES) });
      this.workMs += performance.now() - began;
      // Timers of hidden tabs are late.
      if (this.workMs < WORK_MS || document.hidden) continue;
      this.workMs = 0;
      await pause(0, signal);
    }
  }

  /** @param {any} content bytes from an offset on, or the frames up to `end` */
  #take({ offset, bytes: chunk, frames, end = offset + chunk?.length }) {
    this.isMasked = Boolean(frames);
    if (frames && !frames.length && end < this.head) return; // the rest is read again
    if (frames && this.cutter.isMiddle) [this.cutter.isMiddle] = [false, frames.pop()];
    for (const frame of frames || this.cutter.push(chunk, offset)) {
      const message = decoder.decode(frame.kind || this.kind, frame, this.types);
      this.sequencer.push(message);
      if (message.begin < this.target) continue;
      let isHit = true;
      if (this.filter) {
        try {
          isHit = Boolean(this.filter(message));
        } catch {
          isHit = false;
        }
      }
      if (isHit) {
        this.rows.push(message);
        this.hits++;
      }
    }
    this.scanned += end - offset;
    this.offset = end;
    this.head = Math.max(this.head, this.offset);
    this.phase = this.isLive && this.offset >= this.head ? "waiting" : this.phase;
    if (this.rows.length > ROWS_MAX + 500) {
      this.dropped += this.rows.length - ROWS_MAX;
      this.rows.splice(0, this.rows.length - ROWS_MAX);
    }
    this.changed();
  }

  changed() {
    if (this.frame) return;
    const show = () => { this.frame = 0; this.shown = this.rows.length && performance.now(); this.onChange(); };
    const isBulk = this.phase === "reading" && performance.now() - this.shown < BULK_MS;
    this.frame = isBulk ? setTimeout(show, BULK_MS) : requestAnimationFrame(show);
  }
}

const FROM = [["end", "last messages"], ["begin", "begin"], ["offset", "offset"], ["time", "time"]];

/** Offset of the fragment that has a time. */
async function offsetOfTime(name, text, known, signal) {
  const seconds = Math.floor(new Date(text).getTime() / 1000);
  if (Number.isNaN(seconds)) throw new CallError(400, "give a date and a time");
  const found = await call("v1/journals/fragments", { journal: name, beginModTime: String(seconds), pageLimit: 1 }, signal);
  return found.fragments?.length ? Number(found.fragments[0].spec.begin) : known.head;
}

function Messages({ name, row, query }) {
  const kind = decoder.kindOf(labelOf(row.labels, "content-type"));
  // The end may be older than a moment: a scan reads on to the end that it finds.
  const known = row.head === undefined || row.head === null ? null : { begin: Number(row.begin || 0), head: Number(row.head) };
  const token = useToken();
  const [, setTurn] = useState(0);
  const scan = useMemo(() => new Scan(() => setTurn((old) => old + 1)), []);
  const mode = query.offset !== undefined ? "offset" : query.time !== undefined ? "time" : query.from === "begin" ? "begin" : "end";
  const isLive = query.live === "1";
  const onlyCommitted = query.committed === "1";
  const [text, setText] = useState(query.filter || "");
  const [isFollowing, setFollowing] = useState(true);
  const [selected, setSelected] = useState(null);
  const [draft, setDraft] = useState(null);
  let filter = null;
  let wrong = "";
  try {
    filter = decoder.parseFilter(query.filter || "");
    decoder.parseFilter(text);
  } catch (error) {
    wrong = error.message;
  }
  const start = () => {
    const from = mode === "begin" ? 0 : mode === "offset" ? Number(query.offset) || 0
      : mode === "time" ? (end, signal) => offsetOfTime(name, query.time, end, signal) : Infinity;
    setFollowing(true);
    scan.start(name, kind, from, { known, isLive, isLast: mode === "end", filter });
  };
  useEffect(() => {
    start();
    return () => scan.stop();
  }, [name, kind, token, mode, query.offset, query.time, isLive, query.filter]);
  useEffect(() => isLive ? whileShown(() => { if (scan.phase === "paused") scan.cutter ? scan.resume() : start(); }, () => scan.stop()) : undefined, [isLive]);
  useKeys({ Escape: () => (selected ? setSelected(null) : false) });

  const shown = onlyCommitted ? scan.rows.filter(isCommitted) : scan.rows;
  const rows = mode === "end" && !isLive && !query.filter ? shown.slice(-100) : shown;
  const chooseFrom = (value) => {
    setDraft(null);
    if (value === "offset" || value === "time") setDraft(value);
    else setQuery({ from: value === "begin" ? "begin" : "", offset: "", time: "" });
  };
  const command = mode === "offset" ? `curl -sN ${quoted(`${journalUrl(name)}?offset=${Number(query.offset) || 0}${isLive ? "&block=true" : ""}`)}`
    : `gazctl journals read ${quoted(name)}${mode === "time" && query.time ? ` --since ${new Date(query.time).toISOString().slice(0, 19)}Z` : mode === "end" ? " --tail" : ""}${isLive || mode === "end" ? " --block" : ""}`;
  return html`<${Fragment}>
    <div class="bar tools-bar">
      <label class="inline">From <select value=${draft || mode} onChange=${(event) => chooseFrom(event.target.value)}>${FROM.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select></label>
      ${(draft || mode) === "offset" && html`<input class="short" type="number" min="0" aria-label="Offset" placeholder="offset" value=${query.offset || ""} onChange=${(event) => setQuery({ offset: event.target.value, time: "", from: "" })} />`}
      ${(draft || mode) === "time" && html`<input type="datetime-local" aria-label="Time" value=${query.time || ""} onChange=${(event) => setQuery({ time: event.target.value, offset: "", from: "" })} />`}
      <button class="live" aria-pressed=${String(isLive)} onClick=${() => setQuery({ live: isLive ? "" : "1" })}><span class=${isLive ? "pulse" : ""} aria-hidden="true">${isLive ? "●" : "▶"}</span> ${isLive ? "Live" : "Go live"}</button>
      <form class="filter" onSubmit=${(event) => { event.preventDefault(); if (!wrong) setQuery({ filter: text }); }}>
        <${Search} id="filter" label="Filter: path, operator, value" placeholder='filter: customer = "ada"' value=${text} onInput=${(value) => { setText(value); if (!value) setQuery({ filter: "" }); }} />
        ${text !== (query.filter || "") && !wrong && html`<button type="submit">Apply</button>`}</form>
      <label class="check"><input type="checkbox" checked=${onlyCommitted} onChange=${() => setQuery({ committed: onlyCommitted ? "" : "1" })} /> committed only</label>
    </div>
    ${scan.isMasked && html`<p class="stale">Masked by this console. A token with READ can read the journal itself.</p>`}
    ${wrong && html`<p class="stale" role="alert"><${State} tone="warn">Filter<//> ${wrong}</p>`}
    ${scan.error && (rows.length || isLive ? html`<p class="stale" role="status"><${State} tone="warn">Reading again<//> ${scan.error.message}</p>` : html`<${Failure} error=${scan.error} what="reading this journal" onRetry=${start} />`)}
    ${scan.phase === "queued" ? html`<p class="stale" role="status"><${State} tone="warn">Three other tabs are live<//> A browser has six connections to one server, and three are for live journals. This tab reads once another one stops, is closed, or is hidden for 30 s. <button class="quiet" onClick=${() => setQuery({ live: "" })}>Show the last messages</button></p>` : ""}
    ${rows.length === 0 && !scan.error && scan.phase !== "queued" ? (scan.phase === "reading" ? html`<${Skeleton} rows=${8} />`
        : html`<${Empty} glyph=${isLive ? "◐" : "○"} title=${query.filter || onlyCommitted ? "No message matches so far" : isLive ? "Waiting for messages" : "There are no messages here"}>
          ${isLive ? html`<p>They appear when they are appended.</p>` : ""}<${Command} text=${`echo '{"hello": "world"}' | curl -X PUT --data-binary @- ${quoted(journalUrl(name))}`} /><//>`)
      : rows.length > 0 && html`<div class=${`split${selected ? " open" : ""}`}>
        <${VirtualTable} label="Messages" kind=${`messages ${kind}`} columns=${MESSAGE_COLUMNS} total=${rows.length} row=${(index) => rows[index] && Object.assign(rows[index], { rowClass: rows[index].clock === null ? "" : STATES[rows[index].state][1].replace(" ", "-") })}
          keyOf=${(row) => row.begin} isFollowing=${isFollowing && (isLive || mode === "end")} onFollow=${setFollowing}
          selected=${selected ? rows.indexOf(selected) : -1} onSelect=${(index) => setSelected(rows[index])} onOpen=${(row) => setSelected(row)} />
        ${selected && html`<${Detail} name=${name} message=${selected} onClose=${() => setSelected(null)} />`}</div>`}
    <footer class="foot"><span class="progress" >${progressText(scan, isLive, query.filter)}
        ${scan.phase === "step" && html` <button onClick=${() => scan.resume()}>Continue</button>`}
        ${scan.phase === "reading" && scan.scanned > 1e6 && html` <button onClick=${() => { scan.stop(); scan.changed(); }}>Stop</button>`}
        ${rows.length > 0 && html` <button class="quiet" onClick=${() => save(name, rows)}>save as NDJSON</button>`}</span>
      <${Command} text=${command} /></footer>
  <//>`;
}

function progressText(scan, isLive, filter) {
  const scanned = filter ? `scanned ${bytes(scan.scanned)} of ${bytes(Math.max(0, scan.head - scan.from))} · ${plural(scan.hits, "hit")}` : `${bytes(scan.scanned)} read`;
  const limit = scan.dropped ? ` · the last ${count(ROWS_MAX)} are shown` : "";
  const phase = { reading: " · reading…", waiting: isLive ? " · live" : "", paused: " · paused", queued: " · waits for another tab" }[scan.phase] || "";
  return `${scanned}${limit}${phase}`;
}

function save(name, rows) {
  const lines = rows.map((row) => (row.kind === "json" && !row.error ? row.text : JSON.stringify({ offset: row.begin, value: decoder.valueOf(row) })));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "application/x-ndjson" }));
  link.download = `${name.replace(/\//g, "_")}.ndjson`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function Detail({ name, message, onClose }) {
  const value = decoder.valueOf(message);
  const pretty = typeof value === "string" ? value : JSON.stringify(value, null, 2);
  const curl = `curl -s ${quoted(`${journalUrl(name)}?offset=${message.begin}`)} | head -c ${message.size}`;
  const [tone, word] = message.clock === null ? ["idle", "no UUID: not sequenced"] : STATES[message.state];
  const raw = message.bytes ? decoder.toHex(message.bytes.slice(0, 4096)).replace(/(..)(?=.)/g, "$1 ") : "";
  return html`<aside class="detail" aria-label="Message">
    <div class="bar"><h2>Message at ${message.begin}</h2><button class="icon" onClick=${onClose} aria-label="Close the message" title="Close (Esc)">✕</button></div>
    <${Facts} of=${[["Status", html`<${State} tone=${tone}>${word}<//>${message.acknowledged ? html`<span class="dim"> at ${clock(message.acknowledged)}</span>` : ""}`],
      ["Offsets", html`<span class="mono">${message.begin} – ${message.end}</span> <span class="dim">(${count(message.size)} bytes)</span>`],
      ...(message.uuid ? [["Time", clock(message.time)], ["Producer", message.producer], ["Clock", String(message.clock)], ["UUID", message.uuid]].map(([title, text]) => [title, html`<span class="mono">${text}</span>`]) : []),
      message.error && ["Problem", message.error === "no JSON" ? "the line is no JSON" : "no frame begins here: these bytes are passed over"]]} />
    <pre tabindex="0">${pretty.slice(0, 65536)}</pre>
    ${raw && html`<details><summary>Bytes</summary><pre tabindex="0">${raw}</pre></details>`}
    <div class="buttons"><${Copy} text=${message.text || pretty} label="copy message" /><${Copy} text=${`${location.href.split("#")[0]}${journalLink(name, { offset: message.begin })}`} label="copy link" /><${Copy} text=${curl} label="copy curl" /></div>
  </aside>`;
}

// ---------------------------------------------------------------- fragments

function Fragments({ name, row }) {
  const answer = useCall("v1/journals/fragments", { journal: name, pageLimit: 1000 }, 15_000);
  return html`<div class="scroll"><${Loaded} of=${answer} what="its fragments">${(data) => {
    const fragments = (data.fragments || []).map(({ spec, signedUrl }) => ({ ...spec, begin: Number(spec.begin || 0), end: Number(spec.end || 0), signedUrl }));
    if (!fragments.length) return html`<${Empty} title="No fragments yet"><p>A fragment is stored when it is full, or after the flush interval of the spec.</p><//>`;
    const faults = gapsAndOverlaps(fragments);
    return html`<${FragmentBar} fragments=${fragments} head=${Number(row.head || 0)} />
      ${faults.map((fault) => html`<p key=${fault} class="stale"><${State} tone="bad">${fault}<//></p>`)}
      <${Table} label="Fragments" heads="#Begin, #End, #Length, Codec, Store, Stored, SHA-1">${fragments.slice(-500).reverse().map((one) => html`<tr key=${`${one.begin}-${one.end}-${one.backingStore}`}><td class="num mono"><a href=${journalLink(name, { offset: one.begin })}>${one.begin}</a></td><td class="num mono">${one.end}</td><td class="num">${bytes(one.end - one.begin)}</td>
        <td>${codec(one.compressionCodec)}</td><td class="mono">${one.backingStore || html`<${State} tone="busy">on brokers<//>`}</td><td>${Number(one.modTime) ? since(Number(one.modTime) * 1e6) : html`<span class="dim">not yet</span>`}</td><td class="mono dim">${sha1(one.sum)}</td></tr>`)}<//>
      ${fragments.length > 500 && html`<p class="dim">The last 500 of ${count(fragments.length)} are shown${data.nextPageToken && Number(data.nextPageToken) ? "; there are more" : ""}.</p>`}`;
  }}<//><${Command} text=${`gazctl journals fragments ${quoted(name)}`} /></div>`;
}

const codec = (value) => String(value || "none").toLowerCase().replace("_", " ");

function sha1(sum) {
  if (!sum) return "";
  const hex = (value, digits) => BigInt(value || 0).toString(16).padStart(digits, "0");
  return `${hex(sum.part1, 16)}${hex(sum.part2, 16)}${hex(sum.part3, 8)}`.slice(0, 12);
}

function gapsAndOverlaps(fragments) {
  const faults = [];
  let end = fragments[0].begin;
  for (const one of [...fragments].sort((a, b) => a.begin - b.begin || a.end - b.end)) {
    if (one.begin > end) faults.push(`Gap from ${end} to ${one.begin}: ${bytes(one.begin - end)} are missing`);
    end = Math.max(end, one.end);
  }
  return faults.slice(0, 5);
}

/** All fragments as one bar: stored, only on brokers, and what is missing between. */
function FragmentBar({ fragments, head }) {
  const begin = Math.min(...fragments.map((one) => one.begin));
  const end = Math.max(head, ...fragments.map((one) => one.end));
  const scale = 1000 / Math.max(1, end - begin);
  const stored = fragments.filter((one) => one.backingStore).reduce((sum, one) => sum + one.end - one.begin, 0);
  return html`<figure class="fragments"><svg viewBox="0 0 1000 32" preserveAspectRatio="none" role="img" aria-label=${`${fragments.length} fragments from ${begin} to ${end}`}>
    <rect class="missing" width="1000" height="32" />
    ${fragments.slice(-800).map((one) => html`<rect key=${`${one.begin}-${one.end}-${one.backingStore}`} class=${one.backingStore ? "stored" : "local"} x=${((one.begin - begin) * scale).toFixed(2)} width=${Math.max(1.5, (one.end - one.begin) * scale - 1).toFixed(2)} height="32"><title>${`${one.begin} – ${one.end}, ${bytes(one.end - one.begin)}${one.backingStore ? "" : ", not stored yet"}`}</title></rect>`)}
  </svg><figcaption><span class="mono">${begin}</span><span><i class="key stored"></i>stored ${bytes(stored)} <i class="key local"></i>on brokers only <i class="key missing"></i>missing</span><span class="mono">${end}</span></figcaption></figure>`;
}

// ---------------------------------------------------------------- readers

/** Shards of all applications that have the journal among their sources. */
function Readers({ name }) {
  const token = useToken();
  const { applications, members } = useApplications();
  const isWithheld = Boolean(token) && claimsOf(token)?.capabilities.includes("READ") === false;
  const why = isWithheld ? "not permitted" : "not known";
  const known = (text) => text || html`<span class="dim">${why}</span>`;
  const query = { source: name, sort: "BY_LAG_SECONDS", descending: true, limit: 200 };
  const answer = useAnswer((members.data || members.error) && ((signal) => Promise.all(applications.map(async (one) => {
    try {
      const page = await call(atMember(one.member, "v1/shards/page"), query, signal);
      return { ...one, name: one.name || page.application, total: Number(page.total || 0), rows: (page.rows || []).map((row) => resolved(row, page.members || [])) };
    } catch (error) {
      if (signal.aborted) throw error;
      return { ...one, error, total: 0, rows: [] };
    }
  }))), [name, applications], REFRESH_MS);
  const isRefused = members.error && !applications.length;
  return html`<div class="scroll"><${Loaded} of=${isRefused ? members : answer} what="the applications of the cluster">${(found) => {
    const rows = found.flatMap((one) => one.rows.map((row) => ({ ...row, application: one.name })));
    const total = found.reduce((sum, one) => sum + one.total, 0);
    return html`${found.filter(({ error }) => error).map((one) => html`<p class="stale" key=${one.name}><${State} tone="warn">${one.name || "The application"} is not shown<//> ${one.error.message}</p>`)}
      ${rows.length ? html`<${Table} label="Readers" heads="Shard, Application, State, Primary, #Read through, #Lag, #Lag in bytes">${rows.map((row) => { const [tone, word] = shardState(row.state); const offset = row.readThrough?.[name]; const more = Object.keys(row.readThrough || {}).length - 1; return html`<tr key=${row.application + row.id}><td><a class="mono" href=${shardLink(row.application, row.id)}>${row.id}</a>${more > 0 && html`<span class="dim"> and ${plural(more, "other source")}</span>`}</td>
          <td><a href=${to(["shards"], { application: row.application })}>${row.application}</a></td><td><${State} tone=${tone} title=${row.error}>${word}<//></td><td class="mono">${row.primaryName || html`<span class="dim">none</span>`}</td>
          <td class="num mono">${offset ? html`<a href=${journalLink(name, { offset })} title="Messages from here on">${offset}</a>` : known()}</td><td class="num">${known(duration(row.lagS))}</td><td class="num">${known(bytes(row.lagBytes))}</td></tr>`; })}<//>
        ${total > rows.length && html`<p class="dim">The ${count(rows.length)} with the greatest lag of ${count(total)} are shown.</p>`}<p class="dim">These are shards of applications. Other programs that read the journal are not known here.</p>`
      : html`<${Empty} title="No shard reads this journal"><p>An application reads it if its sources select it by a label. Other programs that read it are not known here.</p><${Command} text="gazette run-consumer MODULE:APPLICATION" /><//>`}`;
  }}<//><${Command} text="gazctl shards list --lag" /></div>`;
}

// ---------------------------------------------------------------- replicas, spec

function Replicas({ row }) {
  const heads = useCall("v1/journals/heads", { journals: [row.name] }, REFRESH_MS);
  const head = heads.data?.heads?.[0];
  const found = new Map((head?.replicas || []).map((replica) => [memberName(replica.member), replica]));
  const names = [...(row.primaryName ? [row.primaryName] : []), ...row.others];
  const slots = Array.from({ length: Math.max(row.replication, names.length) }, (_, index) => names[index]);
  return html`<div class="scroll"><${Stale} error=${heads.error} time=${heads.time} />
    ${heads.error && !heads.time && html`<p class="stale"><${State} tone="warn">Offsets are not known<//> ${heads.error.message}</p>`}
    <div class="cards">${slots.map((name, index) => {
      if (!name) return html`<article key=${index} class="card missing"><h2><${State} tone="warn">no replica<//></h2><p>No broker has room, or none is in another zone. A dry run says which:</p><${Command} text="gazette allocator simulate" /></article>`;
      const replica = found.get(name);
      return html`<article key=${name} class="card"><h2><a href="#/brokers">${name}</a>${name === row.primaryName ? html`<span class="tag">primary</span>` : ""}</h2>
        <${Facts} of=${[["Pipeline", replica ? html`<${State} tone=${replica.synced ? "ok" : "warn"}>${replica.synced ? "in sync" : "not in sync"}<//>` : maybe()],
          ["End", maybe(replica && count(replica.head))], ["Not stored", maybe(replica && bytes(replica.unstored))]]} /></article>`;
    })}</div>
    ${head?.oldestUnstoredS ? html`<p class="dim">The oldest byte that is in no store was appended ${duration(head.oldestUnstoredS)} ago.</p>` : ""}
    ${head?.error && html`<p class="stale"><${State} tone="warn">Not all is known<//> ${head.error}</p>`}
    <${Command} text=${`gazctl journals list ${quoted(row.name)} -p -r --heads --unstored`} /></div>`;
}

function Spec({ name }) {
  const listed = useCall("v1/journals/list", { selector: named(name) }, 30_000);
  return html`<div class="scroll"><${Loaded} of=${listed} what="its spec">${(data) => {
    const journal = data.result?.journals?.[0];
    if (!journal) return html`<${Empty} title="It was removed" />`;
    const labels = journal.spec.labels?.labels || [];
    return html`<div class="cards wide"><article class="card"><h2>Spec</h2><pre tabindex="0">${yaml({ ...journal.spec, labels })}</pre></article>
      <article class="card"><h2>Labels</h2><${Labels} of=${labels} />
        <h2>Revisions of Etcd</h2><${Facts} mono="mono" of=${[["Created", journal.createRevision], ["Changed", journal.modRevision]]} /></article></div>`;
  }}<//><${Command} text=${`gazctl journals edit -l ${quoted(`name=${name}`)}`} /></div>`;
}

/** Object as YAML, for reading. Fields that are empty are left out. */
function yaml(value, indent = "") {
  return Object.entries(value).map(([key, one]) => {
    if (one === null || one === "" || one === 0 || one === "0" || (Array.isArray(one) && !one.length)) return "";
    const name = key.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    if (Array.isArray(one)) return `${indent}${name}:\n${one.map((item) => `${indent}  - ${typeof item === "object" ? yaml(item, `${indent}    `).trimStart() : `${item}\n`}`).join("")}`;
    if (typeof one === "object") return `${indent}${name}:\n${yaml(one, `${indent}  `)}`;
    return `${indent}${name}: ${one}\n`;
  }).join("");
}
