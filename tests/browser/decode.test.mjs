// Decoders of the console against the vectors of the SDK. Run by test_decode.py, by `node --test`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const d = await import(process.env.DECODE_URL);
const vectors = JSON.parse(readFileSync(process.env.VECTORS));
const bytes = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));
const text = (value) => new TextEncoder().encode(value);
const ZERO = 122192928000000000n;

test("UUIDs are taken apart as by the SDK", () => {
  assert.ok(vectors.uuid_build_and_parse.length > 3);
  for (const one of vectors.uuid_build_and_parse) {
    const found = d.parseUuid(one.uuid);
    assert.equal(found.producer, one.producer);
    assert.equal(String(found.clock), String(one.clock));
    assert.equal(found.flags, one.flags);
    assert.equal(d.uuidText(bytes(one.uuid.replaceAll("-", ""))), one.uuid);
    if (one.expect_uuid_time_unix) {
      const [seconds, nanos] = one.expect_uuid_time_unix;
      assert.ok(Math.abs(found.time - (seconds * 1000 + nanos / 1e6)) < 0.002, one.uuid);
    }
  }
  for (const one of vectors.uuid_parse) {
    const found = d.parseUuid(one.uuid);
    assert.equal(found.producer, one.expect_producer);
    assert.equal(String(found.clock), String(one.expect_clock));
    assert.equal(found.flags, one.expect_flags);
    if (one.expect_unix_100ns) assert.equal(found.time, Number(BigInt(one.expect_unix_100ns) / 10n) / 1000);
  }
  for (const bad of ["", "x", "c56a4180-65aa-42ec-a945-5fd21dec0538", "00000000-0000-0000-0000-000000000000"]) {
    assert.equal(d.parseUuid(bad), null, "it is of another version");
  }
});

test("fixed frames are cut as by the SDK, in pieces of any size", () => {
  for (const one of [...vectors.fixed_framing.encode.map((each) => each.expect_stream), ...vectors.fixed_framing.decode.map((each) => each.stream)]) {
    const stream = bytes(one);
    const whole = new d.Cutter("fixed").push(stream, 0).map(({ begin, end }) => [begin, end]);
    for (let size = 1; size < 9; size++) {
      const cutter = new d.Cutter("fixed");
      const found = [];
      for (let at = 0; at < stream.length; at += size) found.push(...cutter.push(stream.subarray(at, at + size), at));
      assert.deepEqual(found.at(-1)?.end, whole.at(-1)?.[1]);
      assert.deepEqual(found.filter(({ bytes: frame }) => frame[0] === 0x66 && frame[1] === 0x33).map(({ begin, end }) => [begin, end]),
        whole.filter(([begin]) => stream[begin] === 0x66 && stream[begin + 1] === 0x33));
    }
  }
  for (const { payloads_utf8: payloads, expect_stream: stream } of vectors.fixed_framing.encode) {
    const frames = new d.Cutter("fixed").push(bytes(stream), 100);
    assert.deepEqual(frames.map((frame) => Buffer.from(frame.bytes.subarray(8)).toString()), payloads);
    assert.equal(frames[0].begin, 100);
  }
  const desync = vectors.fixed_framing.decode.find((each) => each.source.includes("DesyncDetection"));
  const frames = new d.Cutter("fixed").push(bytes(desync.stream), 0);
  assert.deepEqual(frames.map(({ begin, end }) => [begin, end]), [[0, 6], [6, 34]]);
  assert.equal(d.decode("fixed", frames[0]).error, "no frame");
});

test("a read from the middle is cut at the next frame", () => {
  const lines = text('half"}\n{"a":1}\n{"a":2}\n');
  assert.deepEqual(new d.Cutter("json", true).push(lines, 50).map(({ begin }) => begin), [57, 65]);
  const stream = bytes(`0102033366${vectors.fixed_framing.encode[0].expect_stream}`);
  assert.equal(new d.Cutter("fixed", true).push(stream, 0)[0].begin, 5);
  const cutter = new d.Cutter("json", true);
  assert.deepEqual(cutter.push(text("no end of a line"), 0), []);
  assert.deepEqual(cutter.push(text("\nwhole\n"), 16).map(({ begin, end }) => [begin, end]), [[17, 23]]);
});

