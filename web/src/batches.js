/** Data cut into batches: arrays with their shapes in, arrays of a few rows each out. */
import { sizeOf } from "./checkpoint/dtypes.js";

/** @typedef {{data: any, dims: number[]}} NDArray */
/** @typedef {NDArray[] | Record<string, NDArray>} Dataset arrays in the model's order, or by name */

/** Batches of some arrays that have their first dimension in common. */
export class Batches {
  /**
   * @param {Dataset} data @param {string[]} names of the model's inputs
   * @param {{batchSize?: number, shuffle?: boolean, seed?: number}} [options]
   */
  constructor(data, names, { batchSize = 32, shuffle = false, seed = 0 } = {}) {
    if (!(Number.isInteger(batchSize) && batchSize > 0)) throw new RangeError(`batchSize is ${batchSize}: it must be 1 or more`);
    this._arrays = Array.isArray(data) ? data : names.map((name) => byName(data, name));
    if (this._arrays.length !== names.length) {
      throw new RangeError(
        `the model takes ${names.length} inputs (${names.join(", ")}), the data has ${this._arrays.length}`,
      );
    }
    const rows = this._arrays.map((array, index) => {
      if (!array?.data || !array.dims?.length || sizeOf(array.dims) !== array.data.length) {
        throw new TypeError(`the data for '${names[index]}' must be {data, dims} with a number for each place`);
      }
      return array.dims[0];
    });
    if (new Set(rows).size > 1) {
      throw new RangeError(`inputs have different numbers of samples: ${names.map((n, i) => `${n} ${rows[i]}`).join(", ")}`);
    }
    if (!rows[0]) throw new RangeError("the data has no samples");
    this.samples = rows[0];
    this.count = Math.ceil(this.samples / batchSize);
    this._size = batchSize;
    this._shuffle = shuffle;
    this._seed = seed;
  }

  /** The batches of an epoch. @param {number} [number] */
  *epoch(number = 0) {
    const order = Array.from({ length: this.samples }, (_, index) => index);
    if (this._shuffle) shuffleInPlace(order, randomNumbers(this._seed, number));
    for (let first = 0; first < this.samples; first += this._size) {
      const chosen = order.slice(first, first + this._size);
      yield this._arrays.map((array) => takeRows(array, chosen));
    }
  }
}

/** Some rows of an array. @param {NDArray} array @param {number[]} rows @returns {NDArray} */
export function takeRows({ data, dims }, rows) {
  const width = sizeOf(dims.slice(1));
  const taken = new data.constructor(rows.length * width);
  rows.forEach((row, index) => taken.set(data.subarray(row * width, (row + 1) * width), index * width));
  return { data: taken, dims: [rows.length, ...dims.slice(1)] };
}

/** Uniform numbers in [0, 1) that depend on the seeds alone. @param {...number} seeds @returns {() => number} */
export function randomNumbers(...seeds) {
  // splitmix: a counter with an odd increment, scrambled
  let counter = seeds.reduce((mixed, seed) => Math.imul(mixed ^ seed, 0x9e3779b1) + 0x7f4a7c15, 0x243f6a88) | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let word = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    word = Math.imul(word ^ (word >>> 15), 0x735a2d97);
    return ((word ^ (word >>> 15)) >>> 0) / 2 ** 32;
  };
}

/** @param {any[]} items @param {() => number} random */
export function shuffleInPlace(items, random) {
  for (let last = items.length - 1; last > 0; last--) {
    const other = Math.floor(random() * (last + 1));
    [items[last], items[other]] = [items[other], items[last]];
  }
}

/** @param {Record<string, NDArray>} data @param {string} name */
function byName(data, name) {
  if (!Object.hasOwn(data, name)) throw new RangeError(`the data has no '${name}', which the model takes; it has ${Object.keys(data).join(", ")}`);
  return data[name];
}
