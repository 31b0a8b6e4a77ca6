/**
 * The few fields of an ONNX file that training needs: inputs, outputs and metadata. onnxruntime-web does not
 * show metadata, and a whole protobuf library would be larger than this package. Knows field numbers of
 * onnx.proto; never looks at weights.
 */
import { ModelError } from "../errors.js";

const MODEL = { graph: 7, opset: 8, metadata: 14 };
const GRAPH = { node: 1, initializer: 5, input: 11, output: 12, valueInfo: 13 };

/**
 * @typedef {{number: number, wire: number, start: number, body: number, end: number, value: number}} Field
 *   `start` is where its tag begins; `body` to `end` is its content; `value` is set for integers
 * @typedef {{name: string, dtype: number, dims: (number | string)[] | undefined}} ValueInfo
 * @typedef {{inputs: ValueInfo[], outputs: ValueInfo[], metadata: Map<string, string>, external: string[]}} ModelHead
 *   `external` names the files that hold weights
 */

/** Read inputs, outputs and metadata. @param {Uint8Array} bytes @param {string} path @returns {ModelHead} */
export function readHead(bytes, path) {
  try {
    const metadata = new Map();
    const inputs = [];
    const outputs = [];
    /** @type {Set<string>} */
    const external = new Set();
    let graphs = 0;
    for (const field of fields(bytes)) {
      if (field.number === MODEL.metadata) metadata.set(...readEntry(bytes, field));
      if (field.number !== MODEL.graph) continue;
      graphs += 1;
      for (const inner of fields(bytes, field.body, field.end)) {
        if (inner.number === GRAPH.input) inputs.push(readValue(bytes, inner));
        if (inner.number === GRAPH.output) outputs.push(readValue(bytes, inner));
        if (inner.number === GRAPH.initializer) readLocation(bytes, inner, external);
      }
    }
    if (graphs !== 1) throw new RangeError("no graph");
    // onnxruntime passes values as properties of objects, where this name is not free
    if ([...inputs, ...outputs].some((value) => value.name === "__proto__")) {
      throw new ModelError(`'${path}' names a value '__proto__', which JavaScript cannot: rename it`);
    }
    return { inputs, outputs, metadata, external: [...external] };
  } catch (error) {
    if (error instanceof ModelError) throw error;
    throw new ModelError(`'${path}' is not an ONNX model (${/** @type {Error} */ (error).message})`, { cause: error });
  }
}

/**
 * A training model in which `lazy_reset_grad` is true: no selection, no gradient buffers to copy in.
 * @param {Uint8Array} bytes
 */
export function specializeReset(bytes) {
  return editGraph(bytes, (graph) => {
    const nodes = graph.filter((field) => field.number === GRAPH.node).map((field) => readNode(bytes, field));
    const chosen = nodes.filter((node) => node.type === "Where" && node.inputs[0] === "lazy_reset_grad");
    const adders = new Set(chosen.map((node) => node.inputs[2]));
    const isBuffer = (/** @type {string} */ name) => name.endsWith("_grad.accumulation.buffer");
    const parts = [];
    for (const field of graph) {
      if (field.number === GRAPH.valueInfo) continue; // some describe what is gone
      if (field.number === GRAPH.input) {
        const { name } = readValue(bytes, field);
        if (name === "lazy_reset_grad" || isBuffer(name)) continue;
      }
      if (field.number === GRAPH.node) {
        const node = readNode(bytes, field);
        if (node.type === "Add" && adders.has(node.outputs[0])) continue;
        if (node.type === "Concat" && node.inputs.every(isBuffer)) continue; // of vectors that are added as one
        if (node.type === "Where" && node.inputs[0] === "lazy_reset_grad") {
          parts.push(chunk(GRAPH.node, join([
            text(1, node.inputs[1]), text(2, node.outputs[0]), text(4, "Identity"),
          ])));
          continue;
        }
      }
      parts.push(bytes.subarray(field.start, field.end));
    }
    return parts;
  });
}

/**
 * A model in two: `scalars` computes what depends on these inputs alone, and `rest` takes that as further inputs. Null
 * where there is nothing to split, or where a type is not known.
 * @param {Uint8Array} bytes @param {string[]} names @returns {{scalars: Uint8Array, rest: Uint8Array} | null}
 */
