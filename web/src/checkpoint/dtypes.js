/**
 * Element types of tensors: ONNX TensorProto codes, the typed array that holds each, and onnxruntime's names.
 * Types that JavaScript has no numbers for (float16, bfloat16, float8) are kept as raw bits.
 */

/** @type {Map<number, {name: string, array: any, size: number}>} */
const TABLE = new Map([
  [1, { name: "float32", array: Float32Array, size: 4 }],
  [2, { name: "uint8", array: Uint8Array, size: 1 }],
  [3, { name: "int8", array: Int8Array, size: 1 }],
  [4, { name: "uint16", array: Uint16Array, size: 2 }],
  [5, { name: "int16", array: Int16Array, size: 2 }],
  [6, { name: "int32", array: Int32Array, size: 4 }],
  [7, { name: "int64", array: BigInt64Array, size: 8 }],
  [9, { name: "bool", array: Uint8Array, size: 1 }],
  [10, { name: "float16", array: Uint16Array, size: 2 }],
  [11, { name: "float64", array: Float64Array, size: 8 }],
  [12, { name: "uint32", array: Uint32Array, size: 4 }],
  [13, { name: "uint64", array: BigUint64Array, size: 8 }],
  [16, { name: "bfloat16", array: Uint16Array, size: 2 }],
  [17, { name: "float8e4m3fn", array: Uint8Array, size: 1 }],
  [18, { name: "float8e4m3fnuz", array: Uint8Array, size: 1 }],
  [19, { name: "float8e5m2", array: Uint8Array, size: 1 }],
  [20, { name: "float8e5m2fnuz", array: Uint8Array, size: 1 }],
]);

export const FLOAT = 1;
export const INT64 = 7;
export const BOOL = 9;

/** What is known of an ONNX data type code; undefined where a checkpoint cannot hold it. @param {number} code */
export function elementType(code) {
  return TABLE.get(code);
}

/** How many elements a shape has. @param {readonly number[]} dims */
export function sizeOf(dims) {
  return dims.reduce((product, dim) => product * dim, 1);
}
