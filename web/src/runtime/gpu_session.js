/**
 * A session on WebGPU. What fails there runs on WebAssembly, operator by operator; the numbers of its first run are
 * compared with WebAssembly's, as not every graphics driver computes every operator right.
 */
import { readTensor } from "./memory.js";
import { OUT } from "./plan.js";
import { readNodes } from "./protobuf.js";

// Part of the largest number by which an output may differ: rounding adds up from layer to layer, and what is computed
// wrong is off by far more. Of an update the change counts, not the number.
const TOLERANCE = 1e-3;
const CHANGE_TOLERANCE = 1e-2;
const NODE_IN_ERROR = /running (\w+) node\. Name:'([^']*)' Status Message: ([^\n]*)/;

/** Why WebGPU cannot be used for a model. */
export class GpuError extends Error {}

/** @typedef {{name: string, type: string, inputs: string[], outputs: string[]}} GraphNode */

export class GpuSession {
  /**
   * @param {any} ort with WebGPU @param {Uint8Array} bytes @param {{what: string, resident: string[], options: any,
   *   note: (text: string) => void, reference: (() => Promise<any>) | null}} settings `resident` are outputs that stay
   *   on the GPU; `reference` opens the same model on WebAssembly
   */
  constructor(ort, bytes, settings) {
    this._ort = ort;
    this._bytes = bytes;
    this._settings = settings;
    /** @type {Set<string>} nodes that WebGPU fails at */
    this._onHost = new Set();
    this._compared = settings.reference === null;
    /** @type {any} */
    this._session = null;
  }

  /** @param {any} ort @param {Uint8Array} bytes @param {any} settings */
  static async open(ort, bytes, settings) {
    const session = new GpuSession(ort, bytes, settings);
    await session._attempt(() => session._ready());
    return session;
  }

  get inputNames() {
    return this._session.inputNames;
  }

  get outputNames() {
    return this._session.outputNames;
  }

  /** @param {Record<string, any>} feeds @returns {Promise<Record<string, any>>} */
  async run(feeds) {
    const results = await this._attempt(async () => (await this._ready()).run(feeds));
    if (!this._compared) await this._compare(feeds, results);
    return results;
  }

  async release() {
    await this._session?.release();
    this._session = null;
  }

  async _ready() {
    if (this._session) return this._session;
    const { options, resident } = this._settings;
    // its own layout for convolutions does not get through the gradients of convolutions
    const gpu = { name: "webgpu", preferredLayout: "NCHW", forceCpuNodeNames: [...this._onHost] };
    this._session = await this._ort.InferenceSession.create(this._bytes, {
      ...options,
      executionProviders: [this._onHost.size ? gpu : { ...gpu, forceCpuNodeNames: undefined }, "wasm"],
      preferredOutputLocation: Object.fromEntries(resident.map((/** @type {string} */ name) => [name, "gpu-buffer"])),
    });
    return this._session;
  }

  /** Do something, again without the operator at which it failed. @template T @param {() => Promise<T>} work @returns {Promise<T>} */
  async _attempt(work) {
    try {
      return await work();
    } catch (error) {
      const text = error instanceof Error ? error.message : String(error);
      const [, type, name, reason] = NODE_IN_ERROR.exec(text) ?? [];
      const alike = this._alike(name);
      // a node that the runtime made of several, or one that was moved already: nothing is left to try
      if (!alike.length) throw new GpuError(`WebGPU cannot run the ${this._settings.what}: ${text}`, { cause: error });
      alike.forEach((node) => this._onHost.add(node));
      const nodes = alike.length > 1 ? `${alike.length} ${type} nodes of the ${this._settings.what} run` : `${type} '${name}' of the ${this._settings.what} runs`;
      this._settings.note(`${nodes} on WebAssembly: ${reason}`);
      await this.release();
      return this._attempt(work);
    }
  }

  /** The names of the nodes that will fail as this one does, itself among them. @param {string | undefined} name */
  _alike(name) {
    /** @type {GraphNode[]} */
    const nodes = readNodes(this._bytes);
    const failed = nodes.find((node) => node.name === name);
    if (!failed || !name || this._onHost.has(name)) return [];
    return nodes
      .filter(({ type, outputs }) => type === failed.type && outputs.length === failed.outputs.length)
      .map((node) => node.name)
      .filter(Boolean);
  }

  /** Refuse results that WebAssembly does not get. @param {Record<string, any>} feeds @param {Record<string, any>} results */
  async _compare(feeds, results) {
    const onHost = async (/** @type {any} */ tensor) =>
      tensor.location === "cpu" ? tensor : new this._ort.Tensor(tensor.type, await readTensor(this._ort, tensor), tensor.dims);
    const reference = await /** @type {any} */ (this._settings.reference)();
    /** @type {Record<string, any>} */
    const before = {};
    for (const name of reference.inputNames) before[name] = await onHost(feeds[name]);
    const expected = await reference.run(before);
    await reference.release();
    /** @type {Record<string, any>} */
    const actual = {};
    for (const name of Object.keys(expected)) actual[name] = await readTensor(this._ort, results[name]);
    const problem = findDifference(actual, expected, before);
    if (problem) {
      Object.values(results).forEach((tensor) => tensor.dispose());
      throw new GpuError(`WebGPU computes the ${this._settings.what} wrong: ${problem}`);
    }
    this._compared = true;
  }
}

/**
 * What is wrong with outputs; null where nothing is.
 * @param {Record<string, any>} actual @param {Record<string, any>} expected @param {Record<string, any>} before inputs
 */
export function findDifference(actual, expected, before) {
  const names = Object.keys(expected).filter((name) => expected[name].type === "float32");
  const sizes = new Map(names.map((name) => [name, largest(expected[name].data)]));
  // a gradient that is zero in theory is nothing but rounding: all are measured beside the largest
  const gradients = Math.max(0, ...names.filter((name) => name.endsWith(OUT)).map((name) => sizes.get(name) ?? 0));
  for (const name of names) {
    const size = sizes.get(name) ?? 0;
    if (!Number.isFinite(size)) continue;
    const old = name.endsWith(".next") ? before[name.slice(0, -5)]?.data : undefined;
    const { data } = expected[name];
    const allowed = old
      ? CHANGE_TOLERANCE * largest(data, old) + 1e-6 * size
      : TOLERANCE * (size + 0.01 * (name.endsWith(OUT) ? gradients : 1));
    const gap = largest(data, actual[name]);
    if (!(gap <= allowed)) return `${name} is off by ${gap.toPrecision(1)}, of numbers up to ${size.toPrecision(1)}`;
  }
  return null;
}

/** The largest number, or difference; NaN if there is one. @param {Float32Array} data @param {Float32Array} [other] */
function largest(data, other) {
  let most = 0;
  for (let i = 0; i < data.length; i++) {
    const size = Math.abs(other ? data[i] - other[i] : data[i]);
    if (!(size <= most)) most = size;
    if (Number.isNaN(most)) return NaN;
  }
  return most;
}