export function splitScalars(bytes, names) {
  const known = new Set(names);
  const moved = new Set();
  /** @type {Set<string>} what the rest reads */
  const read = new Set();
  /** @type {Map<string, Field>} */
  const types = new Map();
  for (const graph of fields(bytes)) {
    if (graph.number !== MODEL.graph) continue;
    for (const field of fields(bytes, graph.body, graph.end)) {
      if (field.number === GRAPH.initializer) known.add(readTensorName(bytes, field));
      if (field.number === GRAPH.valueInfo) types.set(readValue(bytes, field).name, field);
      if (field.number === GRAPH.output) read.add(readValue(bytes, field).name);
    }
  }
  const nodes = readNodes(bytes);
  for (const node of nodes) {
    if (node.inputs.every((name) => known.has(name))) {
      node.outputs.forEach((name) => known.add(name) && moved.add(name));
    } else node.inputs.forEach((name) => read.add(name));
  }
  const shared = [...moved].filter((name) => read.has(name));
  if (!shared.length || shared.some((name) => !types.has(name))) return null;
  const infos = shared.map((name) => /** @type {Field} */ (types.get(name)));
  const isMoved = (/** @type {Field} */ field) =>
    field.number === GRAPH.node && moved.has(readNode(bytes, field).outputs[0]);
  const copies = (/** @type {Field[]} */ kept) => kept.map((field) => bytes.subarray(field.start, field.end));
  const declared = (/** @type {number} */ number) => infos.map(({ body, end }) => chunk(number, bytes.subarray(body, end)));
  const scalars = editGraph(bytes, (graph) => [
    ...copies(graph.filter((field) => isMoved(field) || field.number === GRAPH.initializer ||
      (field.number === GRAPH.input && names.includes(readValue(bytes, field).name)))),
    ...declared(GRAPH.output),
  ]);
  const rest = editGraph(bytes, (graph) => [
    ...copies(graph.filter((field) => !isMoved(field) && field.number !== GRAPH.valueInfo)), ...declared(GRAPH.input),
  ]);
  return { scalars, rest };
}

/** The nodes of a model's graph. @param {Uint8Array} bytes */
export function readNodes(bytes) {
  return Array.from(fields(bytes))
    .filter((field) => field.number === MODEL.graph)
    .flatMap((graph) => [...fields(bytes, graph.body, graph.end)])
    .filter((field) => field.number === GRAPH.node)
    .map((field) => readNode(bytes, field));
}

/** A model of one operator with the output y, for float32 of any shape. @param {string} operator @param {string[]} inputs */
export function tinyModel(operator, inputs) {
  const floats = chunk(2, chunk(1, Uint8Array.of(8, 1))); // a tensor of float32
  const node = [...inputs.map((name) => text(1, name)), text(2, "y"), text(4, operator)];
  const graph = [
    chunk(GRAPH.node, join(node)), text(2, operator),
    ...inputs.map((name) => chunk(GRAPH.input, join([text(1, name), floats]))),
    chunk(GRAPH.output, join([text(1, "y"), floats])),
  ];
  const opset = Uint8Array.of(16, 18); // version 18
  return join([Uint8Array.of(8, 8), chunk(MODEL.graph, join(graph)), chunk(MODEL.opset, opset)]);
}

/** A model that also outputs these values of its graph. @param {Uint8Array} bytes @param {string[]} names */
export function addOutputs(bytes, names) {
  return editGraph(bytes, (graph) => [
    ...graph.map((field) => bytes.subarray(field.start, field.end)),
    ...names.map((name) => chunk(GRAPH.output, text(1, name))),
  ]);
}

/** @param {Uint8Array} bytes @param {(graph: Field[]) => Uint8Array[]} edit */
function editGraph(bytes, edit) {
  return join(Array.from(fields(bytes), (field) =>
    field.number === MODEL.graph
      ? chunk(MODEL.graph, join(edit([...fields(bytes, field.body, field.end)])))
      : bytes.subarray(field.start, field.end),
  ));
}

