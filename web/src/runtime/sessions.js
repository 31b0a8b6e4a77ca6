/**
 * Opens files and makes onnxruntime-web sessions of them: plain WebAssembly, with threads where the page is
 * cross-origin isolated, or WebGPU where it was asked for and there is one.
 */
import { ModelError, OnwardError } from "../errors.js";

/** @typedef {string | URL | Blob | ArrayBuffer | Uint8Array} FileSource */

/** onnxruntime-web, ready to use, and what it runs on. */
export class Runtime {
  /** @param {any} plain onnxruntime-web for WebAssembly @param {any} [gpu] for WebGPU @param {string} [fallback] */
  constructor(plain, gpu, fallback) {
    this.ort = plain;
    this._gpu = gpu;
    /** Why WebGPU is not used though it was asked for. */
    this.fallback = fallback;
  }

  /** What training and evaluation run on; updates always run on WebAssembly, where the parameters are. */
  get provider() {
    return this._gpu ? "webgpu" : "wasm";
  }

  /** How many threads WebAssembly works with. */
  get threads() {
    if (!globalThis.crossOriginIsolated) return 1;
    return this.ort.env.wasm.numThreads || Math.min(4, Math.ceil((navigator.hardwareConcurrency || 1) / 2));
  }

  /**
   * Load onnxruntime-web. `wasmPaths` is where its .wasm files are, if not beside its module; `threads` works
   * in cross-origin isolated pages only.
   * @param {{provider?: "wasm" | "webgpu", threads?: number, wasmPaths?: string | Record<string, string>}} [options]
   */
  static async load({ provider = "wasm", threads, wasmPaths } = {}) {
    if (provider !== "wasm" && provider !== "webgpu") {
      throw new RangeError(`provider is '${provider}': choose wasm or webgpu`);
    }
    const configure = (/** @type {any} */ ort) => {
      ort.env.logLevel = "error";
      if (threads !== undefined) ort.env.wasm.numThreads = threads;
      if (wasmPaths !== undefined) ort.env.wasm.wasmPaths = wasmPaths;
      return ort;
    };
    const plain = configure(await import("onnxruntime-web/wasm"));
    if (provider === "wasm") return new Runtime(plain);
    const adapter = await /** @type {any} */ (navigator).gpu?.requestAdapter().catch(() => null);
    if (!adapter) return new Runtime(plain, undefined, "this browser offers no WebGPU");
    try {
      return new Runtime(plain, configure(await import("onnxruntime-web/webgpu")));
    } catch {
      return new Runtime(plain, undefined, "this page was made without WebGPU");
    }
  }

  /** Go on with WebAssembly. @param {string} reason */
  leaveGpu(reason) {
    this._gpu = undefined;
    this.fallback = reason;
  }

  /**
   * A session on WebGPU if that was chosen and can run the model, else on WebAssembly.
   * @param {Uint8Array} bytes @param {string} what for messages @param {{gpu?: boolean}} [options]
   */
  async session(bytes, what, { gpu = true } = {}) {
    const options = { graphOptimizationLevel: "all", logSeverityLevel: 3 };
    if (gpu && this._gpu) {
      try {
        // its own layout for convolutions does not get through the gradients of convolutions
        const executionProviders = [{ name: "webgpu", preferredLayout: "NCHW" }, "wasm"];
        return await this._gpu.InferenceSession.create(bytes, { ...options, executionProviders });
      } catch (error) {
        this.leaveGpu(`WebGPU cannot open the ${what}: ${message(error)}`);
      }
    }
    try {
      return await this.ort.InferenceSession.create(bytes, { ...options, executionProviders: ["wasm"] });
    } catch (error) {
      throw new ModelError(`onnxruntime-web cannot open the ${what}: ${message(error)}`, { cause: error });
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
  let response;
  try {
    response = await fetch(source);
  } catch (error) {
    throw refuse(path, `cannot be fetched: ${message(error)}`);
  }
  if (!response.ok) throw refuse(path, `cannot be fetched: ${response.status} ${response.statusText}`.trim());
  return { bytes: new Uint8Array(await response.arrayBuffer()), path };
}

/** The bytes of a model. @param {FileSource} source @param {string} role */
export async function readModel(source, role) {
  return readSource(source, (path, reason) => new ModelError(`${role} model '${path}' ${reason}`));
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
