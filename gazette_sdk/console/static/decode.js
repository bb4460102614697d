// Content of journals to messages: framings, UUIDs, and what a transaction makes of a message.
//
// Pure functions and small machines without the page: `node --test` runs them.

const utf8 = new TextDecoder("utf-8");
const strict = new TextDecoder("utf-8", { fatal: true });

export const SEEK_BYTES = 64 * 1024;
/** Longest frame that is put together; more of it is cut off. */
const FRAME_BYTES_MAX = 16 * 1024 * 1024;

// ---------------------------------------------------------------- UUIDs

export const CONTINUE = 1;
export const ACKNOWLEDGE = 2;
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/i;
/** Steps of 100 ns from 1582-10-15 to 1970-01-01. */
const EPOCH = 122192928000000000n;

/** Parts of a message's UUID of version 1, or null: time in ms, producer, clock and flags. */
export function parseUuid(text) {
  if (typeof text !== "string" || !UUID.test(text)) return null;
  const low = BigInt(`0x${text.slice(0, 8)}`);
  const middle = BigInt(`0x${text.slice(9, 13)}`);
  const high = BigInt(`0x${text.slice(15, 18)}`);
  const sequence = parseInt(text.slice(19, 23), 16) & 0x3fff;
  const stamp = (high << 48n) | (middle << 32n) | low;
  return {
    time: Number((stamp - EPOCH) / 10n) / 1000,
    producer: text.slice(24).toLowerCase(),
    clock: (stamp << 4n) | BigInt(sequence >> 10),
    flags: sequence & 0x3ff,
  };
}

