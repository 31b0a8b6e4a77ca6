/**
 * Learning-rate schedules: a factor for each step, times the initial rate. A new one is a subclass with
 * `factor` whose constructor ends with `apply()`. Their progress is part of the checkpoint, under the names that
 * Python gives them.
 */

/** Sets the optimizer's rate to initialLr·factor(step), beginning with that of step 0. */
export class LRScheduler {
  /**
   * @param {import("./optimizer.js").Optimizer} optimizer @param {number} initialLr
   * @param {{warmupStepCount?: number}} [options] warmup rises linearly from 0
   */
  constructor(optimizer, initialLr, { warmupStepCount = 0 } = {}) {
    if (!(warmupStepCount >= 0)) throw new RangeError(`warmupStepCount is ${warmupStepCount}: it must not be negative`);
    if (!(Number.isFinite(initialLr) && initialLr >= 0)) {
      throw new RangeError(`initialLr is ${initialLr}: it must be a finite number, 0 or more`);
    }
    this._optimizer = optimizer;
    this._initialLr = initialLr;
    this._warmup = warmupStepCount;
    this._step = 0;
    const resumed = optimizer._module._state._data.extras.get("scheduler");
    optimizer._scheduler = this;
    optimizer._initialRate = initialLr;
    if (resumed?.startsWith("s:")) {
      const saved = JSON.parse(resumed.slice(2));
      if (saved.kind === this.kind) this._step = saved.step;
    }
  }

  /** The name in checkpoints. */
  get kind() {
    return this.constructor.name;
  }

  /** The share of the initial rate at a step, warmup included in the count. @param {number} step @returns {number} */
  factor(step) {
    throw new Error(`a schedule needs factor(${step})`);
  }

  /** Go one step on; call it after `optimizer.step()`. */
  step() {
    this._step += 1;
    this.apply();
  }

  /** The learning rate at a step. @param {number} step */
  rate(step) {
    if (step < this._warmup) return (this._initialLr * step) / Math.max(1, this._warmup);
    return this._initialLr * this.factor(step);
  }

  /** What a checkpoint keeps of the schedule. */
  toJSON() {
    return `{"kind": ${JSON.stringify(this.kind)}, "step": ${this._step}}`;
  }

  /** Set the optimizer's rate to that of the present step; a subclass does it at the end of its constructor. */
  apply() {
    this._optimizer.setLearningRate(this.rate(this._step));
  }

  /** How far a run of `total` steps has come after the warmup. @param {number} step @param {number} total */
  _share(step, total) {
    return Math.min(1, (step - this._warmup) / Math.max(1, total - this._warmup));
  }
}

/** @typedef {import("./optimizer.js").Optimizer} Optimizer */

/** Rises to the initial rate over the warmup, then falls linearly to 0 at the last step. */
export class LinearLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} warmupStepCount @param {number} totalStepCount @param {number} initialLr */
  constructor(optimizer, warmupStepCount, totalStepCount, initialLr) {
    const total = positive("totalStepCount", totalStepCount);
    super(optimizer, initialLr, { warmupStepCount });
    this._total = total;
    this.apply();
  }

  get kind() {
    return "LinearLRScheduler";
  }

  /** (total − s) / (total − warmup), at least 0 @param {number} step */
  factor(step) {
    return Math.max(0, (this._total - step) / Math.max(1, this._total - this._warmup));
  }
}

/** The initial rate, after warmup. */
export class ConstantLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} initialLr @param {{warmupStepCount?: number}} [options] */
  constructor(optimizer, initialLr, options) {
    super(optimizer, initialLr, options);
    this.apply();
  }

  get kind() {
    return "ConstantLRScheduler";
  }

  /** 1 */
  factor() {
    return 1;
  }
}

