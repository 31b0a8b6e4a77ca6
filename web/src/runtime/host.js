/**
 * What depends on where this code runs: how a file's address is read, and which onnxruntime is taken where none is
 * given. The entries of the package set it: src/index.js for browsers, node/index.js for Node.js.
 */
import { OnwardError } from "../errors.js";

/**
 * @typedef {{
 *   read: (address: string | URL) => Promise<Uint8Array>,
 *   readBeside: (name: string, address: string) => Promise<Uint8Array>,
 *   load: (options: RuntimeOptions) => Promise<
 *     {ort: any, gpu?: any, fallback?: string, provider?: string, sessionOptions?: Record<string, any>}>,
 * }} Host
 * @typedef {{provider?: "wasm" | "webgpu", threads?: number, wasmPaths?: string | Record<string, string>,
 *   check?: boolean}} RuntimeOptions
 */

/** @type {Host} */
export const host = { read: fetchFile, readBeside, load: loadNone };

/** @param {string | URL} address */
async function fetchFile(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`.trim());
  return new Uint8Array(await response.arrayBuffer());
}

/** @param {string} name @param {string} address of the file beside it */
async function readBeside(name, address) {
  const plain = address.split(/[?#]/, 1)[0];
  return fetchFile(plain.slice(0, plain.lastIndexOf("/") + 1) + encodeURIComponent(name));
}

/** @returns {Promise<never>} */
async function loadNone() {
  throw new OnwardError("no onnxruntime was given: pass a runtime, Runtime.use(ort) of the onnxruntime that this program has");
}