/** Text of 16 bytes as a UUID. */
export function uuidText(bytes) {
  const hex = toHex(bytes);
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`;
}

export function toHex(bytes) {
  let text = "";
  for (const byte of bytes) text += byte.toString(16).padStart(2, "0");
  return text;
}

// ---------------------------------------------------------------- framings

const LINE = 10;
const QUOTE = 34;
const MAGIC = [0x66, 0x33, 0x93, 0x36];
const HEX_ROW = 16;

/**
 * Kind of a content type: json, csv, fixed, log (frames, with content of files between them), or
 * hex for any other.
 */
export function kindOf(contentType) {
  switch ((contentType || "").split(";")[0].trim()) {
    case "application/x-ndjson": return "json";
    case "text/csv": return "csv";
    case "application/x-protobuf-fixed": return "fixed";
    case "application/x-gazette-recoverylog": return "log";
    default: return "hex";
  }
}

/**
 * Cutter of content into frames. With `isMiddle` the content before the next frame is passed over.
 *
 * `push(bytes, offset)` returns frames {begin, end, bytes}. After a gap it begins anew.
 */
export class Cutter {
  constructor(kind, isMiddle = false) {
    this.kind = kind;
    this.isMiddle = isMiddle && kind !== "hex";
    this.rest = new Uint8Array(0);
    this.offset = 0;
  }

  push(bytes, offset) {
    if (this.rest.length && this.offset + this.rest.length === offset) {
      const joined = new Uint8Array(this.rest.length + bytes.length);
      joined.set(this.rest);
      joined.set(bytes, this.rest.length);
      this.rest = joined;
    } else {
      this.rest = bytes;
      this.offset = offset;
    }
    let at = this.isMiddle ? this.#skipped() : 0;
    if (at < 0) return [];
    const frames = [];
    for (;;) {
      const end = this.#end(at);
      if (end < 0) break;
      // A copy: a part of a chunk would keep all of it in memory.
      frames.push({ begin: this.offset + at, end: this.offset + end, bytes: this.rest.slice(at, end) });
      at = end;
    }
    this.rest = this.rest.length - at > FRAME_BYTES_MAX ? new Uint8Array(0) : this.rest.slice(at);
    this.offset += at;
    return frames;
  }

  /** Index of the next frame's begin, or -1 where it is not there yet. */
  #skipped() {
    let at;
    if (this.kind === "fixed" || this.kind === "log") at = nextMagic(this.rest, 0);
    else at = this.rest.indexOf(LINE) + 1 || -1;
    if (at >= 0) this.isMiddle = false;
    return at;
  }

  #end(at) {
    const { rest } = this;
    if (at >= rest.length) return -1;
    if (this.kind === "json") return rest.indexOf(LINE, at) + 1 || -1;
    if (this.kind === "csv") return csvEnd(rest, at);
    if (this.kind === "fixed" || this.kind === "log") return fixedEnd(rest, at);
    return Math.min(at + HEX_ROW, rest.length);
  }
}

function csvEnd(bytes, at) {
  for (let isQuoted = false; at < bytes.length; at++) {
    if (bytes[at] === QUOTE) isQuoted = !isQuoted;
    else if (bytes[at] === LINE && !isQuoted) return at + 1;
  }
  return -1;
}

/** End of a frame of magic word and length; where no frame begins, that of what is no frame. */
function fixedEnd(bytes, at) {
  if (bytes.length - at < 8) return -1;
  if (!MAGIC.every((byte, index) => bytes[at + index] === byte)) {
    const next = nextMagic(bytes, at + 1);
    return next < 0 ? -1 : next;
  }
  const length = new DataView(bytes.buffer, bytes.byteOffset + at + 4, 4).getUint32(0, true);
  const end = at + 8 + length;
  return end <= bytes.length ? end : -1;
}

function nextMagic(bytes, from) {
  for (let at = bytes.indexOf(MAGIC[0], from); at >= 0; at = bytes.indexOf(MAGIC[0], at + 1)) {
    if (MAGIC.every((byte, index) => bytes[at + index] === byte)) return at;
  }
  return -1;
}

// ---------------------------------------------------------------- messages

/**
 * Message of a frame: {begin, end, text, uuid, producer, time, clock, flags, size}.
 *
 * `text` is one line. `value` makes an object of it for filters.
 */
export function decode(kind, frame, types) {
  const message = { begin: frame.begin, end: frame.end, size: frame.end - frame.begin, kind, types, uuid: "",
    text: "", error: "", bytes: frame.bytes, time: null, producer: "", clock: null, flags: 0, state: "" };
  if (kind === "json" || kind === "csv") {
    message.text = utf8.decode(frame.bytes).replace(/\r?\n$/, "");
    message.bytes = null; // the text has all of it
    message.uuid = kind === "json" ? jsonUuid(message) : parseCsv(message.text)[0] || "";
  } else if (kind === "fixed" || kind === "log") {
    const isFrame = MAGIC.every((byte, index) => frame.bytes[index] === byte);
    const fields = isFrame ? wireFields(frame.bytes.subarray(8), 0, types) : null;
    message.text = fields ? wireText(fields) : toHex(frame.bytes.subarray(isFrame ? 8 : 0, 512));
    if (!isFrame && kind === "log") message.text = `content of a file, ${frame.bytes.length} bytes: ${message.text.slice(0, 128)}…`;
    else if (!isFrame) message.error = "no frame";
    message.uuid = fields ? wireUuid(fields) : "";
  } else {
    message.text = hexRow(frame.bytes);
  }
  const parts = parseUuid(message.uuid);
  if (parts) Object.assign(message, parts);
  else message.uuid = "";
  return message;
}

const JSON_UUID = /"uuid"\s*:\s*"([0-9a-fA-F-]{36})"/i;

function jsonUuid(message) {
  try {
    const value = JSON.parse(message.text);
    if (value === null || typeof value !== "object") return "";
    const found = value.UUID ?? value.uuid ?? value._meta?.uuid;
    return typeof found === "string" ? found : "";
  } catch {
    message.error = "no JSON";
    return JSON_UUID.exec(message.text)?.[1] || "";
  }
}

/** Object of a message: of JSON as it is, of CSV its columns by number, of others field numbers. */
export function valueOf(message) {
  try {
    if (message.kind === "json") return JSON.parse(message.text);
    if (message.kind === "csv") return parseCsv(message.text);
    if (message.clock === null && message.kind === "log" && message.text.startsWith("content")) return message.text;
    if ((message.kind === "fixed" || message.kind === "log") && message.bytes) return wireObject(wireFields(message.bytes.subarray(8), 0, message.types) || []);
  } catch { /* no value */ }
  return message.text;
}

/** Columns of a line of CSV. */
export function parseCsv(line) {
  const columns = [];
  for (let at = 0; ; at++) {
    let column = "";
    if (line[at] === '"') {
      let end = at + 1;
      while (end < line.length && (line[end] !== '"' || line[++end] === '"')) column += line[end++];
      at = end;
    }
    const end = line.indexOf(",", at);
    columns.push(column + line.slice(at, end < 0 ? undefined : end));
    if (end < 0) return columns;
    at = end;
  }
}

function hexRow(bytes) {
  const hex = toHex(bytes).replace(/../g, "$& ").padEnd(HEX_ROW * 3);
  return hex + Array.from(bytes, (byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
}

// ---------------------------------------------------------------- protobuf without a schema

/**
 * Fields {number, value} of a protobuf message, or null if the bytes are none. With {root, types} of
 * a descriptor set `number` is a name where that has one: types[root][number] is [name, type, of].
 */
export function wireFields(bytes, depth = 0, { root, types } = /** @type {any} */ ({})) {
  const fields = [];
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      if (at >= bytes.length) return null;
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
    return null;
  };
  const scalar = (type, kind, of) => {
    if (type === 0) {
      const value = varint();
      if (value === null || !kind) return value;
      if (kind > 16) return (value >> 1n) ^ -(value & 1n);
      return kind === 8 ? value > 0n : types[of]?.[String(value)] ?? BigInt.asIntN(kind === 4 ? 65 : 64, value);
    }
    const size = type === 1 ? 8 : 4;
    if (at + size > bytes.length) return null;
    const view = new DataView(bytes.buffer, bytes.byteOffset + at, size);
    at += size;
    const float = size === 8 ? view.getFloat64(0, true) : view.getFloat32(0, true);
    if (kind < 3) return float;
    const integer = size === 8 ? view.getBigUint64(0, true) : view.getUint32(0, true);
    if (!kind) return likelyNumber(float, integer);
    return kind > 14 ? BigInt.asIntN(size * 8, BigInt(integer)) : integer;
  };
  while (at < bytes.length) {
    const tag = varint();
    if (tag === null || tag >> 3n === 0n || tag > 0xffffffffn) return null;
    const [number, kind, of] = types?.[root]?.[String(tag >> 3n)] || [Number(tag >> 3n)];
    const type = Number(tag & 7n);
    if (![0, 1, 2, 5].includes(type)) return null;
    let end = at + 1;
    const isPacked = type === 2 && kind && ![9, 11, 12].includes(kind);
    if (type === 2) {
      const length = varint();
      if (length === null || at + Number(length) > bytes.length) return null;
      end = at + Number(length);
    }
    if (type === 2 && !isPacked) {
      const content = bytes.subarray(at, at = end);
      const inner = kind === 11 && wireFields(content, depth + 1, { root: of, types });
      fields.push({ number, value: inner ? { fields: inner } : lengthDelimited(content, depth) });
    } else {
      while (at < end) {
        const value = scalar(isPacked ? { 1: 1, 6: 1, 16: 1, 2: 5, 7: 5, 15: 5 }[kind] || 0 : type, kind, of);
        if (value === null) return null;
        fields.push({ number, value });
      }
    }
  }
  return fields;
}

/** Number of a fixed width: a float where it looks like one, else an integer. */
function likelyNumber(float, integer) {
  const size = Math.abs(float);
  return float === 0 || (size > 1e-6 && size < 1e15) ? float : integer;
}

function lengthDelimited(bytes, depth) {
  if (bytes.length === 16 && parseUuid(uuidText(bytes))) return { uuid: uuidText(bytes) };
  let text = null;
  try {
    text = strict.decode(bytes);
  } catch { /* no text */ }
  // eslint-disable-next-line no-control-regex
  if (text !== null && !/[\x00-\x08\x0b\x0c\x0e-\x1f]/.test(text)) return { text };
  const fields = depth < 8 && bytes.length ? wireFields(bytes, depth + 1) : null;
  return fields ? { fields } : { hex: toHex(bytes.subarray(0, 1024)) };
}

function wireObject(fields) {
  const result = {};
  for (const { number, value } of fields) {
    const one = typeof value === "bigint" ? Number(value)
      : value.fields ? wireObject(value.fields) : value.text ?? value.uuid ?? value.hex ?? value;
    if (number in result) result[number] = /** @type {any[]} */ ([]).concat(result[number], [one]);
    else result[number] = one;
  }
  return result;
}

function wireText(fields) {
  return fields.map(({ number, value }) => {
    if (typeof value !== "object") return `${number}: ${value}`;
    if (value.fields) return `${number} {${wireText(value.fields)}}`;
    return `${number}: ${value.text !== undefined ? JSON.stringify(value.text) : value.uuid || `0x${value.hex}`}`;
  }).join("  ");
}

function wireUuid(fields) {
  return fields.find(({ value }) => value.uuid || (value.text && parseUuid(value.text)))?.value.uuid
    || fields.find(({ value }) => value.text && parseUuid(value.text))?.value.text || "";
}

// ---------------------------------------------------------------- transactions

export const OUTSIDE = "outside";
export const PENDING = "pending";
export const COMMITTED = "committed";
export const ROLLED_BACK = "rolled back";
export const DUPLICATE = "duplicate";
export const ACK_COMMIT = "acknowledges";
export const ACK_ROLLBACK = "rolls back";

/** Producers of which a state is kept. */
const PRODUCERS_MAX = 10_000;

/**
 * Sequencer of one journal: sets `state` of messages, also of earlier ones once their transaction
 * ends. Transactions that began before the first message are seen in part.
 */
export class Sequencer {
  constructor() {
    this.producers = new Map();
  }

  /** Set the state of the next message; return True if it changed earlier ones. */
  push(message) {
    if (message.clock === null) {
      message.state = OUTSIDE;
      return false;
    }
    const found = this.producers.get(message.producer) || { min: -1n, max: -1n, open: [] };
    this.producers.delete(message.producer);
    this.producers.set(message.producer, found);
    if (this.producers.size > PRODUCERS_MAX) this.producers.delete(this.producers.keys().next().value);
    const { clock, flags } = message;
    if (flags === ACKNOWLEDGE) return acknowledge(found, message);
    if (clock <= found.min || (flags === CONTINUE && found.open.length && clock <= found.max)) {
      message.state = DUPLICATE;
      return false;
    }
    if (flags === CONTINUE) {
      message.state = PENDING;
      message.isFirst = found.open.length === 0;
      found.max = clock;
      found.open.push(message);
      return false;
    }
    const isChanged = found.open.length > 0;
    for (const one of found.open) one.state = ROLLED_BACK;
    found.open = [];
    found.min = found.max = clock;
    message.state = OUTSIDE;
    return isChanged;
  }
}

function acknowledge(found, message) {
  const { clock } = message;
  const isRollback = clock <= found.min;
  const { open } = found;
  found.open = [];
  message.state = isRollback ? (open.length ? ACK_ROLLBACK : DUPLICATE) : ACK_COMMIT;
  for (const one of open) {
    // An acknowledgement of an earlier clock commits what is up to it.
    one.state = isRollback || one.clock > clock ? ROLLED_BACK : COMMITTED;
    one.acknowledged = message.time;
  }
  found.min = found.max = clock;
  return open.length > 0;
}

// ---------------------------------------------------------------- filters

const FILTER = /^\s*(\S+?)\s*(!=|≠|>=|<=|=|<|>|~|\bcontains\b)\s*(.+?)\s*$/;

/**
 * Function of a message for an expression `path op value`; null for an empty one.
 * Throws an Error that says what is wrong with it.
 */
export function parseFilter(text) {
  if (!text.trim()) return null;
  const found = FILTER.exec(text);
  if (!found) {
    if (/\s/.test(text.trim()) || !/^["\w]/.test(text.trim())) throw new Error('write `path op value`, such as customer = "ada"');
    const lower = text.trim().toLowerCase();
    return (message) => message.text.toLowerCase().includes(lower);
  }
  const [, path, operator, right] = found;
  const keys = path.replace(/^\$?\.?/, "").split(".");
  const value = /^".*"$|^'.*'$/.test(right) ? right.slice(1, -1) : right;
  const number = value === right && right !== "" ? Number(right) : NaN;
  const compare = comparison(operator, value, number);
  return (message) => compare(keys.reduce((at, key) => (at === null || at === undefined ? undefined : at[key]), valueOf(message)));
}

function comparison(operator, value, number) {
  const text = (found) => (typeof found === "object" ? JSON.stringify(found) : String(found));
  const isEqual = (found) => (typeof found === "number" ? found === number : text(found) === value);
  switch (operator) {
    case "=": return (found) => found !== undefined && isEqual(found);
    case "!=": case "≠": return (found) => found === undefined || !isEqual(found);
    case "contains": return (found) => found !== undefined && text(found).toLowerCase().includes(value.toLowerCase());
    case "~": {
      const pattern = new RegExp(value);
      return (found) => found !== undefined && pattern.test(text(found));
    }
    default: return (found) => {
      if (found === undefined || found === null) return false;
      const [left, right] = typeof found === "number" && !Number.isNaN(number) ? [found, number] : [text(found), value];
      return { "<": left < right, ">": left > right, "<=": left <= right, ">=": left >= right }[operator];
    };
  }
}
