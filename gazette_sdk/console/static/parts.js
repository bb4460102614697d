// Parts of pages: glyphs, numbers, commands, states of loading, and the table of virtual rows.
import { h, Fragment } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Fragment };

// ---------------------------------------------------------------- numbers

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];

const isKnown = (value) => value !== undefined && value !== null && value !== "";

/** Bytes as a person reads them; "" where they are unknown. */
export function bytes(value) {
  if (!isKnown(value)) return "";
  let number = Number(value);
  let unit = 0;
  while (Math.abs(number) >= 999.5 && unit < UNITS.length - 1) { number /= 1000; unit++; }
  return `${unit === 0 || number >= 99.5 ? Math.round(number) : number.toPrecision(number >= 9.95 ? 3 : 2)} ${UNITS[unit]}`;
}

export const rate = (value) => (isKnown(value) ? `${bytes(value)}/s` : "");

const groups = new Intl.NumberFormat("en", { useGrouping: true });
export const count = (value) => (isKnown(value) ? groups.format(Number(value)).replace(/,/g, "\u202f") : "");

export const plural = (number, word) => `${count(number)} ${Number(number) === 1 ? word : `${word}s`}`;

/** Seconds as a duration. */
export function duration(seconds) {
  if (!isKnown(seconds)) return "";
  const value = Number(seconds);
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${Math.round(value)} s`;
  if (value < 5970) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

const micros = (value) => (isKnown(value) && Number(value) > 0 ? Number(value) / 1000 : null);

/** Time since a moment in microseconds, such as "4 min ago". */
export function since(us) {
  const ms = micros(us);
  return ms === null ? "" : `${duration(Math.max(0, (Date.now() - ms) / 1000))} ago`;
}

/** Time of the day of a moment in ms; with its date if that is not today's. */
export function clock(ms, isExact = true) {
  if (!isKnown(ms)) return "";
  const date = new Date(ms);
  const two = (value, digits = 2) => String(value).padStart(digits, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const isToday = new Date().toDateString() === date.toDateString();
  return `${isToday ? "" : `${day} `}${time}${isExact ? `.${two(date.getMilliseconds(), 3)}` : ""}`;
}

/** Time of the day to the ms; of another day its date and time to the second. */
export function shortClock(ms) {
  const text = clock(ms);
  return text.length > 12 ? text.slice(5, 19) : text;
}

/** Text with a link at the subject that it names; the subject goes before a text without it. */
export function Linked({ href, subject, text }) {
  const name = href ? html`<a class="mono" href=${href}>${subject}</a>` : html`<span class="mono">${subject}</span>`;
  const at = subject ? text.indexOf(subject) : -1;
  return at < 0 ? html`${name} ${text}` : html`${text.slice(0, at)}${name}${text.slice(at + subject.length)}`;
}

/** Value, or why there is none: it is not known, or the token does not allow it. */
export function maybe(text, why = "not permitted or not known") {
  return text ? text : html`<span class="unknown" title=${why}><span aria-hidden="true">–</span><span class="unseen">${why}</span></span>`;
}

// ---------------------------------------------------------------- states

const GLYPHS = { ok: "●", info: "●", warn: "▲", bad: "✖", idle: "○", busy: "◐" };

/** Glyph and word of a state. */
export function State({ tone, children, title }) {
  return html`<span class=${`state ${tone}`} title=${title}><span class="glyph" aria-hidden="true">${GLYPHS[tone]}</span><span>${children}</span></span>`;
}

const JOURNAL_STATES = {
  JOURNAL_OK: ["ok", "ok"],
  JOURNAL_SHORT: ["warn", "short of replicas"],
  JOURNAL_SINGLE_ZONE: ["warn", "in one zone"],
  JOURNAL_NO_PRIMARY: ["bad", "no primary"],
  JOURNAL_UNASSIGNED: ["bad", "unassigned"],
  JOURNAL_WAITING: ["bad", "waits for brokers"],
  JOURNAL_SUSPENDED: ["idle", "suspended"],
};
const SHARD_STATES = {
  PRIMARY: ["ok", "primary"],
  STANDBY: ["busy", "standby"],
  BACKFILL: ["busy", "recovering"],
  IDLE: ["warn", "unassigned"],
  FAILED: ["bad", "failed"],
  DISABLED: ["idle", "disabled"],
};
const ORDER = { bad: 0, warn: 1, busy: 2, idle: 3, ok: 4 };

export const journalState = (name) => JOURNAL_STATES[name] || ["idle", String(name || "unknown").toLowerCase()];
export const shardState = (name) => SHARD_STATES[name] || ["idle", String(name || "unknown").toLowerCase()];
export const severityTone = (name) => ({ ERROR: "bad", WARNING: "warn" })[name] || "info";

/** Buttons that filter by state, each with the number of its rows. */
export function StateFilter({ states, describe, chosen, onChoose }) {
  const total = Object.values(states).reduce((sum, value) => sum + Number(value), 0);
  const known = Object.entries(states)
    .filter(([name, value]) => Number(value) > 0 || name === chosen)
    .sort(([a], [b]) => ORDER[describe(a)[0]] - ORDER[describe(b)[0]]);
  return html`<div class="chips" role="group" aria-label="State">
    <button class="chip" aria-pressed=${String(!chosen)} onClick=${() => onChoose("")}>all <b>${count(total)}</b></button>
    ${known.map(([name, value]) => html`<button key=${name} class="chip" aria-pressed=${String(chosen === name)}
      onClick=${() => onChoose(chosen === name ? "" : name)}><${State} tone=${describe(name)[0]}>${describe(name)[1]}<//> <b>${count(value)}</b></button>`)}
  </div>`;
}

// ---------------------------------------------------------------- commands

/** Argument of a command as a shell takes it. */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

export function Copy({ text, label = "copy" }) {
  const [done, setDone] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone("copied");
    } catch {
      setDone("select and copy");
    }
    setTimeout(() => setDone(""), 1500);
  };
  return html`<button type="button" class="quiet" onClick=${copy} aria-label=${`${label}: ${text}`}>${done || label}</button>`;
}

/** Command of a terminal that shows the same, or more. */
export function Command({ text }) {
  return html`<div class="command"><code><span class="prompt" aria-hidden="true">$ </span>${text}</code><${Copy} text=${text} /></div>`;
}

// ---------------------------------------------------------------- changes

/**
 * Reference of a dialog, and the functions that open and close it.
 * @returns {[object, () => void, () => void]}
 */
export function useDialog() {
  const dialog = useRef(null);
  return [dialog, () => dialog.current.showModal(), () => dialog.current.close()];
}

/**
 * Button of a change, and its dialog, which shows what will happen and the command that does the
 * same. The change can be made once the exact `name` is typed. `run()` makes it, and returns in
 * words what was done. A dialog that is open stays when the button is offered no longer.
 */
export function Change({ label, title, noun, name, command, isOffered, run, onType, children }) {
  const [dialog, open, close] = useDialog();
  const [typed, setTyped] = useState("");
  const [state, setState] = useState({ isRunning: false, error: null, done: "" });
  const field = useRef(null);
  const wasOffered = useRef(false);
  useEffect(() => {
    const isLost = wasOffered.current && !isOffered && document.activeElement === document.body;
    if (isLost) document.querySelector("main")?.focus({ preventScroll: true });
    wasOffered.current = isOffered;
  }, [isOffered]);
  const type = (text) => { setTyped(text); onType?.(text); };
  const begin = () => {
    type("");
    setState({ isRunning: false, error: null, done: "" });
    open();
    field.current.focus();
  };
  const isReady = Boolean(name) && typed === name && !state.isRunning;
  const submit = async (event) => {
    event.preventDefault();
    if (!isReady) return;
    setState({ isRunning: true, error: null, done: "" });
    try {
      const done = await run();
      setState({ isRunning: false, error: null, done });
      close();
      announce(done);
    } catch (error) {
      setState({ isRunning: false, error, done: "" });
    }
  };
  return html`<div class="change">${isOffered && html`<button onClick=${begin}>${label}…</button>`}${state.done && html`<span class="dim">${state.done}</span>`}
    <dialog ref=${dialog} aria-labelledby="change"><form onSubmit=${submit}>
      <h2 id="change">${title}</h2>
      <label>${`Type the name of the ${noun}${name && !onType ? "" : " exactly"}`}${name && !onType && html`<b class="mono">${name}</b>`}<input ref=${field} autocomplete="off" autocapitalize="off" spellcheck=${false} value=${typed} onInput=${(event) => type(event.target.value)} /></label>
      ${children}
      ${command && html`<${Command} text=${command} />`}
      ${state.error && html`<${Failure} error=${state.error} what="this change" isOnce=${true} />`}
      <div class="buttons"><button class="primary" type="submit" disabled=${!isReady}>${state.isRunning ? "Waiting…" : label}</button><button type="button" onClick=${close}>Cancel</button></div>
    </form></dialog></div>`;
}

// ---------------------------------------------------------------- loading, nothing, failure

export function Skeleton({ rows = 6 }) {
  return html`<div class="skeleton" aria-hidden="true">${Array.from({ length: rows }, (_, index) => html`<i key=${index}></i>`)}</div>
    <p class="unseen" role="status">loading</p>`;
}

export function Empty({ title, children, glyph = "○" }) {
  return html`<div class="empty"><div class="empty-glyph" aria-hidden="true">${glyph}</div><h2>${title}</h2>${children}</div>`;
}

/** Failure in words: what is missing, and what to do. */
export function Failure({ error, onRetry, what = "this", isOnce = false }) {
  const [title, remedy] = explained(error, what, isOnce ? "Nothing is tried again: look at the page before you repeat it." : "The page tries again by itself.");
  return html`<div class="failure" role="alert">
    <${State} tone=${error.status === 401 || error.status === 403 || error.status === 501 ? "warn" : "bad"}>${title}<//>
    <p class="mono">${error.message}</p><p>${remedy}</p>
    <div class="buttons">${error.status === 401 && html`<button class="primary" onClick=${() => dispatchEvent(new Event("gazette-sign-in"))}>Sign in</button>`}
    ${onRetry && html`<button onClick=${onRetry}>Try again</button>`}</div>
  </div>`;
}

function explained({ status, message }, what, repeats) {
  switch (status === 401 && /capability|selector/.test(message) ? 403 : status) {
    case 0: return ["No answer", `Shown data may be old. ${repeats}`];
    case 401: return ["A token is needed", html`Sign in with a token, or open the address that <code>gazctl console</code> prints.`];
    case 403: return ["Not permitted", `The token does not allow ${what}. The message names the capability that is missing; pages of the whole cluster need LIST without a selector.`];
    case 404: return ["Not found", "It may have been removed, or the token does not include it."];
    case 501: return ["Not offered here", `This server does not answer for ${what}. Ask another one, or use "gazette console", which has the calls of brokers and of consumers.`];
    case 429: return ["Too many calls", `The server asks to wait. ${repeats}`];
    case 409: return ["Refused", repeats];
    default: return ["The call failed", `${repeats} See the log of the server.`];
  }
}

/** Line above data that is old because its last refresh failed. */
export function Stale({ error, time }) {
  if (!error || !time) return null;
  return html`<p class="stale" role="status"><${State} tone="warn">Not refreshed<//> ${error.message}; shown since ${clock(time, false)}</p>`;
}

