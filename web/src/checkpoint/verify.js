/**
 * Reads a checkpoint's structure without trusting one byte of it. Every table, vector and string is checked
 * before each access; tensors become views over the bytes (copied where they are not aligned).
 */
import { BOOL, elementType } from "./dtypes.js";
import { CheckpointData, isSpelling } from "./data.js";
import { Reader } from "./flatbuffer.js";

/** @typedef {import("./flatbuffer.js").Table} Table */
/** @typedef {import("./data.js").StoredTensor} StoredTensor */

const MAX_RANK = 32;
const EXTRA = "onward.extra.";
const RESERVED = "onward.";
const ACCUMULATION = "onward.accumulation";

/**
 * The content of a checkpoint's bytes (without trailer).
 * @param {Uint8Array} payload @param {string} path @param {{dataInFile: boolean}} options
 */
export function readPayload(payload, path, { dataInFile }) {
  const reader = new Reader(payload, path);
  const root = reader.root("ODTC");
  const version = root.int32(0, "version");
  if (version !== 2) throw reader.error(`version ${version}; only version 2 is known`, "version", root.position);
  const data = new CheckpointData();
  readProperties(root, data);
  const state = root.table(1, "module_state");
  if (!state) throw reader.error("a required table is missing", "root.module_state", root.position);
  data.nominal = state.boolean(2, "is_nominal_state");
  const external = { allowed: state.boolean(3, "has_external_data"), inFile: dataInFile };
  const names = new Set();
  for (const [slot, label, into] of /** @type {const} */ ([
    [0, "requires_grad_params", data.trainable],
    [1, "frozen_params", data.frozen],
  ])) {
    for (const table of state.tables(slot, label)) {
      const [name, tensor] = readTensor(table, external, data.nominal);
      unique(names, name, table);
      into.set(name, tensor);
    }
  }
  readGroups(root, data, external);
  reader.checkOverlaps();
  return data;
}

/** @param {Table} root @param {CheckpointData} data @param {{allowed: boolean, inFile: boolean}} external */
function readGroups(root, data, external) {
  const names = new Set();
  for (const table of root.tables(2, "optimizer_groups")) {
    const name = table.string(0, "group_name");
    table.where += ` '${name}'`;
    unique(names, name, table);
    const step = table.int64(1, "step");
    const initialLearningRate = table.float32(2, "initial_learning_rate");
    const slots = new Map();
    for (const state of table.tables(3, "optimizer_states")) {
      const parameter = state.string(0, "param_name");
      state.where += ` '${parameter}'`;
      if (slots.has(parameter)) throw state.reader.error(`'${parameter}' occurs twice`, state.where, state.position);
      const tensors = new Map();
      const seen = new Set();
      for (const momentum of state.tables(1, "momentums")) {
        const [slot, tensor] = readTensor(momentum, external, false);
        unique(seen, slot, momentum);
        tensors.set(slot, tensor);
      }
      slots.set(parameter, tensors);
    }
    if (name !== ACCUMULATION) {
      data.optimizer.push({ name, step, initialLearningRate, slots });
      continue;
    }
    for (const [parameter, tensors] of slots) {
      if (tensors.size !== 1 || !tensors.has("gradient")) {
        throw table.reader.error(`accumulated gradient of '${parameter}' is malformed`, name, table.position);
      }
      data.accumulation.set(parameter, tensors.get("gradient"));
    }
  }
}

/** @param {Table} root @param {CheckpointData} data */
function readProperties(root, data) {
  const bag = root.table(3, "property_bag");
  if (!bag) return;
  const names = new Set();
  for (const [slot, kind] of /** @type {const} */ ([[0, "ints"], [1, "floats"], [2, "strings"]])) {
    for (const table of bag.tables(slot, kind)) {
      const name = table.string(0, "name");
      unique(names, name, table);
      const value =
        kind === "ints" ? shorten(table.int64(1, "value"))
        : kind === "floats" ? table.float32(1, "value")
        : table.string(1, "value", { empty: true });
      keepProperty(data, name, value, kind === "floats", table);
    }
  }
}

/**
 * @param {CheckpointData} data @param {string} name @param {number | bigint | string} value
 * @param {boolean} isFloat @param {Table} table
 */
function keepProperty(data, name, value, isFloat, table) {
  if (name.startsWith(EXTRA)) {
    const spelled = String(value);
    if (!isSpelling(spelled)) {
      throw table.reader.error(
        `property '${name}' is malformed: expected 's:', 'i:' or 'f:' and a value`, name, table.position,
      );
    }
    data.extras.set(name.slice(EXTRA.length), spelled);
  } else if (name.startsWith(RESERVED)) {
    throw table.reader.error(
      `property '${name}' is unknown: a newer Onward wrote this file; update to read it`, name, table.position,
    );
  } else {
    data.properties.set(name, value);
    if (isFloat) data.floats.add(name);
  }
}

