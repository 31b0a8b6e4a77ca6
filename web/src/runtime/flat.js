/** One vector for many tensors: each parameter is a view of it, laid out as in Python's runtime. */
import { sizeOf } from "../checkpoint/dtypes.js";

const ALIGN = 16;

export class FlatBuffer {
  /** @param {Map<string, number[]>} shapes */
  constructor(shapes) {
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
}
