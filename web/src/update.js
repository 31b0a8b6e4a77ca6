/** Runs the optimizer model over a module's parameters. */
import { elementType, sizeOf } from "./checkpoint/dtypes.js";
import { ModelError, OnwardError } from "./errors.js";
import { FlatBuffer } from "./runtime/flat.js";
import { readHead } from "./runtime/protobuf.js";
import { readExternal, readModel } from "./runtime/sessions.js";

/** @typedef {import("./checkpoint/data.js").StoredTensor} StoredTensor */
/** @typedef {import("./module.js").Module} Module */
/** @typedef {Map<string, Map<string, StoredTensor>>} Slots state tensors by parameter and slot */

// Elements of one run: large enough that calls do not matter, small enough that their memory does not.
const BLOCK = 1 << 18;

/**
 * The updater that fits an optimizer model's form.
 * @param {import("./runtime/sessions.js").FileSource} source @param {Module} module
 */
export async function makeUpdater(source, module) {
  const { bytes, path } = await readModel(source, "optimizer");
  const head = readHead(bytes, path);
  const about = head.metadata.get("onward.optimizer");
  if (about === undefined) {
    throw new ModelError(`'${path}' is not an optimizer model of Onward: make it with onward.artifacts`);
  }
  const options = JSON.parse(about);
  if (options.sequences) {
    throw new ModelError(
      "this optimizer model works on sequences of tensors, which JavaScript cannot take: " +
        "use an optimizer of onward.optim",
    );
  }
  const externalData = await readExternal(source, head.external, path);
  const session = await module.runtime.session(bytes, "optimizer model", { gpu: false, externalData });
  return options.elementwise
    ? new FlatUpdater(module, session, options)
    : new NamedUpdater(module, session, options, head);
}

/** What both forms share: the scalars and the state's life. */
class Updater {
  /** @param {Module} module @param {any} session @param {any} options */
  constructor(module, session, options) {
    this._module = module;
    this._session = session;
    /** @type {number | null} */
    this.clipNorm = options.clip_norm;
    this.learningRate = 1e-3;
    this.step = 0n;
    this._Tensor = module.runtime.ort.Tensor;
    this._names = new Set(session.inputNames);
  }

  /** One update. @param {number} gradientScale */
  async run(gradientScale) {
    this.step += 1n;
    await this._apply({
      step: new this._Tensor("int64", BigInt64Array.of(this.step), [1]),
      gradient_scale: this._scalar(gradientScale),
    });
  }

  /** Take over the state of an earlier run. @param {bigint} step @param {Slots} slots */
  load(step, slots) {
    this.step = step;
    for (const [parameter, state] of this.slots()) {
      for (const [slot, tensor] of state) {
        const saved = slots.get(parameter)?.get(slot);
        if (!saved) continue;
        if (saved.dims.join() !== tensor.dims.join()) {
          throw new OnwardError(
            `the checkpoint's ${slot} of '${parameter}' has shape [${saved.dims}], the optimizer keeps ` +
              `[${tensor.dims}]: was it saved with another optimizer?`,
          );
        }
        tensor.data.set(saved.data);
      }
    }
  }

  /** The state tensors themselves. @returns {Slots} */
  slots() {
    throw new Error("not implemented");
  }

  async release() {
    await this._session.release();
  }

  /** @param {Record<string, any>} scalars @returns {Promise<void>} */
  async _apply(scalars) {
    throw new Error(`not implemented: ${Object.keys(scalars)}`);
  }

  /** @param {number} value */
  _scalar(value) {
    return new this._Tensor("float32", Float32Array.of(value), [1]);
  }

  /** @param {Record<string, any>} feeds */
  async _run(feeds) {
    return this._session.run(Object.fromEntries(Object.entries(feeds).filter(([name]) => this._names.has(name))));
  }
}

/** An elementwise rule over all parameters as one vector. */
class FlatUpdater extends Updater {
  /** @param {Module} module @param {any} session @param {any} options */
  constructor(module, session, options) {
    super(module, session, options);
    const shapes = new Map(module._plan.trainable.map((name) => [name, module._plan.shape(name)]));
    /** @type {Map<string, FlatBuffer>} */
    this._slots = new Map(options.slots.map((/** @type {string} */ slot) => [slot, new FlatBuffer(shapes)]));
    this._vectors = new Map([["parameter", module._parameters.vector]]);
    for (const [slot, flat] of this._slots) this._vectors.set(slot, flat.vector);
    this._blocks = this._makeBlocks(options).map((block) => this._bind(block));
  }

