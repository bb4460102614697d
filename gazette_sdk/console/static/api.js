// Calls of the cluster: JSON by POST or GET, streams of JSON lines, and content of journals.
//
// All URLs are relative to the directory that holds console/, so that a proxy may add a prefix.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";

const ROOT = new URL("../", location.href.split(/[?#]/)[0]);
const TOKEN_KEY = "gazette-token";
const TIMEOUT_MS = 15_000;

const stated = (name) => document.querySelector(`meta[name=${name}]`)?.getAttribute("content");

/** Server of the page: broker, consumer, or cluster for one with the calls of both. */
export const COMPONENT = stated("component");

/** True if the server passes changes on without a token; the cluster may ask for one nevertheless. */
const TAKES_ANY_CHANGE = stated("changes") === "any";

const FEATURES = stated("features") || "";
const HAS_MASKS = FEATURES.includes("masks");

/** Failure of a call. `status` is that of HTTP; 0 where no answer came. */
export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// ---------------------------------------------------------------- token

let token = sessionStorage.getItem(TOKEN_KEY) || "";
let isRefused = false;
const watchers = new Set();

/** Take a token out of the fragment, and remove it from the address and the history. */
export function takeTokenOfAddress() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", `${location.pathname}#/`);
  setToken(decodeURIComponent(found[1]), false);
}

/** Use a token for all further calls. `isKept` keeps it until the tab is closed. */
export function setToken(text, isKept) {
  token = text.trim().replace(/^Bearer\s+/i, "");
  if (isKept && token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
  for (const watch of watchers) watch();
}

/** True if a token is used, or a call was refused for the lack of one. */
export const hasKeys = () => Boolean(token) || isRefused;

/** The token: a part of the keys of cached answers. */
export function useToken() {
  const [, update] = useState(0);
  useEffect(() => {
    const watch = () => update((count) => count + 1);
    watchers.add(watch);
    return () => watchers.delete(watch);
  }, []);
  return token;
}

/** @type {[number, string][]} */
const CAPABILITIES = [[2, "LIST"], [4, "APPLY"], [8, "READ"], [16, "APPEND"], [32, "REPLICATE"]];

/** Claims of a token as it states them; the servers verify them. */
export function claimsOf(text) {
  try {
    const claims = JSON.parse(atob(text.split(".")[1].replace(/-/g, "+").replace(/_/g, "/")));
    const names = CAPABILITIES.filter(([bit]) => claims.cap & bit).map(([, name]) => name);
    return { subject: claims.sub || "", capabilities: names, expires: claims.exp || 0,
      isNarrow: Boolean(claims.sel && JSON.stringify(claims.sel).length > 4) };
  } catch {
    return null;
  }
}

/**
 * True if a change may be offered: a token states APPLY, or there is none and the cluster answers.
 * The servers decide when it is made.
 */
export function mayApply(text) {
  return text ? Boolean(claimsOf(text)?.capabilities.includes("APPLY")) : TAKES_ANY_CHANGE;
}

function headers(more) {
  return token ? { ...more, Authorization: `Bearer ${token}` } : { ...more };
}

// ---------------------------------------------------------------- calls

async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const isLate = error.name === "TimeoutError";
    throw new CallError(0, isLate ? "no answer within 15 s" : "the server does not answer");
  }
  if (response.ok) return response;
  let text = await response.text();
  try {
    const parsed = JSON.parse(text);
    text = parsed.message || parsed.error?.message || text;
  } catch { /* a plain text */ }
  if (response.status === 401 && !isRefused) {
    isRefused = true;
    for (const watch of watchers) watch();
  }
  throw new CallError(response.status, text.trim() || response.statusText);
}

function options(body, signal) {
  if (body === undefined) return { headers: headers(), signal };
  return { method: "POST", headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body), signal };
}