test("after a gap a frame begins anew", () => {
  const cutter = new d.Cutter("json");
  assert.equal(cutter.push(text('{"a":1}\n{"a"'), 0).length, 1);
  assert.deepEqual(cutter.push(text('{"b":1}\n'), 100).map(({ begin }) => begin), [100]);
});

test("CSV has quotes, and lines with newlines in them", () => {
  for (const { records, expect_stream_utf8: stream } of vectors.csv_framing.encode) {
    const frames = new d.Cutter("csv").push(text(stream), 0);
    assert.deepEqual(frames.map((frame) => d.parseCsv(d.decode("csv", frame).text)), records);
    assert.ok(d.decode("csv", frames[0]).error === "");
  }
  const [frame] = new d.Cutter("csv").push(text('a,"b\nc ""d""",,\n'), 0);
  assert.deepEqual(d.parseCsv(d.decode("csv", frame).text), ["a", 'b\nc "d"', "", ""]);
  for (const [line, columns] of [["", [""]], [",", ["", ""]], ['"a', ["a"]], ["a,b", ["a", "b"]]]) assert.deepEqual(d.parseCsv(line), columns);
});

test("protobuf without a schema is fields by number", () => {
  // 1: 150, 2: "ada", 3 {1: 1.5}, 4: a UUID of 16 bytes
  const uuid = "83fc2f95cc5f11e982aa010203040506";
  const payload = `089601${"12"}03616461${"1a"}09${"09"}000000000000f83f${"22"}10${uuid}`;
  const length = (payload.length / 2).toString(16).padStart(2, "0");
  const [frame] = new d.Cutter("fixed").push(bytes(`66339336${length}000000${payload}`), 0);
  const message = d.decode("fixed", frame);
  assert.equal(message.producer, "010203040506");
  assert.equal(message.text, '1: 150  2: "ada"  3 {1: 1.5}  4: 83fc2f95-cc5f-11e9-82aa-010203040506');
  assert.deepEqual(d.valueOf(message), { 1: 150, 2: "ada", 3: { 1: 1.5 }, 4: "83fc2f95-cc5f-11e9-82aa-010203040506" });
  assert.equal(d.wireFields(bytes("ff")), null);
  assert.equal(d.wireFields(bytes("0aff01")), null, "it ends within a field");
});

test("a descriptor set gives fields of protobuf their names and values", () => {
  const types = { root: "shop.Order", types: {
    "shop.Order": { 1: ["customer", 9], 2: ["items", 11, "shop.Item"], 3: ["state", 14, "shop.State"], 4: ["big", 4],
      5: ["less", 5], 6: ["isPaid", 8], 7: ["packed", 17], 8: ["fixed", 15], 9: ["float", 2], 10: ["pair", 16], 12: ["name", 9] },
    "shop.Item": { 1: ["cents", 18] }, "shop.State": { 1: "PAID" } } };
  const payload = [`0a03${"616461"}`, `1202${"0803"}`, "1801", "20ffffffffffffffffff01", "28ffffffffffffffffff01", "3001",
    "3a03020301", "45feffffff", "4d0000c03f", "5210feffffffffffffff0100000000000000", "5801", "6200"].join("");
  const [frame] = new d.Cutter("fixed").push(bytes(`66339336${(payload.length / 2).toString(16).padStart(2, "0")}000000${payload}`), 0);
  const message = d.decode("fixed", frame, types);
  assert.equal(message.text, 'customer: "ada"  items {cents: -2}  state: PAID  big: 18446744073709551615  less: -1  isPaid: true'
    + '  packed: 1  packed: -2  packed: -1  fixed: -2  float: 1.5  pair: -2  pair: 1  11: 1  name: ""');
  assert.deepEqual(d.valueOf(message).packed, [1, -2, -1]);
  assert.equal(d.parseFilter("items.cents < 0")(message), true);
  assert.equal(d.decode("fixed", frame, {}).text.slice(0, 12), '1: "ada"  2 ');
  for (const torn of ["3a02ffff", "42050000000000"]) assert.equal(d.wireFields(bytes(torn), 0, types), null, torn);
});

