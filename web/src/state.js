/** CheckpointState: parameters by name, properties, and the file they come from and go to. */
import { CheckpointError, OnwardError } from "./errors.js";
import { decode, encode } from "./checkpoint/codec.js";
import { CheckpointData } from "./checkpoint/data.js";
import { BUFFER } from "./runtime/plan.js";
import { readSource } from "./runtime/sessions.js";

/** @typedef {import("./checkpoint/data.js").StoredTensor} StoredTensor */

/** One parameter: its name, its numbers, its gradient. */
export class Parameter {
  /** @param {string} name @param {CheckpointState} state */
  constructor(name, state) {
    this.name = name;
    this._state = state;
  }

  /** The shape. */
  get dims() {
    return [...this._state._tensor(this.name).dims];
  }

  /** A copy of the numbers; assign to change them. */
  get data() {
    this._state._requireFresh(this.name, `'${this.name}'`);
    return this._state._tensor(this.name).data.slice();
  }

  set data(values) {
    const { data } = this._state._tensor(this.name);
    if (values?.constructor !== data.constructor) {
      throw new OnwardError(
        `parameter '${this.name}' takes a ${data.constructor.name}, got ${values?.constructor?.name ?? values}`,
      );
    }
    if (values.length !== data.length) {
      throw new OnwardError(`parameter '${this.name}' has ${data.length} numbers, got ${values.length}`);
    }
    data.set(values);
    this._state._module?._memory.touch(this.name);
  }

  /** A copy of the accumulated gradient: zeros before the first step, null where frozen. */
  get grad() {
    if (!this.requiresGrad) return null;
    const view = this._state._module?._gradients.views.get(this.name);
    if (view) this._state._requireFresh(this.name + BUFFER, `the gradient of '${this.name}'`);
    return view ? view.slice() : new Float32Array(this._state._tensor(this.name).data.length);
  }

  /** Whether training changes this parameter. */
  get requiresGrad() {
    return this._state._data.trainable.has(this.name);
  }
}

/** The user's own values in a checkpoint: numbers (64-bit integers, 32-bit floats) or text by name. */
export class Properties {
  /** @param {CheckpointData} data */
  constructor(data) {
    this._data = data;
  }

  /** @param {string} name */
  get(name) {
    return this._data.properties.get(name);
  }

  /** @param {string} name @param {number | bigint | string} value */
  set(name, value) {
    if (typeof name !== "string" || !name) throw new TypeError("a property's name is a text that is not empty");
    if (name.startsWith("onward.")) throw new RangeError(`property '${name}': names that start with 'onward.' are reserved`);
    if (!["number", "bigint", "string"].includes(typeof value)) {
      throw new TypeError(`property '${name}': a checkpoint holds numbers and texts, not ${typeof value}`);
    }
    if (typeof value === "bigint" && BigInt.asIntN(64, value) !== value) {
      throw new RangeError(`property '${name}': ${value} does not fit into 64 bits`);
    }
    if (typeof value === "number" && Number.isFinite(value) && !Number.isFinite(Math.fround(value))) {
      throw new RangeError(`property '${name}': ${value} does not fit into a 32-bit float`);
    }
    this._data.properties.set(name, value);
    return this;
  }

  /** @param {string} name */
  has(name) {
    return this._data.properties.has(name);
  }

  /** @param {string} name */
  delete(name) {
    this._data.floats.delete(name);
    return this._data.properties.delete(name);
  }

  get size() {
    return this._data.properties.size;
  }

  [Symbol.iterator]() {
    return this._data.properties.entries();
  }
}

/** What training changes and what a checkpoint holds. Made by `load`. */
export class CheckpointState {
  /** @param {CheckpointData} data @param {boolean} [sealed] */
  constructor(data, sealed = true) {
    if (!(data instanceof CheckpointData)) throw new TypeError("CheckpointState is made by CheckpointState.load");
    this._data = data;
    /** Whether the file had a checksum. Those of ONNX Runtime have none: damaged values would go unnoticed. */
    this.sealed = sealed;
    /** @type {import("./module.js").Module | null} */
    this._module = null;
    /** @type {Map<string, Parameter>} */
    this.parameters = new Map(
      [...data.trainable.keys(), ...data.frozen.keys()].map((name) => [name, new Parameter(name, this)]),
    );
    this.properties = new Properties(data);
  }

  /**
   * Read a checkpoint, verified before anything of it is used.
   * @param {import("./runtime/sessions.js").FileSource} source
   */
  static async load(source) {
    const { bytes, path } = await readSource(source, (name, reason) => new CheckpointError(name, reason));
    const { data, sealed } = await decode(bytes, path);
    return new CheckpointState(data, sealed);
  }

  /**
   * The bytes of a checkpoint file, which Python and this package load.
   * @param {CheckpointState} state @param {{includeOptimizerState?: boolean}} [options]
   */
  static async save(state, { includeOptimizerState = false } = {}) {
    if (!(state instanceof CheckpointState)) throw new TypeError("save takes a CheckpointState");
    await state.sync();
    return encode(state._toData(includeOptimizerState));
  }

  /** Copy here what a GPU holds: after steps on WebGPU, before parameters and gradients are read. */
  async sync() {
    await this._module?._pull();
  }

  /** Whether only names and types of the parameters are known. */
  get isNominal() {
    return this._data.nominal;
  }

  /** @param {boolean} includeOptimizerState */
  _toData(includeOptimizerState) {
    const data = this._data;
    const saved = new CheckpointData();
    Object.assign(saved, {
      trainable: data.trainable, frozen: data.frozen, properties: data.properties, floats: data.floats,
      nominal: data.nominal,
    });
    if (!includeOptimizerState || data.nominal) return saved;
    if (this._module) this._module._describeProgress(saved);
    else Object.assign(saved, { optimizer: data.optimizer, extras: data.extras, accumulation: data.accumulation });
    return saved;
  }

  /** @param {string} name of a tensor of training @param {string} what for the message */
  _requireFresh(name, what) {
    if (this._module?._memory.has(name) && this._module._memory.isStale(name)) {
      throw new OnwardError(`${what} is on the GPU, and was changed there: await state.sync() first`);
    }
  }

  /** @param {string} name @returns {StoredTensor} */
  _tensor(name) {
    const found = this._data.trainable.get(name) ?? this._data.frozen.get(name);
    if (!found) throw new OnwardError(`the checkpoint has no parameter '${name}'`);
    if (found.data === null) {
      throw new OnwardError(`the state is nominal: it has no value for '${name}'. Load the parameters first.`);
    }
    return found;
  }
}
