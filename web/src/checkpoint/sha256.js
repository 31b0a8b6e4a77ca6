/**
 * SHA-256 of bytes. The browser's own where the page is a secure context; pages that are served over plain HTTP
 * (a phone on the same network) have none, so the algorithm (FIPS 180-4) is written out as well.
 */

/** @param {Uint8Array} bytes @returns {Promise<Uint8Array>} */
export async function sha256(bytes) {
  const subtle = globalThis.crypto?.subtle;
  if (subtle) return new Uint8Array(await subtle.digest("SHA-256", /** @type {any} */ (bytes)));
  return sha256Portable(bytes);
}

/** The same in plain JavaScript. @param {Uint8Array} bytes */
export function sha256Portable(bytes) {
  const state = fractions(primes(8), 1 / 2);
  const constants = fractions(primes(64), 1 / 3);
  const whole = bytes.length - (bytes.length % 64);
  const words = new Uint32Array(64);
  for (let start = 0; start < whole; start += 64) compress(state, constants, words, bytes, start);
  const rest = bytes.length - whole;
  const tail = new Uint8Array(rest < 56 ? 64 : 128);
  tail.set(bytes.subarray(whole));
  tail[rest] = 0x80;
  new DataView(tail.buffer).setBigUint64(tail.length - 8, BigInt(bytes.length) * 8n);
  for (let start = 0; start < tail.length; start += 64) compress(state, constants, words, tail, start);
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, index) => digest.setUint32(4 * index, word));
  return new Uint8Array(digest.buffer);
}

/** @param {number} count */
function primes(count) {
  /** @type {number[]} */
  const found = [];
  for (let n = 2; found.length < count; n++) if (found.every((p) => n % p)) found.push(n);
  return found;
}

/** The first 32 bits behind the point of each number's root. @param {number[]} numbers @param {number} power */
function fractions(numbers, power) {
  return Uint32Array.from(numbers, (n) => Math.floor((n ** power % 1) * 2 ** 32));
}

/**
 * @param {Uint32Array} state @param {Uint32Array} constants @param {Uint32Array} words scratch
 * @param {Uint8Array} bytes @param {number} start
 */
function compress(state, constants, words, bytes, start) {
  for (let i = 0; i < 16; i++) {
    const at = start + 4 * i;
    words[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
  }
  for (let i = 16; i < 64; i++) {
    const x = words[i - 15];
    const y = words[i - 2];
    const low = rotate(x, 7) ^ rotate(x, 18) ^ (x >>> 3);
    const high = rotate(y, 17) ^ rotate(y, 19) ^ (y >>> 10);
    words[i] = words[i - 16] + low + words[i - 7] + high;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 64; i++) {
    const choice = (e & f) ^ (~e & g);
    const first = (h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice + constants[i] + words[i]) | 0;
    const majority = (a & b) ^ (a & c) ^ (b & c);
    const second = ((rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((value, index) => (state[index] += value));
}

/** @param {number} word @param {number} bits */
function rotate(word, bits) {
  return (word >>> bits) | (word << (32 - bits));
}