/**
 * @param {Table} table @param {{allowed: boolean, inFile: boolean}} external @param {boolean} nominal
 * @returns {[string, StoredTensor]}
 */
function readTensor(table, external, nominal) {
  const { reader } = table;
  const name = table.string(0, "name");
  table.where += ` '${name}'`;
  const code = table.int32(3, "data_type");
  const element = elementType(code);
  if (!element) {
    throw reader.error(`a checkpoint cannot hold the ONNX data type ${code}`, `${table.where}.data_type`, table.position);
  }
  if (table.has(5, "string_data")) {
    throw reader.error("string tensors are not allowed", `${table.where}.string_data`, table.position);
  }
  const raw = table.vector(4, "raw_data", 1);
  const offset = table.int64(6, "external_data_offset", -1n);
  if (nominal) {
    table.vector(2, "dims", 8);
    return [name, { dtype: code, dims: [], data: null }];
  }
  const { dims, nbytes } = readDims(table, element.size);
  let start = raw?.start ?? 0;
  if (offset === -1n) {
    if (!raw && nbytes) throw reader.error("there is no data", `${table.where}.raw_data`, table.position);
    if ((raw?.count ?? 0) !== nbytes) {
      throw reader.error(
        `shape [${dims}] needs ${nbytes} bytes, there are ${raw?.count ?? 0}`, `${table.where}.raw_data`, start,
      );
    }
  } else {
    start = readPlace(table, offset, nbytes, external, raw);
  }
  return [name, { dtype: code, dims, data: values(reader, start, nbytes, code, `${table.where}.raw_data`) }];
}

/**
 * @param {Table} table @param {bigint} offset @param {number} nbytes
 * @param {{allowed: boolean, inFile: boolean}} external @param {{start: number, count: number} | undefined} raw
 */
function readPlace(table, offset, nbytes, external, raw) {
  const where = `${table.where}.external_data_offset`;
  const { reader, position } = table;
  if (raw?.count) throw reader.error("data both inside and outside", where, position);
  if (!external.allowed) throw reader.error("external data in a file that says it has none", where, position);
  if (offset < 0n) throw reader.error(`negative offset ${offset}`, where, position);
  if (!external.inFile) {
    throw reader.error("its values are in a second file, which a browser cannot find: save it with Onward", where, position);
  }
  const start = Number(offset > BigInt(Number.MAX_SAFE_INTEGER) ? Number.MAX_SAFE_INTEGER : offset);
  reader.claim(start, nbytes, where);
  return start;
}

/** @param {Table} table @param {number} itemsize */
function readDims(table, itemsize) {
  const { reader } = table;
  const where = `${table.where}.dims`;
  const found = table.vector(2, "dims", 8);
  if (!found) throw reader.error("there is no shape", where, table.position);
  if (found.count > MAX_RANK) {
    throw reader.error(`${found.count} dimensions; at most ${MAX_RANK} are allowed`, where, found.start);
  }
  const wide = Array.from({ length: found.count }, (_, i) => reader.view.getBigInt64(found.start + 8 * i, true));
  let elements = BigInt(itemsize);
  for (const dim of wide) {
    if (dim < 0n) throw reader.error(`negative dimension ${dim}`, where, found.start);
    elements *= dim || 1n; // zeros are left out, so that (0, 2⁶²) is refused like (1, 2⁶²)
  }
  if (elements > BigInt(Number.MAX_SAFE_INTEGER)) throw reader.error(`shape [${wide}] is too large`, where, found.start);
  return { dims: wide.map(Number), nbytes: wide.includes(0n) ? 0 : Number(elements) };
}

/** @param {Reader} reader @param {number} start @param {number} nbytes @param {number} code @param {string} where */
function values(reader, start, nbytes, code, where) {
  const { array: Kind, size } = /** @type {{array: any, size: number}} */ (elementType(code));
  const raw = reader.bytes.subarray(start, start + nbytes);
  if (code === BOOL && raw.some((byte) => byte > 1)) {
    throw reader.error("a boolean is neither 0 nor 1", where, start);
  }
  return new Kind(raw.slice().buffer, 0, nbytes / size);
}

/** @param {Set<string>} names @param {string} name @param {Table} table */
function unique(names, name, table) {
  if (names.has(name)) throw table.reader.error(`'${name}' occurs twice`, table.where, table.position);
  names.add(name);
}

/** @param {bigint} value */
function shorten(value) {
  return Number.isSafeInteger(Number(value)) ? Number(value) : value;
}
