/** Onward in Node.js and Electron: files by their paths, on onnxruntime-node where no other onnxruntime is given. */
import { randomBytes } from "node:crypto";
import { lstat, open, readFile, realpath, rename, rm } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { CheckpointError, CheckpointState, OnwardError } from "../src/core.js";
import { host } from "../src/runtime/host.js";

const { read: fetchFile, readBeside: fetchBeside } = host;
Object.assign(host, { read: readAddress, readBeside, load: loadNode });

export * from "../src/core.js";

/**
 * Write a checkpoint file, which Python and this package load; the old one stays until the new one is safely there.
 * @param {CheckpointState} state @param {string | URL} file @param {{includeOptimizerState?: boolean}} [options]
 */
export async function saveCheckpoint(state, file, options) {
  const bytes = await CheckpointState.save(state, options);
  const named = localPath(file) ?? String(file);
  // what a link leads to is replaced, not the link
  const target = await realpath(named).catch(() => path.resolve(named));
  const suffix = `${randomBytes(8).toString("hex")}.onward-tmp`;
  const temporary = path.join(path.dirname(target), `.${path.basename(target)}.${suffix}`);
  try {
    const handle = await open(temporary, "wx");
    try {
      await handle.writeFile(bytes);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await rename(temporary, target);
  } catch (error) {
    await rm(temporary, { force: true });
    throw new CheckpointError(named, `not committed, the old one is kept: ${/** @type {Error} */ (error).message}`);
  }
}

/** The path of a file here; null for an address in a network. @param {string | URL} address */
function localPath(address) {
  const text = String(address);
  if (text.startsWith("file:")) return fileURLToPath(text);
  return /^[a-z][a-z0-9+.-]+:/i.test(text) ? null : text;
}

/** @param {string | URL} address */
async function readAddress(address) {
  const file = localPath(address);
  if (file === null) return fetchFile(address);
  const { buffer, byteOffset, byteLength } = await readFile(file);
  return new Uint8Array(buffer, byteOffset, byteLength);
}

/** @param {string} name @param {string} address of the file beside it */
async function readBeside(name, address) {
  const file = localPath(address);
  if (file === null) return fetchBeside(name, address);
  const there = path.join(path.dirname(file), name);
  // a model names this file: a link would lead it to any other on this machine, a pipe would never end
  if (!(await lstat(there)).isFile()) throw new Error("it is not a regular file");
  return readAddress(there);
}

/** @param {import("../src/runtime/host.js").RuntimeOptions} options */
async function loadNode({ threads }) {
  let loaded;
  try {
    // @ts-ignore: it is the program's to install
    loaded = await import("onnxruntime-node");
  } catch (error) {
    throw new OnwardError(
      "onnxruntime-node cannot be loaded: npm install onnxruntime-node, or pass a runtime, Runtime.use(ort) " +
        `(${/** @type {Error} */ (error).message})`,
      { cause: error },
    );
  }
  const sessionOptions = { executionProviders: ["cpu"], ...(threads ? { intraOpNumThreads: threads } : {}) };
  return { ort: loaded.default ?? loaded, provider: "cpu", sessionOptions };
}