test("other content is rows of hexadecimal digits", () => {
  const frames = new d.Cutter("hex").push(text("a line of seventeen"), 32);
  assert.deepEqual(frames.map(({ begin, end }) => [begin, end]), [[32, 48], [48, 51]]);
  assert.match(d.decode("hex", frames[0]).text, /^61 20 6c .* a line of sevent$/);
});

test("a line that is no JSON is shown as it is", () => {
  const message = d.decode("json", { begin: 0, end: 5, bytes: text("oops\n") });
  assert.deepEqual([message.text, message.error, message.clock], ["oops", "no JSON", null]);
});

function uuidOf(producer, tick, flags) {
  const stamp = ZERO + BigInt(tick);
  const hex = stamp.toString(16).padStart(15, "0");
  return `${hex.slice(7)}-${hex.slice(3, 7)}-1${hex.slice(0, 3)}-${(0x8000 | flags).toString(16)}-${producer}`;
}

function states(...steps) {
  const sequencer = new d.Sequencer();
  const messages = steps.map(([producer, tick, flags]) => d.decode("json", { begin: 0, end: 1, bytes: text(`{"UUID":"${uuidOf(`0102030405${producer}`, tick, flags)}"}\n`) }));
  for (const message of messages) sequencer.push(message);
  return messages.map(({ state }) => state);
}

test("transactions are committed, rolled back, and pending", () => {
  assert.deepEqual(states(["06", 1, 0], ["06", 2, 0]), ["outside", "outside"]);
  assert.deepEqual(states(["06", 1, 1], ["07", 1, 0], ["06", 2, 1], ["06", 3, 2]), ["committed", "outside", "committed", "acknowledges"]);
  assert.deepEqual(states(["06", 1, 2], ["06", 2, 1], ["06", 1, 2]), ["acknowledges", "rolled back", "rolls back"]);
  assert.deepEqual(states(["06", 1, 1], ["07", 1, 1]), ["pending", "pending"]);
  assert.deepEqual(states(["06", 1, 1], ["06", 2, 1], ["06", 1, 2]), ["committed", "rolled back", "acknowledges"]);
});

test("messages that were written twice are duplicates", () => {
  assert.deepEqual(states(["06", 1, 0], ["06", 1, 0]), ["outside", "duplicate"]);
  assert.deepEqual(states(["06", 1, 1], ["06", 1, 1], ["06", 2, 2]), ["committed", "duplicate", "acknowledges"]);
  assert.deepEqual(states(["06", 1, 1], ["06", 2, 2], ["06", 2, 2]), ["committed", "acknowledges", "duplicate"]);
});

test("a message outside of transactions ends the producer's open one", () => {
  assert.deepEqual(states(["06", 1, 1], ["06", 2, 0]), ["rolled back", "outside"]);
});

test("filters compare what a path has", () => {
  const message = d.decode("json", { begin: 0, end: 1, bytes: text('{"customer":"ada","cents":12,"to":{"city":"Bern"},"paid":true}\n') });
  const is = (filter) => d.parseFilter(filter)(message);
  for (const filter of ['customer = "ada"', "customer=ada", "cents = 12", "cents > 11.5", "cents <= 12", "to.city ~ ^B", "to contains bern", "paid = true", "customer != bob", "missing ≠ 1", "BERN"]) assert.equal(is(filter), true, filter);
  for (const filter of ["customer = bob", "cents > 12", "cents = twelve", "missing = 1", "missing < 1", "to.city.name = x", "zurich"]) assert.equal(is(filter), false, filter);
  assert.equal(d.parseFilter("  "), null);
  assert.throws(() => d.parseFilter("a b"), /path op value/);
  assert.throws(() => d.parseFilter("a ~ ("), /regular expression/i);
});
