/**
 * Checkpoint data to bytes and back, in the layout that src/onward/checkpoint/SPEC.md describes: the same bytes
 * as Python's for the same data.
 */
import { Builder } from "flatbuffers";
import { CheckpointError } from "../errors.js";
import { readPayload } from "./verify.js";
import { addBlock, seal, TRAILER_SIZE, unseal } from "./seal.js";

/** @typedef {import("./data.js").CheckpointData} CheckpointData */
/** @typedef {import("./data.js").StoredTensor} StoredTensor */
/** @typedef {{name: string, tensor: StoredTensor, offset: number}} Entry */
/** @typedef {{name: string, step: bigint, rate: number, slots: [string, Entry[]][]}} Group */

const ALIGNMENT = 64;
const LIMIT = 1800 * 2 ** 20; // beyond it, Python moves tensors out of the FlatBuffer

/**
 * The content of a checkpoint's bytes, verified before anything is used.
 * @param {Uint8Array} bytes @param {string} path for messages
 * @returns {Promise<{data: CheckpointData, sealed: boolean}>}
 */
export async function decode(bytes, path) {
  const { payload, sealed, dataInFile } = await unseal(bytes, path);
  return { data: readPayload(payload, path, { dataInFile }), sealed };
}

/** The bytes of a checkpoint, trailer included. @param {CheckpointData} data @returns {Promise<Uint8Array>} */
export async function encode(data) {
  const trainable = entries(data.trainable);
  const frozen = entries(data.frozen);
  const groups = makeGroups(data);
  const all = [...trainable, ...frozen, ...groups.flatMap((group) => group.slots.flatMap(([, found]) => found))];
  let inline = 0;
  for (const entry of all) {
    if (data.nominal && entry.tensor.data === null) continue;
    const { byteLength } = entry.tensor.data;
    // four bytes in front hold the vector's length, so the first offset is never 0
    entry.offset = roundUp(inline + 4, byteLength >= ALIGNMENT ? ALIGNMENT : 8);
    inline = entry.offset + byteLength;
  }
  if (inline > LIMIT) throw new CheckpointError("<new>", `${inline} bytes are more than a browser can write`);
  const metadata = buildMetadata(data, trainable, frozen, groups);
  const bytes = new Uint8Array(metadata.length + roundUp(inline, ALIGNMENT) + TRAILER_SIZE);
  const view = new DataView(bytes.buffer);
  bytes.set(metadata);
  for (const { tensor, offset } of all) {
    if (tensor.data === null) continue;
    view.setUint32(metadata.length + offset - 4, tensor.data.byteLength, true);
    bytes.set(
      new Uint8Array(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength),
      metadata.length + offset,
    );
  }
  await seal(bytes);
  return bytes;
}

/** @param {Map<string, StoredTensor>} tensors @returns {Entry[]} */
function entries(tensors) {
  return Array.from(tensors, ([name, tensor]) => ({ name, tensor, offset: 0 }));
}

/** @param {CheckpointData} data @returns {Group[]} */
function makeGroups(data) {
  const groups = data.optimizer.map((group) => ({
    name: group.name,
    step: group.step,
    rate: group.initialLearningRate,
    slots: Array.from(group.slots, ([name, slots]) => /** @type {[string, Entry[]]} */ ([name, entries(slots)])),
  }));
  if (data.accumulation.size) {
    const slots = Array.from(
      data.accumulation,
      ([name, tensor]) => /** @type {[string, Entry[]]} */ ([name, [{ name: "gradient", tensor, offset: 0 }]]),
    );
    groups.push({ name: "onward.accumulation", step: 0n, rate: 0, slots });
  }
  return groups;
}

/**
 * The FlatBuffer up to where tensor bytes begin. A builder counts positions from the end; here it starts at the
 * end of the metadata, so the tensor bytes that follow have negative positions.
 * @param {CheckpointData} data @param {Entry[]} trainable @param {Entry[]} frozen @param {Group[]} groups
 */
