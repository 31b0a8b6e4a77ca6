/** Runs the optimizer model over a module's parameters. */
import { sizeOf } from "./checkpoint/dtypes.js";
import { ModelError, OnwardError } from "./errors.js";
import { FlatBuffer } from "./runtime/flat.js";
import { BUFFER } from "./runtime/plan.js";
import { readHead, splitScalars } from "./runtime/protobuf.js";
import { readExternal, readModel } from "./runtime/sessions.js";

/** @typedef {import("./checkpoint/data.js").StoredTensor} StoredTensor */
/** @typedef {import("./module.js").Module} Module */
/** @typedef {Map<string, Map<string, StoredTensor>>} Slots state tensors by parameter and slot */

const SCALARS = ["learning_rate", "step", "gradient_scale", "weight_decay"];

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
  const resident = head.outputs.map(({ name }) => name);
  // what a step's few numbers come to is computed on the host, in float64, which shaders do not have
  const parts = module._memory.onGpu ? splitScalars(bytes, SCALARS) : null;
  const { runtime } = module;
  const session = await runtime.session(parts?.rest ?? bytes, "optimizer model", { externalData, resident });
  const program = parts && (await runtime.session(parts.scalars, "optimizer model", { gpu: false, externalData }));
  return options.elementwise
    ? new FlatUpdater(module, { session, program }, options)
    : new NamedUpdater(module, { session, program }, options, head);
}

/** @typedef {{session: any, program: any}} Sessions of the update, and of the numbers that it reads, if they are apart */

/** What both forms share: the scalars and the state's life. */
class Updater {
  /** @param {Module} module @param {Sessions} sessions @param {any} options */
  constructor(module, { session, program }, options) {
    this._module = module;
    this._memory = module._memory;
    this._session = session;
    this._program = program;
    /** @type {number | null} */
    this.clipNorm = options.clip_norm;
    this.learningRate = 1e-3;
    this.step = 0n;
    this._Tensor = module.runtime.ort.Tensor;
  }

  /** One update. @param {number} gradientScale */
  async run(gradientScale) {
    const step = this.step + 1n;
    await this._apply({
      step: new this._Tensor("int64", BigInt64Array.of(step), [1]),
      gradient_scale: this._scalar(gradientScale),
    });
    this.step = step;
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
    await this._program?.release();
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
    const of = (/** @type {any} */ session, /** @type {Record<string, any>} */ tensors) =>
      Object.fromEntries(session.inputNames.map((/** @type {string} */ name) => [name, tensors[name]]));
    const numbers = this._program ? await this._program.run(of(this._program, feeds)) : {};
    return this._session.run(of(this._session, { ...feeds, ...numbers }));
  }
}

/** An elementwise rule over all parameters as one vector. */
class FlatUpdater extends Updater {
  /** @param {Module} module @param {Sessions} sessions @param {any} options */
  constructor(module, sessions, options) {
    super(module, sessions, options);
    const shapes = new Map(module._plan.trainable.map((name) => [name, module._plan.shape(name)]));
    /** @type {Map<string, FlatBuffer>} */
    this._slots = new Map(options.slots.map((/** @type {string} */ slot) => [slot, new FlatBuffer(shapes)]));
    this._blocks = this._makeBlocks(options);
    this._blocks.forEach(({ start, stop }, index) => {
      for (const [slot, { vector }] of this._slots) {
        this._memory.add(`${slot} ${index}`, vector.subarray(start, stop), "float32", [stop - start]);
      }
    });
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
    for (const [index, block] of this._blocks.entries()) {
      try {
        await this._applyTo(index, block, scalars);
      } catch (error) {
        if (!index) throw error;
        throw new OnwardError("an update failed in its midst: load the last checkpoint", { cause: error });
      }
    }
  }

  /** @param {number} index @param {{start: number, stop: number, scale: number, decay: number}} block @param {Record<string, any>} scalars */
  async _applyTo(index, { start, stop, scale, decay }, scalars) {
    const { _parameters: parameters, _gradients: gradients } = this._module;
    const rate = scale === 1 ? this.learningRate : Math.fround(this.learningRate) * scale;
    /** @type {Record<string, any>} */
    const feeds = {
      ...scalars, learning_rate: this._scalar(rate), weight_decay: this._scalar(decay),
      parameter: await this._memory.gather(parameters, start, stop),
      gradient: await this._memory.gather(gradients, start, stop),
    };
    for (const slot of this._slots.keys()) feeds[slot] = await this._memory.feed(`${slot} ${index}`);
    const results = await this._run(feeds);
    await this._memory.scatter(parameters, start, results["parameter.next"]);
    for (const slot of this._slots.keys()) this._memory.take(`${slot} ${index}`, results[`${slot}.next`]);
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
    return runs.flatMap(({ start: from, stop: to, group }) =>
      this._module._parameters.blocks(this._memory.block, from, to).map(([start, stop]) => ({
        start, stop, scale: group?.learning_rate_scale ?? 1, decay: group?.weight_decay ?? options.weight_decay,
      })),
    );
  }
}

/** A rule that sees whole parameters: the optimizer model has inputs and outputs for each by name. */
class NamedUpdater extends Updater {
  /** @param {Module} module @param {Sessions} sessions @param {any} options @param {import("./runtime/protobuf.js").ModelHead} head */
  constructor(module, sessions, options, head) {
    super(module, sessions, options);
    const shapes = new Map(head.inputs.map((value) => [value.name, /** @type {number[]} */ (value.dims)]));
    /** @type {Slots} */
    this._slots = new Map();
    this._decay = this._scalar(options.weight_decay);
    for (const name of module._plan.trainable) {
      const state = new Map();
      for (const slot of options.slots) {
        const slotDims = shapes.get(`${name}.${slot}`) ?? [];
        const data = new Float32Array(sizeOf(slotDims));
        state.set(slot, { dtype: 1, dims: slotDims, data });
        this._memory.add(`${name}.${slot}`, data, "float32", slotDims);
      }
      this._slots.set(name, state);
    }
  }

  slots() {
    return this._slots;
  }

  /** @param {Record<string, any>} scalars */
  async _apply(scalars) {
    /** @type {Record<string, any>} */
    const feeds = { ...scalars, learning_rate: this._scalar(this.learningRate), weight_decay: this._decay };
    const changing = [];
    for (const [name, slots] of this._slots) {
      changing.push(name, ...Array.from(slots.keys(), (slot) => `${name}.${slot}`));
      feeds[`${name}_grad`] = await this._memory.feed(name + BUFFER);
    }
    for (const name of changing) feeds[name] = await this._memory.feed(name);
    const results = await this._run(feeds);
    for (const name of changing) this._memory.take(name, results[`${name}.next`]);
  }
}