  slots() {
    const made = new Map();
    for (const name of this._module._parameters.views.keys()) {
      const dims = this._module._plan.shape(name);
      made.set(name, new Map(
        Array.from(this._slots, ([slot, flat]) => [slot, { dtype: 1, dims, data: flat.views.get(name) }]),
      ));
    }
    return made;
  }

  /** @param {Record<string, any>} scalars */
  async _apply(scalars) {
    for (const { feeds, views, scale } of this._blocks) {
      const rate = scale === 1 ? this.learningRate : Math.fround(this.learningRate) * scale;
      const results = await this._run({ ...scalars, ...feeds, learning_rate: this._scalar(rate) });
      for (const [name, view] of views) {
        view.set(results[`${name}.next`].data);
        results[`${name}.next`].dispose();
      }
    }
  }

  /** @param {{start: number, stop: number, scale: number, decay: number}} block */
  _bind({ start, stop, scale, decay }) {
    const views = new Map(Array.from(this._vectors, ([name, vector]) => [name, vector.subarray(start, stop)]));
    /** @type {Record<string, any>} */
    const feeds = { weight_decay: this._scalar(decay) };
    for (const [name, view] of views) feeds[name] = new this._Tensor("float32", view, [view.length]);
    const gradient = this._module._gradients.vector.subarray(start, stop);
    feeds.gradient = new this._Tensor("float32", gradient, [gradient.length]);
    return { feeds, views, scale };
  }

  /** Runs of parameters that share their settings, cut into blocks. @param {any} options */
  _makeBlocks(options) {
    const groupOf = new Map();
    for (const group of options.groups) for (const name of group.parameters) groupOf.set(name, group);
    const { spans, vector } = this._module._parameters;
    const names = [...spans.keys()];
    /** @type {{start: number, stop: number, group: any}[]} */
    const runs = [];
    names.forEach((name, index) => {
      const start = /** @type {[number, number]} */ (spans.get(name))[0];
      const stop = index + 1 < names.length ? (spans.get(names[index + 1])?.[0] ?? 0) : vector.length;
      const last = runs.at(-1);
      if (last && last.group === groupOf.get(name)) last.stop = stop;
      else runs.push({ start, stop, group: groupOf.get(name) });
    });
    return runs.flatMap(({ start, stop, group }) => {
      const blocks = [];
      for (let first = start; first < stop; first += BLOCK) {
        blocks.push({
          start: first,
          stop: Math.min(first + BLOCK, stop),
          scale: group?.learning_rate_scale ?? 1,
          decay: group?.weight_decay ?? options.weight_decay,
        });
      }
      return blocks;
    });
  }
}

/** A rule that sees whole parameters: the optimizer model has inputs and outputs for each by name. */
class NamedUpdater extends Updater {
  /** @param {Module} module @param {any} session @param {any} options @param {import("./runtime/protobuf.js").ModelHead} head */
  constructor(module, session, options, head) {
    super(module, session, options);
    const shapes = new Map(head.inputs.map((value) => [value.name, /** @type {number[]} */ (value.dims)]));
    /** @type {Slots} */
    this._slots = new Map();
    /** @type {Record<string, any>} */
    this._feeds = { weight_decay: this._scalar(options.weight_decay) };
    /** @type {Map<string, Float32Array>} */
    this._targets = new Map();
    for (const [name, view] of module._parameters.views) {
      const dims = module._plan.shape(name);
      this._targets.set(name, view);
      this._feeds[name] = new this._Tensor("float32", view, dims);
      this._feeds[`${name}_grad`] = new this._Tensor("float32", module._gradients.views.get(name), dims);
      const state = new Map();
      for (const slot of options.slots) {
        const slotDims = shapes.get(`${name}.${slot}`) ?? [];
        const data = new Float32Array(sizeOf(slotDims));
        state.set(slot, { dtype: 1, dims: slotDims, data });
        this._targets.set(`${name}.${slot}`, data);
        this._feeds[`${name}.${slot}`] = new this._Tensor(elementType(1)?.name, data, slotDims);
      }
      this._slots.set(name, state);
    }
  }

  slots() {
    return this._slots;
  }

  /** @param {Record<string, any>} scalars */
  async _apply(scalars) {
    const results = await this._run({ ...scalars, ...this._feeds, learning_rate: this._scalar(this.learningRate) });
    for (const [name, target] of this._targets) {
      target.set(results[`${name}.next`].data);
      results[`${name}.next`].dispose();
    }
  }
}