/** Content of an answer, or what stands in its place. */
export function Loaded({ of, what, rows, children }) {
  if (of.data === undefined) return of.error ? html`<${Failure} error=${of.error} what=${what} onRetry=${of.reload} />` : html`<${Skeleton} rows=${rows} />`;
  return html`<${Stale} error=${of.error} time=${of.time} />${children(of.data)}`;
}

// ---------------------------------------------------------------- pictures

/** Number of values of a line. */
const HISTORY = 60;

/** Line of the last values; the newest is at the right. */
export function Sparkline({ values, label }) {
  const known = values.filter(isKnown);
  if (known.length < 2) return html`<svg class="spark" viewBox="0 0 100 24" aria-hidden="true"></svg>`;
  const top = Math.max(...known, 1e-9);
  const at = (index) => 100 - ((values.length - 1 - index) / (HISTORY - 1)) * 100;
  const points = values.map((value, index) => (isKnown(value) ? `${at(index).toFixed(1)},${(22 - (value / top) * 20).toFixed(1)}` : "")).filter(Boolean);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polygon points=${`${points[0].split(",")[0]},24 ${points.join(" ")} 100,24`} /><polyline points=${points.join(" ")} /></svg>`;
}

/** Share of a whole. */
export function Meter({ value, of, label, tone = "" }) {
  const share = Number(of) > 0 ? Math.min(1, Number(value) / Number(of)) : 0;
  return html`<svg class=${`meter ${tone}`} viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" width="100" height="6" /><rect class="fill" width=${(share * 100).toFixed(1)} height="6" /></svg>`;
}