/** Path of a call at another member, such as a process of a consumer. */
export function atMember(member, path) {
  if (!member) return path;
  return path.replace(/^v1\//, `v1/at/${encodeURIComponent(member.zone)}/${encodeURIComponent(member.suffix)}/`);
}

/** Make a call of one answer; by GET without a body. */
export async function call(path, body, signal) {
  const limits = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  const response = await request(path, options(body, AbortSignal.any(limits)));
  return response.json();
}

/** Yield the messages of a stream of JSON lines. `onOpen` is called once it is answered. */
export async function* stream(path, body, signal, onOpen) {
  const response = await request(path, options(body, signal));
  onOpen?.();
  for await (const line of linesOf(response)) yield unwrap(line);
}

async function* linesOf(response) {
  const reader = bodyOf(response).pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop() || "";
      for (const line of lines) if (line) yield JSON.parse(line);
    }
    if (rest.trim()) yield JSON.parse(rest);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "the stream broke off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Body of an answer: there is one, as the status of none forbids it. */
const bodyOf = (response) => /** @type {ReadableStream<any>} */ (response.body);

function unwrap(line) {
  if (line.error) throw new CallError(line.error.httpCode || 500, line.error.message);
  return line.result;
}

/** First message of a stream, or undefined. */
export async function first(path, body, signal) {
  for await (const message of stream(path, body, signal)) return message;
  return undefined;
}

// ---------------------------------------------------------------- journals

/** Relative URL of a journal. */
export function journalPath(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

/** URL of a journal as a terminal needs it. */
export function journalUrl(name) {
  return new URL(journalPath(name), ROOT).href;
}

/** Offsets of a journal: its end, and the first one that exists. */
export async function offsetsOf(name, signal) {
  const found = await first("v1/journals/read", { journal: name, offset: "0", metadataOnly: true, doNotProxy: false }, signal);
  if (!found) throw new CallError(0, "the broker ended the read");
  if (found.status !== "OK" && found.status !== "OFFSET_NOT_YET_AVAILABLE") {
    throw new CallError(0, found.status.toLowerCase().replace(/_/g, " "));
  }
  return { begin: Number(found.offset || 0), head: Number(found.writeHead || 0) };
}

/** URL of a call of the console itself about a journal. */
const ofConsole = (name, journal) => new URL(`${name}?journal=${encodeURIComponent(journal)}`, import.meta.url).href;

/** Names of the fields of a journal's protobuf messages. */
export const typesOf = async (name, signal) =>
  (FEATURES.includes("types") ? call(ofConsole("types", name), undefined, signal) : undefined);

/** Yield {offset, end, frames} of masked content, which is cut into messages. */
async function* masked(response) {
  const encoder = new TextEncoder();
  for await (const { begin, end, text } of linesOf(response)) {
    const frames = [{ begin, end, kind: text === undefined && "csv", bytes: encoder.encode(text ?? "•••") }];
    yield { offset: begin ?? end, end, frames: begin === undefined ? [] : frames };
  }
}

const RESERVED = /^(v1|debug)\/|^console(\/|$)/;

/** Yield {offset, bytes} of a journal, or its messages if they are masked. `block` waits at its end. */
export async function* content(name, offset, block, signal) {
  if (!HAS_MASKS && RESERVED.test(name)) {
    const body = { journal: name, offset: String(offset), block };
    for await (const message of stream("v1/journals/read", body, signal)) {
      if (!message.content) continue;
      yield { offset: Number(message.offset), bytes: Uint8Array.from(atob(message.content), (c) => c.charCodeAt(0)) };
    }
    return;
  }
  const query = `offset=${offset}${block ? "&block=true" : ""}`;
  const url = HAS_MASKS ? `${ofConsole("read", name)}&${query}` : `${journalPath(name)}?${query}`;
  const response = await request(url, { headers: headers(), signal });
  if (response.headers.has("X-Console-Masked")) return yield* masked(response);
  const range = /^bytes (\d+)-/.exec(response.headers.get("Content-Range") || "");
  let at = range ? Number(range[1]) : offset;
  const reader = bodyOf(response).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield { offset: at, bytes: value };
      at += value.length;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "the read broke off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---------------------------------------------------------------- hooks

/** Wait for a time, or until the signal. */
export function pause(ms, signal) {
  return /** @type {Promise<void>} */ (new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", done);
  }));
}

/** Run `work` again after each period while the page is visible. */
export function usePolling(work, everyMs, keys) {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const aborter = new AbortController();
    let timer = 0;
    const run = async () => {
      clearTimeout(timer);
      await work(aborter.signal);
      if (everyMs && !aborter.signal.aborted && !document.hidden) timer = setTimeout(run, everyMs);
    };
    const wake = () => { if (!document.hidden && everyMs) run(); };
    document.addEventListener("visibilitychange", wake);
    run();
    return () => {
      aborter.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
    };
  }, [...keys, everyMs, turn]);
  return () => setTurn((count) => count + 1);
}

/**
 * Answer of a call, made again each period. `path` of null makes none.
 * After a failure `data` is that of the last answer, and `error` says why it is old.
 *
 * @param {string | null} path
 * @param {object} [body]
 */
export function useCall(path, body, everyMs = 0) {
  return useAnswer(path && ((signal) => call(path, body, signal)), [path, body], everyMs);
}

/** The same of any function; `keys` says what it depends on. */
export function useAnswer(ask, keys, everyMs) {
  const used = useToken();
  const key = JSON.stringify([...keys, used, !ask]);
  const [state, setState] = useState(/** @type {Answer} */ ({ key: "", data: undefined, error: null, time: 0 }));
  const reload = usePolling(async (signal) => {
    if (!ask) return;
    try {
      const data = await ask(signal);
      if (!signal.aborted) setState({ key, data, error: null, time: Date.now() });
    } catch (error) {
      if (!signal.aborted) setState((old) => ({ ...(old.key === key ? old : { data: undefined, time: 0 }), key, error }));
    }
  }, everyMs, [key]);
  const current = state.key === key ? state : /** @type {Answer} */ ({ data: undefined, error: null, time: 0 });
  return { ...current, isLoading: Boolean(ask) && current.data === undefined && !current.error, reload };
}