function buildMetadata(data, trainable, frozen, groups) {
  const builder = new Builder(1024);
  builder.prep(ALIGNMENT, 0);
  const built = groups.map((group) => buildGroup(builder, group));
  const groupVector = built.length ? offsets(builder, built) : 0;
  const frozenVector = offsets(builder, frozen.map((entry) => buildTensor(builder, entry)));
  const trainableVector = offsets(builder, trainable.map((entry) => buildTensor(builder, entry)));
  builder.startObject(4);
  builder.addFieldOffset(0, trainableVector, 0);
  builder.addFieldOffset(1, frozenVector, 0);
  builder.addFieldInt8(2, Number(data.nominal), 0);
  const module = builder.endObject();
  const bag = buildProperties(builder, data);
  builder.startObject(4);
  builder.addFieldInt32(0, 2, 0);
  builder.addFieldOffset(1, module, 0);
  builder.addFieldOffset(2, groupVector, 0);
  builder.addFieldOffset(3, bag, 0);
  builder.finish(builder.endObject(), "ODTC");
  return addBlock(builder.asUint8Array());
}

/** @param {Builder} builder @param {Entry} entry */
function buildTensor(builder, { name, tensor, offset }) {
  const text = builder.createString(name);
  const nominal = tensor.data === null;
  const empty = nominal ? offsets(builder, []) : 0;
  builder.startVector(8, tensor.dims.length, 8);
  for (const dim of tensor.dims.toReversed?.() ?? [...tensor.dims].reverse()) builder.addInt64(BigInt(dim));
  const dims = builder.endVector();
  builder.startObject(7);
  builder.addFieldOffset(0, text, 0);
  builder.addFieldOffset(2, dims, 0);
  builder.addFieldInt32(3, tensor.dtype, 0);
  builder.addFieldOffset(4, nominal ? empty : 4 - offset, 0);
  return builder.endObject();
}

/** @param {Builder} builder @param {Group} group */
function buildGroup(builder, group) {
  const states = group.slots.map(([parameter, slots]) => {
    const name = builder.createString(parameter);
    const tensors = offsets(builder, slots.map((entry) => buildTensor(builder, entry)));
    builder.startObject(2);
    builder.addFieldOffset(0, name, 0);
    builder.addFieldOffset(1, tensors, 0);
    return builder.endObject();
  });
  const vector = offsets(builder, states);
  const name = builder.createString(group.name);
  builder.startObject(4);
  builder.addFieldOffset(0, name, 0);
  builder.addFieldInt64(1, group.step, 0n);
  builder.addFieldFloat32(2, Math.fround(group.rate), 0);
  builder.addFieldOffset(3, vector, 0);
  return builder.endObject();
}

/** @param {Builder} builder @param {CheckpointData} data */
function buildProperties(builder, data) {
  /** @type {Record<"ints" | "floats" | "strings", number[]>} */
  const made = { ints: [], floats: [], strings: [] };
  const all = [...data.properties, ...Array.from(data.extras, ([name, text]) => [`onward.extra.${name}`, text])];
  for (const [key, value] of /** @type {[string, number | bigint | string][]} */ (all)) {
    const name = builder.createString(key);
    const text = typeof value === "string" ? builder.createString(value) : 0;
    const isFloat = typeof value === "number" && (data.floats.has(key) || !Number.isSafeInteger(value));
    builder.startObject(2);
    builder.addFieldOffset(0, name, 0);
    if (typeof value === "string") builder.addFieldOffset(1, text, 0);
    else if (isFloat) builder.addFieldFloat32(1, value, 0);
    else builder.addFieldInt64(1, BigInt(value), 0n);
    made[typeof value === "string" ? "strings" : isFloat ? "floats" : "ints"].push(builder.endObject());
  }
  const vectors = [made.ints, made.floats, made.strings].map((found) => (found.length ? offsets(builder, found) : 0));
  builder.startObject(3);
  vectors.forEach((vector, slot) => builder.addFieldOffset(slot, vector, 0));
  return builder.endObject();
}

/** @param {Builder} builder @param {number[]} tables */
function offsets(builder, tables) {
  builder.startVector(4, tables.length, 4);
  for (let i = tables.length - 1; i >= 0; i--) builder.addOffset(tables[i]);
  return builder.endVector();
}

/** @param {number} value @param {number} multiple */
function roundUp(value, multiple) {
  return Math.ceil(value / multiple) * multiple;
}