/** Last values of a number that is polled, oldest first. */
export function useHistory(value, time, most = HISTORY) {
  const kept = useRef({ time: 0, values: /** @type {any[]} */ ([]) });
  if (time && time !== kept.current.time) {
    kept.current = { time, values: [...kept.current.values, value].slice(-most) };
  }
  return kept.current.values;
}

// ---------------------------------------------------------------- tables

/** Table of few rows, whose heads are given as one text: of numbers with `#` before them. */
export function Table({ label, heads, children }) {
  return html`<div class="table-wrap" tabindex="0" role="region" aria-label=${label}><table><thead><tr>${heads.split(", ").map((head) => html`<th key=${head} class=${head[0] === "#" ? "num" : ""}>${head.replace("#", "")}</th>`)}</tr></thead><tbody>${children}</tbody></table></div>`;
}

/** Names, each with its value; without those that have none. */
export function Facts({ of, mono = "" }) {
  return html`<dl class=${`facts ${mono}`}>${of.filter(Boolean).map(([name, value]) => html`<${Fragment} key=${name}><dt>${name}</dt><dd>${value}</dd><//>`)}</dl>`;
}

/** Labels of a journal or shard. */
export function Labels({ of }) {
  return of.length ? html`<${Facts} mono="mono" of=${of.map(({ name, value }) => [name, value])} />` : html`<p class="dim">none</p>`;
}