/** Multiplies the rate by `gamma` every `stepSize` steps. */
export class StepLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} initialLr @param {{stepSize: number, gamma?: number, warmupStepCount?: number}} options */
  constructor(optimizer, initialLr, { stepSize, gamma = 0.1, warmupStepCount = 0 }) {
    const size = positive("stepSize", stepSize);
    super(optimizer, initialLr, { warmupStepCount });
    this._size = size;
    this._gamma = gamma;
    this.apply();
  }

  get kind() {
    return "StepLRScheduler";
  }

  /** γ^⌊(s − warmup)/size⌋ @param {number} step */
  factor(step) {
    return this._gamma ** Math.floor((step - this._warmup) / this._size);
  }
}

/** Falls along half a cosine to `finalFactor` of the initial rate. */
export class CosineLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} initialLr @param {{totalStepCount: number, warmupStepCount?: number, finalFactor?: number}} options */
  constructor(optimizer, initialLr, { totalStepCount, warmupStepCount = 0, finalFactor = 0 }) {
    const total = positive("totalStepCount", totalStepCount);
    super(optimizer, initialLr, { warmupStepCount });
    this._total = total;
    this._final = finalFactor;
    this.apply();
  }

  get kind() {
    return "CosineLRScheduler";
  }

  /** final + (1 − final)·½(1 + cos πt), t the share of the way @param {number} step */
  factor(step) {
    return this._final + (1 - this._final) * 0.5 * (1 + Math.cos(Math.PI * this._share(step, this._total)));
  }
}

/** Falls as a power of the way that is left. */
export class PolynomialLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} initialLr @param {{totalStepCount: number, power?: number, warmupStepCount?: number, finalFactor?: number}} options */
  constructor(optimizer, initialLr, { totalStepCount, power = 1, warmupStepCount = 0, finalFactor = 0 }) {
    const total = positive("totalStepCount", totalStepCount);
    super(optimizer, initialLr, { warmupStepCount });
    this._total = total;
    this._power = power;
    this._final = finalFactor;
    this.apply();
  }

  get kind() {
    return "PolynomialLRScheduler";
  }

  /** final + (1 − final)·(1 − t)^power @param {number} step */
  factor(step) {
    return this._final + (1 - this._final) * (1 - this._share(step, this._total)) ** this._power;
  }
}

/** Rises along a cosine to the maximum at `pctStart` of the way, then falls to almost nothing. */
export class OneCycleLRScheduler extends LRScheduler {
  /** @param {Optimizer} optimizer @param {number} maxLr @param {{totalStepCount: number, pctStart?: number, divFactor?: number, finalDivFactor?: number}} options */
  constructor(optimizer, maxLr, { totalStepCount, pctStart = 0.3, divFactor = 25, finalDivFactor = 1e4 }) {
    if (!(pctStart >= 0 && pctStart <= 1)) throw new RangeError(`pctStart is ${pctStart}: it must lie between 0 and 1`);
    const total = positive("totalStepCount", totalStepCount);
    super(optimizer, maxLr);
    this._total = total;
    this._options = { pctStart, divFactor, finalDivFactor };
    this.apply();
  }

  get kind() {
    return "OneCycleLRScheduler";
  }

  /** Cosine from 1/div to 1, then from 1 to 1/(div·finalDiv) @param {number} step */
  factor(step) {
    const { pctStart, divFactor, finalDivFactor } = this._options;
    const top = pctStart * this._total - 1;
    if (step <= top) return cosine(1 / divFactor, 1, step / Math.max(top, 1e-12));
    return cosine(1, 1 / (divFactor * finalDivFactor), Math.min(1, (step - top) / Math.max(this._total - 1 - top, 1e-12)));
  }
}

/** @param {number} start @param {number} stop @param {number} share */
function cosine(start, stop, share) {
  return stop + ((start - stop) / 2) * (1 + Math.cos(Math.PI * share));
}

/** @param {string} name @param {number} value */
function positive(name, value) {
  if (!(value > 0)) throw new RangeError(`${name} is ${value}: it must be positive`);
  return value;
}
