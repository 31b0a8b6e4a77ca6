/**
 * Opens files and makes sessions of them: on onnxruntime-web, where the page is cross-origin isolated with threads and
 * where it was asked for on WebGPU, or on any other onnxruntime that the program gives.
 */
import { ModelError, OnwardError } from "../errors.js";
import { GpuSession } from "./gpu_session.js";
import { host } from "./host.js";
import { GpuMemory, HostMemory } from "./memory.js";

/** @typedef {string | URL | Blob | ArrayBuffer | Uint8Array} FileSource */
/** @typedef {{path: string, data: Uint8Array}[]} ExternalData files that a model refers to, by the name it has for them */

/** An onnxruntime, ready to use, and what it runs on. */
export class Runtime {
  /**
   * @param {any} plain an onnxruntime for the CPU @param {{gpu?: any, fallback?: string, provider?: string,
   *   check?: boolean, sessionOptions?: Record<string, any>}} [options]
   */
  constructor(plain, { gpu, fallback, provider = "wasm", check = true, sessionOptions } = {}) {
    this.ort = plain;
    this._gpu = gpu;
    this._check = check;
    this._name = provider;
    this._options = sessionOptions ?? { executionProviders: ["wasm"] };
    /** Why WebGPU is not used though it was asked for. */
    this.fallback = fallback;
    /** What runs on WebAssembly although the rest of its model runs on WebGPU, and why. @type {string[]} */
    this.notes = [];
  }

  /** What training, evaluation and updates run on. */
  get provider() {
    return this._gpu ? "webgpu" : this._name;
  }

  /** How many threads a session works with; undefined where a given onnxruntime decides that itself. */
  get threads() {
    if (this._name !== "wasm") return this._options.intraOpNumThreads;
    if (!globalThis.crossOriginIsolated) return 1;
    return this.ort.env.wasm.numThreads || Math.min(4, Math.ceil((navigator.hardwareConcurrency || 1) / 2));
  }

  /**
   * Load the onnxruntime of this place: onnxruntime-web in a browser, onnxruntime-node in Node.js. `threads` works in
   * cross-origin isolated pages and in Node.js; `provider` and `wasmPaths` (where the .wasm files are, if not beside
   * the module) are for browsers. `check: false` trusts WebGPU: else the first run of each model on it is compared with
   * WebAssembly's, which takes a run there and the memory for it.
   * @param {import("./host.js").RuntimeOptions} [options]
   */
  static async load(options = {}) {
    const { ort, ...others } = await host.load(options);
    return new Runtime(ort, { check: options.check, ...others });
  }

  /**
   * Take an onnxruntime that the program has loaded: onnxruntime-node, onnxruntime-react-native, onnxruntime-web or
   * another with the same interface. `sessionOptions` are given to each of its sessions.
   * @param {any} ort @param {{provider?: string, sessionOptions?: Record<string, any>}} [options]
   */
  static use(ort, { provider = "cpu", sessionOptions = {} } = {}) {
    const found = ort?.InferenceSession ? ort : ort?.default; // a CommonJS package that was imported
    if (typeof found?.InferenceSession?.create !== "function" || typeof found?.Tensor !== "function") {
      throw new TypeError("Runtime.use takes an onnxruntime: a module with InferenceSession and Tensor");
    }
    return new Runtime(found, { provider, sessionOptions });
  }

  /** Go on with WebAssembly. @param {string} reason */
  leaveGpu(reason) {
    this._gpu = undefined;
    this.fallback = reason;
  }

  /** Memory for the tensors of training where it is to run. */
  memory() {
    if (!this._gpu) return new HostMemory(this.ort);
    return new GpuMemory(this._gpu, (bytes, resident) => this.session(bytes, "arithmetic", { resident }));
  }

