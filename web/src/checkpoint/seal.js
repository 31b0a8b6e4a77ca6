/**
 * What Onward puts around the FlatBuffer of a checkpoint: a block after the file identifier and a trailer with
 * a checksum at the end. It finds accidents, not forgery.
 */
import { CheckpointError } from "../errors.js";
import { sha256 } from "./sha256.js";

export const BLOCK_SIZE = 64;
export const TRAILER_SIZE = 48;
const DIGEST_SIZE = 32;
const BLOCK_START = 8;
const DATA_IN_FILE = 1;
const HEAD = "ONWDHEAD";
const SEAL = "ONWDSEAL";

/**
 * Check the trailer; throws if it is wrong, or missing though promised.
 * @param {Uint8Array} bytes @param {string} path
 * @returns {Promise<{payload: Uint8Array, sealed: boolean, dataInFile: boolean}>}
 */
export async function unseal(bytes, path) {
  const flags = blockFlags(bytes, path);
  const end = bytes.length - TRAILER_SIZE;
  const view = viewOf(bytes);
  if (end < 0 || ascii(bytes, end, 8) !== SEAL) {
    if (flags !== undefined) {
      throw new CheckpointError(path, "the file is damaged: its trailer is missing", {
        field: "trailer",
        offset: bytes.length,
      });
    }
    return { payload: bytes, sealed: false, dataInFile: false };
  }
  const length = view.getBigUint64(end + 8, true);
  if (length !== BigInt(end)) {
    throw new CheckpointError(path, `the file is damaged: its trailer says ${length} bytes, there are ${end}`, {
      field: "trailer.length",
      offset: end + 8,
    });
  }
  const hashed = bytes.length - DIGEST_SIZE;
  const digest = await sha256(bytes.subarray(0, hashed));
  if (digest.some((byte, index) => byte !== bytes[hashed + index])) {
    throw new CheckpointError(path, "the file is damaged: its content does not match its checksum", {
      field: "trailer.sha256",
      offset: hashed,
    });
  }
  return { payload: bytes.subarray(0, end), sealed: true, dataInFile: Boolean((flags ?? 0) & DATA_IN_FILE) };
}

/** A finished FlatBuffer with the block between its identifier and the rest. @param {Uint8Array} flatbuffer */
export function addBlock(flatbuffer) {
  const made = new Uint8Array(flatbuffer.length + BLOCK_SIZE);
  made.set(flatbuffer.subarray(0, BLOCK_START));
  made.set(flatbuffer.subarray(BLOCK_START), BLOCK_START + BLOCK_SIZE);
  const view = viewOf(made);
  // every offset but the root's is relative to its own place and moves along with its target
  view.setUint32(0, view.getUint32(0, true) + BLOCK_SIZE, true);
  made.set(new TextEncoder().encode(HEAD), BLOCK_START);
  view.setUint32(BLOCK_START + 8, 1, true);
  return made;
}

/** Fill in the trailer, for which the last 48 bytes are free. @param {Uint8Array} bytes */
export async function seal(bytes) {
  const end = bytes.length - TRAILER_SIZE;
  bytes.set(new TextEncoder().encode(SEAL), end);
  viewOf(bytes).setBigUint64(end + 8, BigInt(end), true);
  bytes.set(await sha256(bytes.subarray(0, end + 16)), end + 16);
}

/** @param {Uint8Array} bytes @param {string} path @returns {number | undefined} */
function blockFlags(bytes, path) {
  if (bytes.length < BLOCK_START + BLOCK_SIZE || ascii(bytes, BLOCK_START, 8) !== HEAD) return undefined;
  const view = viewOf(bytes);
  const version = view.getUint32(BLOCK_START + 8, true);
  const flags = view.getUint32(BLOCK_START + 12, true);
  if (version !== 1 || (flags & ~DATA_IN_FILE) !== 0) {
    throw new CheckpointError(
      path,
      `written by a newer Onward (block version ${version}, flags ${flags}); update to read it`,
      { field: "block", offset: BLOCK_START + 8 },
    );
  }
  return flags;
}

/** @param {Uint8Array} bytes */
export function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** @param {Uint8Array} bytes @param {number} start @param {number} length */
function ascii(bytes, start, length) {
  return String.fromCharCode(...bytes.subarray(start, start + length));
}