/** @typedef {{key?: string, data: any, error: any, time: number}} Answer */

/** @typedef {{key: string, rows: Map<number, any>, total: number, states: object, application?: string, error: any, isLoading: boolean, time?: number}} Pages */

export const PAGE_ROWS = 100;

/**
 * Rows of a paged call, of which the visible ones are fetched.
 * Returns {rows: Map, total, states, error, show(first, last)}. Rows of an earlier query stay until
 * the first page of the new one is there.
 */
export function usePages(path, query, everyMs) {
  const used = useToken();
  const key = JSON.stringify([path, query, used]);
  const [range, setRange] = useState("0-0");
  const [state, setState] = useState(/** @type {Pages} */ ({ key: "", rows: new Map(), total: 0, states: {}, error: null, isLoading: true }));
  const latest = useRef(state);
  latest.current = state;
  const reload = usePolling(async (signal) => {
    if (!path) return;
    const [from, to] = range.split("-").map(Number);
    try {
      for (let page = from; page <= to; page++) {
        const answer = await call(path, { ...query, skip: page * PAGE_ROWS, limit: PAGE_ROWS }, signal);
        if (signal.aborted) return;
        const old = latest.current;
        const total = Number(answer.total || 0);
        const rows = old.key === key && old.total === total ? new Map(old.rows) : new Map();
        for (const found of rows.keys()) if (Math.abs(found - page * PAGE_ROWS) > 10 * PAGE_ROWS) rows.delete(found);
        (answer.rows || []).forEach((row, index) => rows.set(page * PAGE_ROWS + index, resolved(row, answer.members || [])));
        const next = { key, rows, total, states: answer.states || {}, application: answer.application, error: null, isLoading: false, time: Date.now() };
        latest.current = next;
        setState(next);
      }
    } catch (error) {
      if (!signal.aborted) setState((old) => ({ ...old, key, error, isLoading: false }));
    }
  }, everyMs, [key, range]);
  const show = (firstRow, lastRow) => {
    setRange(`${Math.floor(firstRow / PAGE_ROWS)}-${Math.floor(Math.max(firstRow, lastRow) / PAGE_ROWS)}`);
  };
  return { ...state, isStale: state.key !== key, show, reload };
}

/**
 * Applications, each with a process that answers for its shards. At a process of a consumer that
 * is the process itself.
 */
export function useApplications() {
  const isOwn = COMPONENT === "consumer";
  const members = useCall(isOwn ? null : "v1/cluster/members", undefined, 5000);
  if (isOwn) return { applications: [{ name: "", member: null }], members };
  const applications = new Map();
  for (const member of members.data?.members || []) {
    if (member.component === "broker") continue;
    const old = applications.get(member.component);
    if (!old || (old.error && !member.error)) applications.set(member.component, { name: member.component, member: member.id, error: member.error });
  }
  // The console by itself may have the address of a process that the brokers do not know.
  if (COMPONENT === "cluster" && !applications.size && (members.data || members.error)) return { applications: [{ name: "", member: null }], members };
  return { applications: [...applications.values()], members };
}

/** Name of a member. */
export function memberName(id) {
  return id ? `${id.zone}/${id.suffix}` : "";
}

/** Row with names of its members in place of indices. */
export function resolved(row, members) {
  const names = (row.members || []).map((index) => memberName(members[index]));
  const primary = row.primary === undefined || row.primary === null ? "" : memberName(members[row.primary]);
  return { ...row, memberNames: names, primaryName: primary, others: names.filter((name) => name !== primary) };
}

// ---------------------------------------------------------------- streams

const HIDDEN_MS = 30_000;

/** Call `start` when the tab is shown, and `stop` 30 s after it is hidden. Return what ends that. */
export function whileShown(start, stop) {
  let timer = 0;
  const watch = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(stop, HIDDEN_MS);
    else start();
  };
  document.addEventListener("visibilitychange", watch);
  watch();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", watch);
    stop();
  };
}

/**
 * Run `work` while this tab, and no other one of the browser, holds one of the names.
 * `onWait` is called if others hold all of them.
 */
export async function holding(names, signal, work, onWait) {
  if (!navigator.locks) return leasing(names, signal, work, onWait);
  const chosen = new AbortController();
  const timer = setTimeout(() => onWait?.(), 100);
  const hold = () => {
    if (chosen.signal.aborted) return undefined;
    clearTimeout(timer);
    chosen.abort();
    return work();
  };
  const either = AbortSignal.any([signal, chosen.signal]);
  try {
    await Promise.all(names.map((name) => navigator.locks.request(name, { signal: either }, hold).catch((error) => {
      if (error.name !== "AbortError") throw error;
    })));
  } finally {
    clearTimeout(timer);
  }
}

