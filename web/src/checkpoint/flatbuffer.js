/**
 * Bounds-checked access to the bytes of any FlatBuffer: tables, vectors, strings, scalars. The npm package's
 * reader trusts its input, so a file from outside is read with this one. Every object claims its bytes, and no
 * two may share one: a small file cannot describe large data.
 */
import { CheckpointError } from "../errors.js";
import { viewOf } from "./seal.js";

const MAX_TABLES = 1_000_000;

/** A buffer together with what has been claimed of it. */
export class Reader {
  /** @param {Uint8Array} bytes @param {string} path for messages */
  constructor(bytes, path) {
    this.bytes = bytes;
    this.view = viewOf(bytes);
    this.path = path;
    /** @type {[number, number][]} */
    this._claims = [];
    this._claimed = 0;
    /** @type {Map<number, number[]>} */
    this._vtables = new Map();
    this._tables = 0;
    this._utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  }

  /** @param {string} reason @param {string} field @param {number} offset */
  error(reason, field, offset) {
    return new CheckpointError(this.path, reason, { field, offset });
  }

  /** @param {number} position @param {number} length @param {string} where */
  within(position, length, where) {
    const size = this.bytes.length;
    if (position < 0 || length < 0 || position + length > size) {
      throw this.error(`${length} bytes at ${position} are outside of the ${size} there are`, where, position);
    }
  }

  /** Take bytes for one object. @param {number} position @param {number} length @param {string} where */
  claim(position, length, where) {
    this.within(position, length, where);
    if (!length) return;
    this._claimed += length;
    if (this._claimed > this.bytes.length) {
      throw this.error("objects share bytes: together they are larger than the file", where, position);
    }
    this._claims.push([position, position + length]);
  }

  checkOverlaps() {
    this._claims.sort((a, b) => a[0] - b[0]);
    for (let i = 1; i < this._claims.length; i++) {
      if (this._claims[i - 1][1] > this._claims[i][0]) {
        throw this.error("two objects share bytes", "layout", this._claims[i][0]);
      }
    }
  }

  /** The root table, after checking the file identifier. @param {string} identifier */
  root(identifier) {
    if (this.bytes.length < 12) throw this.error(`only ${this.bytes.length} bytes: too short`, "root", 0);
    const found = String.fromCharCode(...this.bytes.subarray(4, 8));
    if (found !== identifier) {
      throw this.error(`not a checkpoint: identifier ${JSON.stringify(found)}, expected "${identifier}"`, "identifier", 4);
    }
    this.claim(0, 8, "root");
    return this.tableAt(this.view.getUint32(0, true), "root");
  }

  /** @param {number} position @param {string} where */
  tableAt(position, where) {
    this._tables += 1;
    if (this._tables > MAX_TABLES) throw this.error(`more than ${MAX_TABLES} tables`, where, position);
    this.aligned(position, 4, where);
    this.within(position, 4, where);
    const slots = this._vtable(position - this.view.getInt32(position, true), where);
    this.claim(position, slots[0], where);
    return new Table(this, position, slots, where);
  }

  /** @param {number} position @param {string} where */
  _vtable(position, where) {
    const known = this._vtables.get(position);
    if (known) return known;
    where = `${where}.vtable`;
    this.aligned(position, 2, where);
    this.within(position, 4, where);
    const length = this.view.getUint16(position, true);
    const tableSize = this.view.getUint16(position + 2, true);
    if (length < 4 || length % 2 || tableSize < 4) {
      throw this.error(`sizes ${length} and ${tableSize} are impossible`, where, position);
    }
    this.claim(position, length, where);
    const slots = [tableSize];
    for (let at = 4; at < length; at += 2) {
      const offset = this.view.getUint16(position + at, true);
      if (offset && (offset < 4 || offset >= tableSize)) {
        throw this.error("a field is outside of its table", where, position);
      }
      slots.push(offset);
    }
    this._vtables.set(position, slots);
    return slots;
  }

  /** @param {number} position @param {number} alignment @param {string} where */
  aligned(position, alignment, where) {
    if (position % alignment) {
      throw this.error(`position ${position} is not a multiple of ${alignment}`, where, position);
    }
  }

  /** @param {number} start @param {number} length @param {string} where */
  text(start, length, where) {
    try {
      return this._utf8.decode(this.bytes.subarray(start, start + length));
    } catch {
      throw this.error("a text is not UTF-8", where, start);
    }
  }
}

