/** Optimizer: applies the optimizer model to a module's parameters. */
import { extraNumber, spellFloat } from "./checkpoint/data.js";
import { Module } from "./module.js";
import { makeUpdater } from "./update.js";

// Some gradient rules clamp infinities to the largest float32: a norm beyond this is one of those.
const OVERFLOW = 1e60;

/** Updates the trainable parameters of a module from its gradients. Made by `Optimizer.create`. */
export class Optimizer {
  /** @param {Module} module @param {Awaited<ReturnType<typeof makeUpdater>>} updater */
  constructor(module, updater) {
    this._module = module;
    this._updater = updater;
    this._initialRate = 1e-3;
    /** @type {import("./runtime/sessions.js").FileSource} */
    this._source = "";
    /** @type {import("./schedulers.js").LRScheduler | null} */
    this._scheduler = null;
    /** What gradients are multiplied by: 1 / (number of accumulated steps) averages them. */
    this.gradientScale = 1;
    /** ‖g‖ of the last step, where it was computed. @type {number | null} */
    this.gradientNorm = null;
    this._restore(module._state._data);
    module._optimizer = this;
  }

  /** @param {import("./runtime/sessions.js").FileSource} optimizerModel @param {Module} module */
  static async create(optimizerModel, module) {
    if (!(module instanceof Module)) throw new TypeError("Optimizer takes a Module");
    const optimizer = new Optimizer(module, await module._onGpuOrHere(() => makeUpdater(optimizerModel, module)));
    optimizer._source = optimizerModel;
    return optimizer;
  }

  /**
   * Update the parameters; false where a gradient was not finite and the update was skipped. Call
   * `module.lazyResetGrad()` after it.
   */
  async step() {
    const module = this._module;
    return module._exclusive.run(async () => {
      let scale = this.gradientScale;
      const { clipNorm } = this._updater;
      if (clipNorm !== null || module.onNonfinite !== "ignore") {
        const square = await module._onGpuOrHere(() => module._memory.squaredNorm(module._gradients));
        const norm = Math.sqrt(square > OVERFLOW || Number.isNaN(square) ? Infinity : square) * scale;
        this.gradientNorm = norm;
        if (module.onNonfinite !== "ignore") {
          if (module._invalid === null && !Number.isFinite(norm)) {
            await module._memory.pull();
            module._refuse(this._blame());
          }
          if (module._takeInvalid() !== null) return false;
        }
        if (clipNorm !== null) scale *= Math.min(clipNorm / (norm + 1e-6), 1);
      }
      await module._onGpuOrHere(() => this._updater.run(scale));
      return true;
    });
  }

  /** @param {number} rate */
  setLearningRate(rate) {
    if (!Number.isFinite(rate)) throw new RangeError(`the learning rate is ${rate}: it must be a finite number`);
    this._updater.learningRate = rate;
  }

  getLearningRate() {
    return this._updater.learningRate;
  }

  /** Free the session. Module.release does it too. */
  async release() {
    this._module._optimizer = null;
    await this._updater.release();
  }

  _blame() {
    const names = Array.from(this._module._gradients.views)
      .filter(([, view]) => !view.every(Number.isFinite))
      .map(([name]) => name);
    const more = names.length > 1 ? ` (+${names.length - 1} more)` : "";
    const which = names.length ? `of '${names[0]}'${more} ` : "";
    return `the gradient ${which}is not finite at training step ${this._module._steps}`;
  }

  /** Make the update again where the module's memory is now, with the same state. */
  async _reopen() {
    const { clipNorm, learningRate, step } = this._updater;
    const slots = this._updater.slots();
    await this._updater.release();
    this._updater = await makeUpdater(this._source, this._module);
    this._updater.load(step, slots);
    Object.assign(this._updater, { clipNorm, learningRate });
  }

  /** @param {import("./checkpoint/data.js").CheckpointData} data */
  _restore(data) {
    const group = data.optimizer.find(({ name }) => name === "group0");
    if (!group) return;
    this._updater.load(group.step, group.slots);
    this._initialRate = group.initialLearningRate;
    this.setLearningRate(extraNumber(data.extras.get("learning_rate")) ?? group.initialLearningRate);
  }

  /** @param {import("./checkpoint/data.js").CheckpointData} saved */
  _describeProgress(saved) {
    saved.optimizer = [{
      name: "group0", step: this._updater.step, initialLearningRate: this._initialRate, slots: this._updater.slots(),
    }];
    saved.extras.set("learning_rate", spellFloat(this.getLearningRate()));
    if (this._scheduler) saved.extras.set("scheduler", `s:${this._scheduler.toJSON()}`);
  }
}