/** The fields of a message. @param {Uint8Array} bytes @returns {Generator<Field>} */
function* fields(bytes, start = 0, end = bytes.length) {
  let at = start;
  const varint = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      if (at >= end || scale > 2 ** 63) throw new RangeError(`damaged at byte ${at}`);
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < end) {
    const first = at;
    const tag = varint();
    const wire = tag % 8;
    let body = at;
    let value = 0;
    if (wire === 0) value = varint();
    else if (wire === 1) at += 8;
    else if (wire === 5) at += 4;
    else if (wire === 2) {
      const length = varint();
      body = at;
      at += length;
    } else throw new RangeError(`damaged at byte ${first}`);
    if (at > end) throw new RangeError("it ends too early");
    yield { number: Math.floor(tag / 8), wire, start: first, body, end: at, value };
  }
}

/** @param {Uint8Array} bytes @param {Field} field */
function string(bytes, field) {
  return new TextDecoder().decode(bytes.subarray(field.body, field.end));
}

/** @param {Uint8Array} bytes @param {Field} entry @returns {[string, string]} */
function readEntry(bytes, entry) {
  const pair = ["", ""];
  for (const field of fields(bytes, entry.body, entry.end)) {
    if (field.number <= 2) pair[field.number - 1] = string(bytes, field);
  }
  return /** @type {[string, string]} */ (pair);
}

/** @param {Uint8Array} bytes @param {Field} node */
function readNode(bytes, node) {
  /** @type {{name: string, inputs: string[], outputs: string[], type: string}} */
  const found = { name: "", inputs: [], outputs: [], type: "" };
  for (const field of fields(bytes, node.body, node.end)) {
    if (field.number === 1) found.inputs.push(string(bytes, field));
    if (field.number === 2) found.outputs.push(string(bytes, field));
    if (field.number === 3) found.name = string(bytes, field);
    if (field.number === 4) found.type = string(bytes, field);
  }
  return found;
}

/** @param {Uint8Array} bytes @param {Field} value @returns {ValueInfo} */
function readValue(bytes, value) {
  /** @type {ValueInfo} */
  const found = { name: "", dtype: 0, dims: undefined };
  for (const field of fields(bytes, value.body, value.end)) {
    if (field.number === 1) found.name = string(bytes, field);
    if (field.number !== 2) continue;
    for (const kind of fields(bytes, field.body, field.end)) {
      if (kind.number !== 1) continue; // a tensor
      for (const part of fields(bytes, kind.body, kind.end)) {
        if (part.number === 1) found.dtype = part.value;
        if (part.number === 2) found.dims = readDims(bytes, part);
      }
    }
  }
  return found;
}

/** @param {Uint8Array} bytes @param {Field} shape */
function readDims(bytes, shape) {
  /** @type {(number | string)[]} */
  const dims = [];
  for (const dim of fields(bytes, shape.body, shape.end)) {
    let size = /** @type {number | string} */ ("?");
    for (const field of fields(bytes, dim.body, dim.end)) {
      if (field.number === 1) size = field.value;
      if (field.number === 2) size = string(bytes, field) || "?";
    }
    if (dim.number === 1) dims.push(size);
  }
  return dims;
}

/** @param {Uint8Array} bytes @param {Field} tensor */
function readTensorName(bytes, tensor) {
  for (const field of fields(bytes, tensor.body, tensor.end)) if (field.number === 8) return string(bytes, field);
  return "";
}

/** Note the file that a tensor lies in, if it is another. @param {Uint8Array} bytes @param {Field} tensor @param {Set<string>} files */
function readLocation(bytes, tensor, files) {
  let external = false;
  let location = "";
  for (const field of fields(bytes, tensor.body, tensor.end)) {
    if (field.number === 14) external = field.value === 1;
    if (field.number !== 13) continue;
    const [key, value] = readEntry(bytes, field);
    if (key === "location") location = value;
  }
  if (external) files.add(location);
}

/** @param {number} number @param {Uint8Array} body */
function chunk(number, body) {
  return join([varintBytes(number * 8 + 2), varintBytes(body.length), body]);
}

/** @param {number} number @param {string} value */
function text(number, value) {
  return chunk(number, new TextEncoder().encode(value));
}

/** @param {number} value */
function varintBytes(value) {
  const bytes = [];
  for (; value >= 128; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return Uint8Array.from([...bytes, value]);
}

/** @param {Uint8Array[]} parts */
function join(parts) {
  const whole = new Uint8Array(parts.reduce((total, part) => total + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