export const ROW_PX = 28;
const OVERSCAN = 6;

/**
 * Table that has only the visible rows in the page.
 *
 * columns: {name, title, sort, cell(row), tone}; `row(index)` returns a row, or undefined while it
 * is fetched. `j`, `k`, the arrows and Enter select and open rows.
 */
export function VirtualTable({ label, kind, columns, total, row, keyOf, sort, onSort, onShow, onOpen, isFollowing, onFollow, selected, onSelect }) {
  const scroller = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [own, setOwn] = useState(-1);
  const chosen = selected === undefined ? own : selected;
  const choose = onSelect || setOwn;
  const from = Math.max(0, Math.min(Math.floor(view.top / ROW_PX) - OVERSCAN, total - 1));
  const to = Math.min(total, Math.ceil((view.top + view.height) / ROW_PX) + OVERSCAN);

  useLayoutEffect(() => {
    const element = scroller.current;
    const measure = () => setView({ top: element.scrollTop, height: Math.min(element.clientHeight, 1200) });
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  useEffect(() => onShow?.(from, Math.max(from, to - 1)), [from, to]);
  useLayoutEffect(() => {
    if (isFollowing) scroller.current.scrollTop = scroller.current.scrollHeight;
  });
  const scrolled = () => {
    const { scrollTop, clientHeight, scrollHeight } = scroller.current;
    setView((old) => (old.top === scrollTop ? old : { ...old, top: scrollTop }));
    onFollow?.(scrollTop + clientHeight >= scrollHeight - ROW_PX);
  };
  const move = (index) => {
    const next = Math.max(0, Math.min(total - 1, index));
    choose(next);
    const { current } = scroller;
    const head = 30; // the head of the table stays above the rows
    if (next * ROW_PX < current.scrollTop) current.scrollTop = next * ROW_PX;
    const bottom = current.scrollTop + current.clientHeight - head - ROW_PX;
    if (next * ROW_PX > bottom) current.scrollTop += next * ROW_PX - bottom;
  };
  useKeys({
    j: () => total && move(chosen + 1),
    k: () => total && move(Math.max(chosen, 1) - 1),
    ArrowDown: (event) => scroller.current.contains(event.target) && (move(chosen + 1), true),
    ArrowUp: (event) => scroller.current.contains(event.target) && (move(Math.max(chosen, 1) - 1), true),
    Enter: (event) => {
      if (chosen < 0 || event.target.closest("button, a, summary, select")) return false;
      const found = row(chosen);
      if (found !== undefined) onOpen?.(found, chosen);
      return true;
    },
  });

  const rows = [];
  for (let index = Math.max(from, 0); index < to; index++) {
    const found = row(index);
    rows.push(html`<div key=${found === undefined ? index : keyOf(found)} role="row" aria-rowindex=${index + 2}
      class=${`row${index === chosen ? " chosen" : ""}${found === undefined ? " waiting" : ""}${found?.rowClass ? ` ${found.rowClass}` : ""}`}
      aria-selected=${String(index === chosen)} onClick=${() => found !== undefined && choose(index)}
      onDblClick=${() => found !== undefined && onOpen?.(found, index)}>
      ${columns.map((column) => html`<div role="gridcell" class=${column.name} key=${column.name}>${found === undefined ? html`<i class="bone"></i>` : column.cell(found)}</div>`)}
    </div>`);
  }
  return html`<div class=${`table ${kind}`} ref=${scroller} onScroll=${scrolled} tabindex="0" role="grid" aria-label=${label} aria-rowcount=${total + 1}>
    <div role="rowgroup" class="head"><div role="row" class="row" aria-rowindex="1">
      ${columns.map((column) => html`<div role="columnheader" key=${column.name} class=${column.name} aria-sort=${!column.sort ? undefined : sort?.by !== column.sort ? "none" : sort.descending ? "descending" : "ascending"}>
        ${column.sort && onSort ? html`<button class="sort" onClick=${() => onSort(column.sort)}>${column.title}<span aria-hidden="true">${sort?.by === column.sort ? (sort.descending ? " ▼" : " ▲") : ""}</span></button>` : column.title}</div>`)}
    </div></div>
    <div role="rowgroup" class="rows" ref=${(element) => {
      if (!element) return;
      element.style.paddingTop = `${Math.max(from, 0) * ROW_PX}px`;
      element.style.paddingBottom = `${Math.max(0, total - to) * ROW_PX}px`;
    }}>${rows}</div>
  </div>`;
}

// ---------------------------------------------------------------- keyboard

const handlers = [];

/** Call functions for keys while the component is shown; the newest component comes first. */
export function useKeys(map) {
  const latest = useRef(map);
  latest.current = map;
  useEffect(() => {
    handlers.push(latest);
    return () => handlers.splice(handlers.indexOf(latest), 1);
  }, []);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = /** @type {HTMLElement} */ (event.target);
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || document.querySelector("dialog[open]");
  if (isTyping) {
    if (event.key === "Escape") target.blur();
    return;
  }
  for (let index = handlers.length - 1; index >= 0; index--) {
    const handle = handlers[index].current[event.key];
    if (handle && handle(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});

/** Input that `/` selects. */
export function Search({ value, onInput, placeholder, label, id = "search" }) {
  const input = useRef(null);
  useKeys({ "/": () => { input.current.focus(); input.current.select(); } });
  return html`<div class="search"><label class="unseen" for=${id}>${label}</label>
    <input id=${id} ref=${input} type="search" autocomplete="off" spellcheck=${false} placeholder=${placeholder} value=${value} onInput=${(event) => onInput(event.target.value)}
      onKeyDown=${(event) => { if (event.key === "Enter" || event.key === "ArrowDown") /** @type {HTMLElement | null} */ (document.querySelector(".table"))?.focus(); }} />
    <kbd aria-hidden="true">/</kbd></div>`;
}

/**
 * Text of a search, and the function that changes it. The address follows a moment later; what is
 * typed meanwhile stays.
 */
export function useSearch(query) {
  const [text, setText] = useState(query);
  const sent = useRef(query);
  const timer = useRef(0);
  useEffect(() => { if (query !== sent.current) setText(sent.current = query); }, [query]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const search = (value) => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ q: sent.current = value }), 30);
  };
  return [text, search];
}

/** Say a text to screen readers. */
export function announce(text) {
  document.getElementById("announce")?.replaceChildren(text);
}

/** Say a value to screen readers when it has changed; not the first one, nor what is not known. */
export function useAnnounced(value, say) {
  const last = useRef(undefined);
  useEffect(() => {
    if (value === undefined) return;
    if (last.current !== undefined) announce(say(value));
    last.current = value;
  }, [value]);
}

// ---------------------------------------------------------------- places

/** Place of the page: segments of its path, and its query. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  let segments;
  try {
    segments = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    segments = [];
  }
  return { segments, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** Address of a page below the hash. */
export function to(segments, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false);
  const text = new URLSearchParams(known).toString();
  return `#/${segments.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export const journalLink = (name, query) => to(["journals", ...name.split("/")], query);
export const shardLink = (application, id) => to(["shards", application || "-", ...id.split("/")]);

/** Change the query of the page without a new entry of the history. */
export function setQuery(changes) {
  const { segments, query } = place();
  history.replaceState(null, "", to(segments, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Scroll what is chosen into view, where there is no room for all. */
export function useInView(selector, key) {
  useEffect(() => document.querySelector(selector)?.scrollIntoView({ block: "nearest", inline: "nearest" }), [key]);
}

export function Tabs({ tabs, current, onChoose, label }) {
  useInView('[role=tab][aria-selected="true"]', current);
  return html`<div class="tabs" role="tablist" aria-label=${label}>${tabs.map(([name, title]) => html`<button key=${name} role="tab" id=${`tab-${name}`}
    aria-selected=${String(name === current)} aria-controls="panel" tabindex=${name === current ? 0 : -1} onClick=${() => onChoose(name)}
    onKeyDown=${(event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const index = tabs.findIndex(([each]) => each === name) + step;
      const next = tabs[(index + tabs.length) % tabs.length][0];
      onChoose(next);
      requestAnimationFrame(() => document.getElementById(`tab-${next}`)?.focus());
    }}>${title}</button>`)}</div>`;
}

/** Name in pieces, each a link to the journals below it. */
export function Path({ name }) {
  const pieces = name.split("/");
  return html`<span class="path">${pieces.map((piece, index) => (index === pieces.length - 1 ? html`<b key=${index}>${piece}</b>`
    : html`<${Fragment} key=${index}><a href=${to(["journals"], { q: `${pieces.slice(0, index + 1).join("/")}/` })}>${piece}</a><span class="dim">/</span><//>`))}</span>`;
}