/** One checked table; `where` is its path from the root, for messages. */
export class Table {
  /** @param {Reader} reader @param {number} position @param {number[]} slots @param {string} where */
  constructor(reader, position, slots, where) {
    this.reader = reader;
    this.position = position;
    this.where = where;
    this._slots = slots;
  }

  /** Where a field's bytes are, undefined if it is absent. @param {number} slot @param {number} size @param {string} label */
  _field(slot, size, label) {
    const offset = this._slots[slot + 1];
    if (!offset) return undefined;
    const where = `${this.where}.${label}`;
    if (offset + size > this._slots[0]) {
      throw this.reader.error("a field is outside of its table", where, this.position);
    }
    this.reader.aligned(this.position + offset, size, where);
    return this.position + offset;
  }

  /** @param {number} slot @param {string} label */
  int32(slot, label) {
    const at = this._field(slot, 4, label);
    return at === undefined ? 0 : this.reader.view.getInt32(at, true);
  }

  /** @param {number} slot @param {string} label @param {bigint} [absent] */
  int64(slot, label, absent = 0n) {
    const at = this._field(slot, 8, label);
    return at === undefined ? absent : this.reader.view.getBigInt64(at, true);
  }

  /** @param {number} slot @param {string} label */
  float32(slot, label) {
    const at = this._field(slot, 4, label);
    return at === undefined ? 0 : this.reader.view.getFloat32(at, true);
  }

  /** @param {number} slot @param {string} label */
  boolean(slot, label) {
    const at = this._field(slot, 1, label);
    const value = at === undefined ? 0 : this.reader.bytes[at];
    if (value > 1) throw this.reader.error(`a boolean is ${value}`, `${this.where}.${label}`, this.position);
    return value === 1;
  }

  /** @param {number} slot @param {string} label */
  _follow(slot, label) {
    const at = this._field(slot, 4, label);
    if (at === undefined) return undefined;
    const distance = this.reader.view.getUint32(at, true);
    if (!distance) throw this.reader.error("an offset is zero", `${this.where}.${label}`, at);
    return at + distance;
  }

  /** @param {number} slot @param {string} label */
  has(slot, label) {
    return this._follow(slot, label) !== undefined;
  }

  /**
   * Where the elements of a vector of scalars are, and how many.
   * @param {number} slot @param {string} label @param {number} itemsize
   */
  vector(slot, label, itemsize) {
    const position = this._follow(slot, label);
    if (position === undefined) return undefined;
    const where = `${this.where}.${label}`;
    this.reader.aligned(position, 4, where);
    this.reader.within(position, 4, where);
    const count = this.reader.view.getUint32(position, true);
    if (count) this.reader.aligned(position + 4, itemsize, where);
    this.reader.claim(position, 4 + count * itemsize, where);
    return { start: position + 4, count };
  }

  /** A text that must be there. @param {number} slot @param {string} label @param {{empty?: boolean}} [options] */
  string(slot, label, { empty = false } = {}) {
    const where = `${this.where}.${label}`;
    const position = this._follow(slot, label);
    if (position === undefined) throw this.reader.error("a required text is missing", where, this.position);
    this.reader.aligned(position, 4, where);
    this.reader.within(position, 4, where);
    const length = this.reader.view.getUint32(position, true);
    this.reader.claim(position, 4 + length + 1, where);
    if (this.reader.bytes[position + 4 + length]) {
      throw this.reader.error("a text does not end with a zero byte", where, position);
    }
    if (!length && !empty) throw this.reader.error("a required text is empty", where, position);
    return this.reader.text(position + 4, length, where);
  }

  /** @param {number} slot @param {string} label */
  table(slot, label) {
    const position = this._follow(slot, label);
    return position === undefined ? undefined : this.reader.tableAt(position, `${this.where}.${label}`);
  }

  /** The tables of a vector, each checked when it is reached. @param {number} slot @param {string} label */
  *tables(slot, label) {
    const found = this.vector(slot, label, 4);
    for (let index = 0; index < (found?.count ?? 0); index++) {
      const where = `${this.where}.${label}[${index}]`;
      const at = /** @type {{start: number}} */ (found).start + 4 * index;
      const distance = this.reader.view.getUint32(at, true);
      if (!distance) throw this.reader.error("an offset is zero", where, at);
      yield this.reader.tableAt(at + distance, where);
    }
  }
}