  /**
   * A session on WebGPU if that was chosen, else on WebAssembly. Where WebGPU cannot run the model, opening or the first
   * run raises a `GpuError`.
   * @param {Uint8Array} bytes @param {string} what for messages
   * @param {{gpu?: boolean, externalData?: ExternalData, resident?: string[]}} [options] `resident` are outputs that stay
   *   on the GPU
   */
  async session(bytes, what, { gpu = true, externalData = [], resident = [] } = {}) {
    const options = {
      graphOptimizationLevel: "all", logSeverityLevel: 3, ...(externalData.length ? { externalData } : {}),
    };
    const openHere = () => this.ort.InferenceSession.create(bytes, { ...options, ...this._options });
    if (gpu && this._gpu) {
      const note = (/** @type {string} */ text) => void this.notes.push(text);
      return GpuSession.open(this._gpu, bytes, { what, resident, options, note, reference: this._check ? openHere : null });
    }
    try {
      return await openHere();
    } catch (error) {
      throw new ModelError(`onnxruntime cannot open the ${what}: ${message(error)}`, { cause: error });
    }
  }
}

/**
 * The bytes of a file that was given as an address, a File or memory, and its name for messages.
 * @param {FileSource} source @param {(path: string, reason: string) => Error} refuse makes the error
 * @returns {Promise<{bytes: Uint8Array, path: string}>}
 */
export async function readSource(source, refuse) {
  if (source instanceof Uint8Array) return { bytes: source, path: "<bytes>" };
  if (source instanceof ArrayBuffer) return { bytes: new Uint8Array(source), path: "<bytes>" };
  if (typeof Blob !== "undefined" && source instanceof Blob) {
    const path = /** @type {File} */ (source).name ?? "<blob>";
    return { bytes: new Uint8Array(await source.arrayBuffer()), path };
  }
  if (typeof source !== "string" && !(source instanceof URL)) {
    throw new TypeError("a file is an address (string or URL), a File or Blob, an ArrayBuffer or a Uint8Array");
  }
  const path = String(source);
  try {
    return { bytes: await host.read(source), path };
  } catch (error) {
    throw refuse(path, `cannot be read: ${message(error)}`);
  }
}

/** The bytes of a model. @param {FileSource} source @param {string} role */
export async function readModel(source, role) {
  return readSource(source, (path, reason) => new ModelError(`${role} model '${path}' ${reason}`));
}

/**
 * The files that hold weights of a model: the given ones, else those beside the model, where it was given by its address.
 * @param {FileSource} source @param {string[]} names that the model has for them @param {string} path for messages
 * @param {Record<string, FileSource>} [given]
 * @returns {Promise<ExternalData>}
 */
export async function readExternal(source, names, path, given = {}) {
  return Promise.all(names.map(async (name) => {
    if (!name || name === ".." || /[\\/\0]/.test(name)) {
      throw new ModelError(`'${path}' keeps weights in '${name}': only a file beside the model is read`);
    }
    const refuse = (/** @type {string} */ at, /** @type {string} */ reason) =>
      new ModelError(`the weights '${at}' of '${path}' ${reason}`);
    if (Object.hasOwn(given, name)) return { path: name, data: (await readSource(given[name], refuse)).bytes };
    if (typeof source !== "string" && !(source instanceof URL)) {
      throw new ModelError(`'${path}' keeps weights in a second file: pass it, externalData: { "${name}": … }`);
    }
    try {
      return { path: name, data: await host.readBeside(name, String(source)) };
    } catch (error) {
      throw refuse(name, `cannot be read: ${message(error)}`);
    }
  }));
}

/** Runs what must not overlap: sessions share memory with the step that is running. */
export class Exclusive {
  constructor() {
    this._busy = false;
  }

  /** @template T @param {() => Promise<T>} work @returns {Promise<T>} */
  async run(work) {
    if (this._busy) throw new OnwardError("a step of this module is still running: await it before the next call");
    this._busy = true;
    try {
      return await work();
    } finally {
      this._busy = false;
    }
  }
}

/** @param {unknown} error */
export function message(error) {
  return error instanceof Error ? error.message : String(error);
}
