/** What a training or evaluation model is made of, read from its inputs, outputs and metadata. */
import { ModelError } from "../errors.js";

export const BUFFER = "_grad.accumulation.buffer";
export const OUT = "_grad.accumulation.out";
export const RESET = "lazy_reset_grad";
export const SEED = "random_seed";

/**
 * @typedef {import("./protobuf.js").ValueInfo} ValueInfo
 * @typedef {{name: string, index: number, classes: number, ignored: number | undefined}} LabelRange
 */

/** Names by role, with shapes and types. */
export class Plan {
  /** @param {import("./protobuf.js").ModelHead} head @param {string} path */
  constructor(head, path) {
    const about = head.metadata;
    if (!about.has("onward.trainable")) {
      throw new ModelError(`'${path}' is not an artifact of Onward: make it with onward.artifacts.generate_artifacts`);
    }
    const read = (/** @type {string} */ key, /** @type {string} */ absent) => JSON.parse(about.get(key) ?? absent);
    const trainable = new Set(read("onward.trainable", "[]"));
    const known = new Set([...trainable, ...read("onward.frozen", "[]")]);
    const internal = (/** @type {string} */ name) => name.endsWith(BUFFER) || name === RESET || name === SEED;
    /** @type {Map<string, ValueInfo>} */
    this.values = new Map(head.inputs.map((value) => [value.name, value]));
    const names = [...this.values.keys()];
    /** What the user gives, in order. @type {string[]} */
    this.inputs = names.filter((name) => !known.has(name) && !internal(name));
    /** The loss, then the additional outputs. @type {string[]} */
    this.outputs = head.outputs.map((v) => v.name).filter((name) => !name.endsWith(OUT) && !name.endsWith(".next"));
    /** @type {string[]} */
    this.parameters = names.filter((name) => known.has(name));
    /** @type {string[]} */
    this.trainable = names.filter((name) => trainable.has(name));
    /** @type {string[]} */
    this.statistics = read("onward.statistics", "[]");
    /** Inputs of which the gradient is wanted. */
    this.inputGradients = this.inputs.filter((name) => this.values.has(name + BUFFER));
    this.random = names.includes(SEED);
    /** The outputs that the model had before a loss was put on it. @type {string[]} */
    this.modelOutputs = read("onward.outputs", "[]");
    /** @type {LabelRange[]} */
    this.labels = Object.entries(read("onward.labels", "{}"))
      .filter(([name]) => this.inputs.includes(name))
      .map(([name, { classes, ignore_index: ignored }]) => ({
        name, index: this.inputs.indexOf(name), classes, ignored,
      }));
  }

  /** The shape of a parameter. @param {string} name @returns {number[]} */
  shape(name) {
    const dims = this.values.get(name)?.dims;
    if (!dims || dims.some((dim) => typeof dim !== "number")) {
      throw new ModelError(`parameter '${name}' has no fixed shape in the training model`);
    }
    return /** @type {number[]} */ (dims);
  }
}
