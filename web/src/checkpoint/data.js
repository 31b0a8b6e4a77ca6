/**
 * What a checkpoint says, as plain data: the mirror of Python's `CheckpointData`. Maps keep their order in the
 * file. Knows nothing of bytes.
 */

/**
 * @typedef {{dtype: number, dims: number[], data: any}} StoredTensor `dtype` is an ONNX code; `data` a typed array
 * @typedef {{name: string, step: bigint, initialLearningRate: number, slots: Map<string, Map<string, StoredTensor>>}}
 *   OptimizerGroup
 */

export class CheckpointData {
  constructor() {
    /** @type {Map<string, StoredTensor>} */
    this.trainable = new Map();
    /** @type {Map<string, StoredTensor>} */
    this.frozen = new Map();
    /** @type {OptimizerGroup[]} */
    this.optimizer = [];
    /** @type {Map<string, number | bigint | string>} the user's own values */
    this.properties = new Map();
    /** @type {Set<string>} properties that are floats in the file even where their value is whole */
    this.floats = new Set();
    /** @type {Map<string, string>} Onward's own scalars in their spelling, `i:3`, `f:0.1`, `s:text` */
    this.extras = new Map();
    /** @type {Map<string, StoredTensor>} gradients of an unfinished accumulation */
    this.accumulation = new Map();
    this.nominal = false;
  }
}

/** The spelling of a float: the shortest that gives the same number, as Python writes it. @param {number} value */
export function spellFloat(value) {
  if (Number.isNaN(value)) return "f:nan";
  if (!Number.isFinite(value)) return value > 0 ? "f:inf" : "f:-inf";
  if (Object.is(value, -0)) return "f:-0.0";
  const [mantissa, exponent] = value.toExponential().split("e");
  const power = Number(exponent);
  if (value !== 0 && (power < -4 || power >= 16)) {
    return `f:${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }
  if (power < 0 && value !== 0) {
    const digits = mantissa.replace("-", "").replace(".", "");
    return `f:${value < 0 ? "-" : ""}0.${"0".repeat(-power - 1)}${digits}`;
  }
  const text = String(value);
  return `f:${text.includes(".") ? text : `${text}.0`}`;
}

/** The number behind a spelling; undefined where there is none. @param {string | undefined} spelled */
export function extraNumber(spelled) {
  if (spelled === undefined || !/^[if]:/.test(spelled)) return undefined;
  const body = spelled.slice(2);
  return { inf: Infinity, "-inf": -Infinity, nan: NaN }[body] ?? Number(body);
}

/** Whether a text is the spelling of a scalar. @param {string} text */
export function isSpelling(text) {
  if (text.startsWith("s:")) return true;
  if (/^i:[+-]?\d+$/.test(text)) return true;
  return /^f:([+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan)$/i.test(text);
}
