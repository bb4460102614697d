// The console: its frame, its places, sign-in, themes and keys. Pages are loaded when they are opened.
import { render } from "./vendor/preact.js";
import { useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import { COMPONENT, claimsOf, hasKeys, setToken, takeTokenOfAddress, useToken } from "./api.js";
import { Empty, Facts, Skeleton, clock, html, place, useDialog, useInView, useKeys } from "./parts.js";

/** Pages: name, title, key, and what loads it. @type {[string, string, string, () => Promise<any>][]} */
const PAGES = [
  ["", "Overview", "o", () => import("./cluster.js").then((module) => module.Overview)],
  ["journals", "Journals", "j", () => import("./journals.js").then((module) => module.Journals)],
  ["shards", "Shards", "s", () => import("./shards.js").then((module) => module.Shards)],
  ["brokers", "Brokers", "b", () => import("./cluster.js").then((module) => module.Brokers)],
  ["stores", "Stores", "t", () => import("./cluster.js").then((module) => module.Stores)],
  ["events", "Events", "e", () => import("./cluster.js").then((module) => module.Events)],
];
const ITEMS = {
  journals: () => import("./journals.js").then((module) => module.Journal),
  shards: () => import("./shards.js").then((module) => module.Shard),
};

/** Pages that a process of a consumer answers for. */
const SHOWN = COMPONENT === "consumer" ? PAGES.filter(([name]) => name === "shards") : PAGES;
if (COMPONENT === "consumer" && place().segments.length === 0 && !location.hash.startsWith("#token=")) {
  history.replaceState(null, "", "#/shards");
}

function usePlace() {
  const [at, setAt] = useState(place());
  useEffect(() => {
    const change = () => {
      takeTokenOfAddress();
      setAt(place());
    };
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return at;
}

function useLoaded(load, key) {
  const [state, setState] = useState({ key: null, Page: null, error: null });
  useEffect(() => {
    let isWanted = true;
    load().then((Page) => isWanted && setState({ key, Page, error: null }), (error) => isWanted && setState({ key, Page: null, error }));
    return () => { isWanted = false; };
  }, [key]);
  return state.key === key ? state : { Page: null, error: null };
}

// ---------------------------------------------------------------- theme

const THEME_KEY = "gazette-theme";
const THEMES = [["", "System", "◐"], ["light", "Light", "☀"], ["dark", "Dark", "☾"]];

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  if (name) localStorage.setItem(THEME_KEY, name);
  else localStorage.removeItem(THEME_KEY);
}
setTheme(localStorage.getItem(THEME_KEY) || "");

function Theme() {
  const [name, setName] = useState(document.documentElement.dataset.theme);
  const index = Math.max(0, THEMES.findIndex(([each]) => each === name));
  const change = () => {
    const [next] = THEMES[(index + 1) % THEMES.length];
    setTheme(next);
    setName(next);
  };
  useKeys({ d: change });
  return html`<button class="icon" onClick=${change} title=${`Theme: ${THEMES[index][1]} (d)`} aria-label=${`Theme: ${THEMES[index][1]}. Change it`}><span aria-hidden="true">${THEMES[index][2]}</span></button>`;
}

// ---------------------------------------------------------------- sign-in

function SignIn() {
  const token = useToken();
  const [dialog, open, close] = useDialog();
  const [isKept, setKept] = useState(false);
  const field = useRef(null);
  const claims = token ? claimsOf(token) : null;
  const isExpired = claims?.expires && claims.expires * 1000 < Date.now();
  const label = !token ? "Sign in" : claims ? `${claims.subject || "token"} · ${claims.capabilities.join(" ") || "no capability"}` : "token";
  useEffect(() => {
    addEventListener("gazette-sign-in", open);
    return () => removeEventListener("gazette-sign-in", open);
  }, []);
  const use = (event) => {
    event.preventDefault();
    setToken(field.current.value, isKept);
    field.current.value = "";
    close();
  };
  return html`${hasKeys() && html`<button class=${`who${isExpired ? " expired" : ""}`} onClick=${open} title=${label}>${isExpired ? "token expired" : label}</button>`}
    <dialog ref=${dialog} aria-labelledby="sign-in"><form method="dialog" onSubmit=${use}>
      <h2 id="sign-in">Sign in</h2>
      <p>The console has no rights of its own. It sends your token with each call, and the cluster decides. A cluster without keys needs none.</p>
      ${claims && html`<${Facts} of=${[["Subject", claims.subject || "none"], ["May", (claims.capabilities.join(", ") || "nothing") + (claims.isNarrow ? ", of what its selector includes" : "")],
        ["Until", claims.expires ? clock(claims.expires * 1000, false) : "no end"]]} />`}
      <label>Token<input ref=${field} type="password" autocomplete="off" spellcheck=${false} placeholder="eyJ…" /></label>
      <label class="check"><input type="checkbox" checked=${isKept} onChange=${(event) => setKept(event.target.checked)} /> Keep it in this tab when the page is loaded again</label>
      <p class="dim">${"A terminal with the keys prints an address with a token: "}<code>gazctl console</code></p>
      <div class="buttons"><button class="primary" type="submit">Use it</button>${token && html`<button type="button" onClick=${() => { setToken("", false); close(); }}>Sign out</button>`}<button type="button" onClick=${close}>Cancel</button></div>
    </form></dialog>`;
}

// ---------------------------------------------------------------- keys

/** @type {[string, string][]} */
const KEYS = [
  ["/", "search or filter"], ["j  k  ↓  ↑", "next, previous row"], ["Enter", "open the row"], ["Esc", "leave a field, close a panel"],
  ...SHOWN.map(([, title, key]) => /** @type {[string, string]} */ ([`g ${key}`, title])), ["d", "change the theme"], ["?", "these keys"],
];

function Help() {
  const [dialog, open, close] = useDialog();
  const isGoing = useRef(0);
  useKeys({
    "?": open,
    g: () => { isGoing.current = Date.now(); },
    ...Object.fromEntries(SHOWN.map(([name, , key]) => [key, () => {
      if (Date.now() - isGoing.current > 1200) return false;
      isGoing.current = 0;
      location.hash = `#/${name}`;
      return true;
    }])),
  });
  return html`<button class="icon" onClick=${open} title="Keys (?)" aria-label="Show the keys"><span aria-hidden="true">?</span></button>
    <dialog ref=${dialog} aria-labelledby="keys"><h2 id="keys">Keys</h2>
      <dl class="keys">${KEYS.map(([key, what]) => html`<dt key=${key}>${key.split(/ +/).map((one) => html`<kbd>${one}</kbd>`)}</dt><dd>${what}</dd>`)}</dl>
      <div class="buttons"><button class="primary" onClick=${close}>Close</button></div></dialog>`;
}

// ---------------------------------------------------------------- frame

function Content({ at }) {
  const [error, reset] = useErrorBoundary();
  const [name = "", ...rest] = at.segments;
  const found = SHOWN.find(([each]) => each === name) || (ITEMS[name] && rest.length ? [name, "", "", null] : null);
  const load = found && (rest.length && ITEMS[name] ? ITEMS[name] : found[3]);
  const key = found ? `${name}${rest.length && ITEMS[name] ? "/" : ""}` : "";
  const { Page, error: failed } = useLoaded(load || (() => Promise.resolve(Missing)), key);
  useLayoutEffect(() => { if (error) reset(); }, [key, rest.join("/")]);
  if (error || failed) {
    return html`<${Empty} glyph="✖" title="This page has failed"><p class="mono">${String((error || failed).message)}</p><button onClick=${() => location.reload()}>Load it again</button><//>`;
  }
  return Page ? html`<${Page} key=${rest.join("/")} at=${at} />` : html`<${Skeleton} rows=${8} />`;
}

function Missing() {
  return html`<${Empty} title="There is no such page"><p><a href="#/">Go to the overview</a></p><//>`;
}

function App() {
  const at = usePlace();
  const [name = ""] = at.segments;
  const main = useRef(null);
  const isFirst = useRef(true);
  useInView("nav [aria-current]", name);
  useEffect(() => {
    const title = SHOWN.find(([each]) => each === name)?.[1] || "Gazette";
    document.title = `${at.segments.slice(1).join("/") || title} · Gazette`;
    if (isFirst.current) isFirst.current = false;
    else main.current.focus({ preventScroll: true });
  }, [at.segments.join("/")]);
  return html`<a class="skip" href=${location.hash || "#/"} onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header><a class="brand" href="#/" aria-label="Gazette, overview"><svg viewBox="0 0 16 16" aria-hidden="true"><rect width="16" height="16" rx="4" /><path d="M4 5h8M4 8h8M4 11h5" /></svg><span>gazette</span></a>
      <nav aria-label="Pages">${SHOWN.map(([each, title]) => html`<a key=${each} href=${`#/${each}`} aria-current=${each === name ? "page" : undefined}>${title}</a>`)}</nav>
      <div class="tools"><${Help} /><${Theme} /><${SignIn} /></div></header>
    <main ref=${main} tabindex="-1"><${Content} at=${at} /></main>`;
}

takeTokenOfAddress();
render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
