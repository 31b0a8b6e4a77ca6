/** What a call is given, made ready for a session; what is wrong with it, said in one sentence. */
import { BOOL, elementType, FLOAT, INT64, sizeOf } from "../checkpoint/dtypes.js";

/** @typedef {import("./plan.js").Plan} Plan */
/** @typedef {{data: any, dims: number[], type: string}} Feed */

/**
 * Tensors in the order of the plan's inputs. An input is a typed array (its shape is the model's), an array of
 * numbers, or an object with `data` and `dims`.
 * @param {Plan} plan @param {any[]} inputs @returns {Feed[]}
 */
export function prepare(plan, inputs) {
  if (inputs.length !== plan.inputs.length) {
    throw new RangeError(
      `the model takes ${plan.inputs.length} inputs (${plan.inputs.join(", ")}), got ${inputs.length}`,
    );
  }
  return plan.inputs.map((name, index) => {
    const value = inputs[index];
    const wanted = plan.values.get(name);
    if (value === null || value === undefined) throw new TypeError(`input '${name}' is missing`);
    const given = value.data !== undefined && value.dims !== undefined ? value : { data: value, dims: undefined };
    const code = wanted?.dtype || FLOAT;
    const data = convert(given.data, code, name);
    const dims = given.dims === undefined ? inferDims(data.length, wanted?.dims, name) : [...given.dims];
    if (sizeOf(dims) !== data.length) {
      throw new RangeError(`input '${name}' has ${data.length} numbers, its shape [${dims}] needs ${sizeOf(dims)}`);
    }
    checkDims(dims, wanted?.dims, name);
    return { data, dims, type: elementType(code)?.name ?? "float32" };
  });
}

/** Refuse class numbers that the model has no class for. @param {Plan} plan @param {Feed[]} feeds */
export function checkLabels(plan, feeds) {
  for (const { name, index, classes, ignored } of plan.labels) {
    const { data } = feeds[index];
    const isWide = data instanceof BigInt64Array;
    if (!isWide && !(data instanceof Int32Array)) continue;
    const [low, high] = isWide ? [0n, BigInt(classes)] : [0, classes];
    const skipped = ignored === undefined ? undefined : isWide ? BigInt(ignored) : ignored;
    for (let at = 0; at < data.length; at++) {
      if ((data[at] >= low && data[at] < high) || data[at] === skipped) continue;
      const hint = ignored === undefined ? "" : ` (or ${ignored}, which is ignored)`;
      throw new RangeError(
        `'${name}' has label ${data[at]} at ${at}: the model has ${classes} classes, ` +
          `so labels are 0 to ${classes - 1}${hint}`,
      );
    }
  }
}

/** Only what loses nothing that training could notice. @param {any} data @param {number} code @param {string} name */
function convert(data, code, name) {
  const Kind = elementType(code)?.array;
  if (!Kind) throw new TypeError(`input '${name}' has ONNX type ${code}, which JavaScript has no array for`);
  if (data instanceof Kind) return data;
  const listed = Array.isArray(data);
  const kind = data?.constructor?.name ?? typeof data;
  const isInteger = /^(Big)?U?[Ii]nt(8|16|32|64)(Clamped)?Array$/.test(kind) && kind !== "BigUint64Array";
  if (code === FLOAT && (listed || data instanceof Float64Array)) return Float32Array.from(data, Number);
  if (code === BOOL && listed) return Uint8Array.from(data, Number);
  if (code === INT64 && (isInteger || (listed && data.every(isWhole)))) return BigInt64Array.from(data, BigInt);
  if (Kind === Int32Array && !kind.startsWith("Big") && kind !== "Uint32Array" &&
      (isInteger || (listed && data.every(Number.isInteger)))) {
    return Int32Array.from(data);
  }
  throw new TypeError(`input '${name}' is ${kind}, the model takes ${Kind.name}`);
}

/** @param {number | bigint} value */
function isWhole(value) {
  return typeof value === "bigint" || Number.isInteger(value);
}

/** The model's own shape, with its one free dimension filled in. @param {number} size @param {(number | string)[] | undefined} declared @param {string} name */
function inferDims(size, declared, name) {
  const free = declared?.filter((dim) => typeof dim === "string").length ?? 0;
  const fixed = sizeOf(/** @type {number[]} */ (declared?.filter((dim) => typeof dim === "number") ?? []));
  if (!declared || free > 1 || (free === 1 && size % fixed)) {
    throw new RangeError(
      `input '${name}' of ${size} numbers does not say its shape` +
        `${declared ? ` (the model takes [${declared}])` : ""}: give {data, dims}`,
    );
  }
  return declared.map((dim) => (typeof dim === "number" ? dim : size / fixed));
}

/** @param {number[]} dims @param {(number | string)[] | undefined} declared @param {string} name */
function checkDims(dims, declared, name) {
  if (!declared) return;
  const fits = dims.length === declared.length &&
    dims.every((dim, i) => typeof declared[i] === "string" || declared[i] === dim);
  if (!fits) throw new RangeError(`input '${name}' has shape [${dims}], the model takes [${declared}]`);
}
