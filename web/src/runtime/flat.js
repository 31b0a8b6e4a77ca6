/** One vector for many tensors: each parameter is a view of it, laid out as in Python's runtime. */
import { sizeOf } from "../checkpoint/dtypes.js";

const ALIGN = 16;

export class FlatBuffer {
  /** `suffix` tells the names of its tensors from those of others. @param {Map<string, number[]>} shapes @param {string} [suffix] */
  constructor(shapes, suffix = "") {
    this.suffix = suffix;
    /** @type {Map<string, [number, number]>} where each tensor begins and ends */
    this.spans = new Map();
    let end = 0;
    for (const [name, dims] of shapes) {
      const size = sizeOf(dims);
      this.spans.set(name, [end, end + size]);
      end += Math.ceil(size / ALIGN) * ALIGN;
    }
    this.vector = new Float32Array(end);
    /** @type {Map<string, Float32Array>} */
    this.views = new Map(Array.from(this.spans, ([name, [from, to]]) => [name, this.vector.subarray(from, to)]));
  }

  /** Cut it, or a stretch of it, into blocks of at most so many elements. @param {number} most @param {number} [start] @param {number} [stop] */
  blocks(most, start = 0, stop = this.vector.length) {
    /** @type {[number, number][]} */
    const blocks = [];
    for (let first = start; first < stop; first += most) blocks.push([first, Math.min(first + most, stop)]);
    return blocks;
  }

  /** What of each tensor lies between two elements: where it begins in the tensor, and where from the first element. @param {number} start @param {number} stop */
  parts(start, stop) {
    const parts = [];
    for (const [name, [first, last]] of this.spans) {
      const [from, to] = [Math.max(first, start), Math.min(last, stop)];
      if (from < to) parts.push({ name, from: from - first, to: from - start, size: to - from });
    }
    return parts;
  }
}