const LEASE_MS = 5000;

/** The same by leases in the browser's storage: pages by plain HTTP of another host have no locks. */
async function leasing(names, signal, work, onWait) {
  const me = crypto.getRandomValues(new Uint32Array(2)).join("-");
  const holder = (name) => {
    const [who, until] = (localStorage.getItem(name) || "").split(" ");
    return Number(until) > Date.now() ? who : "";
  };
  while (!signal.aborted) {
    const name = names.find((each) => !holder(each));
    const renew = () => localStorage.setItem(name, `${me} ${Date.now() + LEASE_MS}`);
    const leave = () => { if (holder(name) === me) localStorage.removeItem(name); };
    if (name) renew();
    else onWait?.();
    // Another tab may take it in the same moment.
    await pause(name ? 100 : 1000, signal);
    if (!name || holder(name) !== me) continue;
    const timer = setInterval(renew, LEASE_MS / 5);
    addEventListener("pagehide", leave);
    try {
      return signal.aborted ? undefined : await work();
    } finally {
      clearInterval(timer);
      removeEventListener("pagehide", leave);
      leave();
    }
  }
  return undefined;
}

/** Names that tabs with a live journal hold: a browser has six connections to a server, and calls need some. */
export const TAILS = ["gazette-tail-1", "gazette-tail-2", "gazette-tail-3"];

/**
 * Keep a stream open while the component is shown and its tab is, and begin again after failures:
 * `open(signal, begun)` runs until it fails or ends.
 */
function useStream(open, keys) {
  const [error, setError] = useState(null);
  useEffect(() => {
    let aborter = null;
    const run = async () => {
      if (aborter) return;
      const { signal } = (aborter = new AbortController());
      for (let waits = 0; !signal.aborted; waits++) {
        try {
          await open(signal, () => { waits = 0; setError(null); });
        } catch (failure) {
          if (signal.aborted) break;
          setError(failure);
          if (failure.status >= 400 && failure.status < 500 && failure.status !== 429) break;
        }
        await pause(Math.min(500 * 2 ** waits, 10_000), signal);
      }
    };
    return whileShown(run, () => { aborter?.abort(); aborter = null; });
  }, keys);
  return error;
}

const EVENTS_MAX = 500;
const IDS_MAX = 4 * EVENTS_MAX;

/**
 * Events of the cluster, newest last: {events, total, error}.
 *
 * One tab of the browser reads them, and passes them on to those with the same token. If it is
 * closed, another one reads on after the last id that it has: what comes twice is known by its id.
 */
export function useEvents() {
  const used = useToken();
  const [, update] = useState(0);
  const kept = useMemo(() => ({ events: /** @type {any[]} */ ([]), ids: new Set(), total: 0, timer: 0 }), [used]);
  const add = (events) => {
    const added = events.filter(({ id }) => !kept.ids.has(id));
    for (const { id } of added) kept.ids.add(id);
    for (const id of kept.ids) if (kept.ids.size > IDS_MAX) kept.ids.delete(id); else break;
    kept.events = [...kept.events, ...added].slice(-EVENTS_MAX);
    kept.total += added.length;
    kept.timer ||= setTimeout(() => { kept.timer = 0; update((turn) => turn + 1); }, 100);
    return added;
  };
  const error = useStream(async (signal, begun) => {
    // The name must not show the token.
    const name = `gazette-events${[...ROOT + used].reduce((sum, letter) => (Math.imul(sum, 31) + letter.charCodeAt(0)) | 0, 0)}`;
    const channel = new BroadcastChannel(name);
    let isReading = false;
    let isCurrent = false;
    const send = (events, isWhole) => channel.postMessage({ events, isWhole });
    channel.onmessage = ({ data }) => {
      if (data.events === null) {
        if (isReading) send(kept.events, true);
        return;
      }
      // What comes before all that the reading tab keeps would leave a gap.
      isCurrent ||= data.isWhole;
      if (!isCurrent) return;
      begun();
      add(data.events);
    };
    try {
      send(null);
      await holding([name], signal, async () => {
        const last = kept.events.at(-1)?.id;
        const begin = () => { begun(); isReading = isCurrent = true; send(kept.events, true); };
        for await (const event of stream(`v1/cluster/events${last ? `?after=${encodeURIComponent(last)}` : ""}`, undefined, signal, begin)) {
          const added = add([event]);
          if (added.length) send(added);
        }
      });
    } finally {
      channel.close();
    }
  }, [used]);
  return { ...kept, error };
}
