/** Reads data files that people have: .npz and .npy (NumPy) and .csv, into arrays with shapes. */

const KINDS = {
  f4: Float32Array, f8: Float64Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, i8: BigInt64Array,
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, u8: BigUint64Array, b1: Uint8Array,
};

/**
 * The arrays of a file by name; a .npy has one without a name, a .csv one for each part.
 * @param {Blob & {name?: string}} file @returns {Promise<Record<string, {data: any, dims: number[]}>>}
 */
export async function readArrays(file) {
  const name = file.name ?? "";
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (/\.npz$/i.test(name)) return readZip(bytes);
  if (/\.npy$/i.test(name)) return { "": readArray(bytes) };
  if (/\.csv$/i.test(name)) return readTable(new TextDecoder().decode(bytes));
  throw new Error(`'${name}' is not a data file that this page reads: give .npz, .npy or .csv`);
}

/**
 * Arrays for a model's inputs: by name, else in the file's order; numbers become what the input takes.
 * @param {Record<string, {data: any, dims: number[]}>} arrays
 * @param {{name: string, dims: (number | string)[] | undefined, type: string}[]} inputs @param {number} [divisor]
 */
export function fitToInputs(arrays, inputs, divisor = 1) {
  const names = Object.keys(arrays);
  const byName = inputs.every(({ name }) => name in arrays);
  if (!byName && names.length !== inputs.length) {
    throw new Error(
      `the file has ${names.length} arrays (${names.join(", ") || "none"}), ` +
        `the model takes ${inputs.map(({ name }) => name).join(", ")}`,
    );
  }
  return inputs.map(({ name, dims, type }, index) => {
    const { data, dims: given } = arrays[byName ? name : names[index]];
    const rows = given[0];
    const shape = reshape(given, dims, name);
    if (type === "float32") {
      const floats = Float32Array.from(data, Number);
      if (divisor !== 1) for (let i = 0; i < floats.length; i++) floats[i] /= divisor;
      return { data: floats, dims: shape };
    }
    const bad = Array.prototype.find.call(data, (value) => typeof value === "number" && !Number.isInteger(value));
    if (bad !== undefined) throw new Error(`'${name}' takes whole numbers, the file has ${bad}`);
    if (type === "int64") return { data: BigInt64Array.from(data, BigInt), dims: shape };
    if (type === "int32") return { data: Int32Array.from(data, Number), dims: shape };
    if (type === "bool") return { data: Uint8Array.from(data, Number), dims: shape };
    throw new Error(`'${name}' is ${type} with ${rows} rows: this page cannot make that from a file`);
  });
}

/** @param {number[]} given @param {(number | string)[] | undefined} wanted @param {string} name */
function reshape(given, wanted, name) {
  if (!wanted) return given;
  const rest = given.slice(1).reduce((a, b) => a * b, 1);
  const fixed = wanted.slice(1);
  if (fixed.some((dim) => typeof dim === "string")) {
    if (given.length === wanted.length) return given;
  } else if (fixed.reduce((a, b) => a * b, 1) === rest) return [given[0], ...fixed];
  throw new Error(`'${name}' has shape [${given.join(", ")}] in the file, the model takes [${wanted.join(", ")}]`);
}

/** @param {Uint8Array} bytes */
function readArray(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length < 12 || bytes[0] !== 0x93 || String.fromCharCode(...bytes.subarray(1, 6)) !== "NUMPY") {
    throw new Error("not a NumPy array");
  }
  const [length, start] = bytes[6] === 1 ? [view.getUint16(8, true), 10] : [view.getUint32(8, true), 12];
  const header = new TextDecoder("latin1").decode(bytes.subarray(start, start + length));
  const descr = /'descr':\s*'([<>|=])(\w+)'/.exec(header);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(header);
  const Kind = descr && KINDS[descr[2]];
  if (!Kind || !shape || descr[1] === ">" || /'fortran_order':\s*True/.test(header)) {
    throw new Error(`this NumPy array is not one that this page reads: ${header.trim().slice(0, 80)}`);
  }
  const dims = shape[1].split(",").map((part) => part.trim()).filter(Boolean).map(Number);
  const size = dims.reduce((a, b) => a * b, 1);
  const body = bytes.slice(start + length);
  if (body.length < size * Kind.BYTES_PER_ELEMENT) throw new Error("a NumPy array is cut off");
  return { data: new Kind(body.buffer, 0, size), dims };
}

/** @param {Uint8Array} bytes */
async function readZip(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end -= 1;
  if (end < 0) throw new Error("this is not a .npz file, or it is cut off");
  const count = view.getUint16(end + 10, true);
  let at = view.getUint32(end + 16, true);
  /** @type {Record<string, {data: any, dims: number[]}>} */
  const arrays = {};
  for (let entry = 0; entry < count; entry++) {
    if (at + 46 > bytes.length || view.getUint32(at, true) !== 0x02014b50) throw new Error("this .npz file is damaged");
    const method = view.getUint16(at + 10, true);
    const packed = view.getUint32(at + 20, true);
    const nameLength = view.getUint16(at + 28, true);
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
    const local = view.getUint32(at + 42, true);
    const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    const content = bytes.subarray(start, start + packed);
    if (name.endsWith(".npy")) {
      const whole = method === 0 ? content : await inflate(content, method);
      arrays[name.slice(0, -4)] = readArray(whole);
    }
    at += 46 + nameLength + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
  }
  return arrays;
}

/** @param {Uint8Array} content @param {number} method */
async function inflate(content, method) {
  if (method !== 8) throw new Error(`this .npz file is packed in a way (${method}) that this page does not read`);
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Columns of numbers: the last one, or the one headed label, labels, target or y, is the label. @param {string} text */
function readTable(text) {
  const rows = text.split(/\r?\n/).filter((line) => line.trim()).map((line) => line.split(/[,;\t]/));
  if (!rows.length) throw new Error("the table is empty");
  const head = rows[0].some((cell) => Number.isNaN(Number(cell))) ? rows.shift() : undefined;
  const width = rows[0]?.length ?? 0;
  if (width < 2) throw new Error("the table needs two columns or more: values, then the label");
  const named = head?.findIndex((cell) => /^\W*(labels?|targets?|y)\W*$/i.test(cell)) ?? -1;
  const column = named < 0 ? width - 1 : named;
  const values = new Float64Array(rows.length * (width - 1));
  const labels = new Float64Array(rows.length);
  rows.forEach((cells, row) => {
    if (cells.length !== width) throw new Error(`row ${row + 1} has ${cells.length} columns, the first has ${width}`);
    let next = row * (width - 1);
    cells.forEach((cell, index) => {
      const number = Number(cell);
      if (cell.trim() === "" || Number.isNaN(number)) {
        throw new Error(`row ${row + 1}, column ${index + 1}: '${cell}' is not a number`);
      }
      if (index === column) labels[row] = number;
      else values[next++] = number;
    });
  });
  return { values: { data: values, dims: [rows.length, width - 1] }, labels: { data: labels, dims: [rows.length] } };
}
