/**
 * Trainer: a whole training run in one call, that a page can watch, pause and stop. The page stays responsive:
 * between steps the browser gets its turn.
 */
import { Batches, randomNumbers, shuffleInPlace } from "./batches.js";
import { sizeOf } from "./checkpoint/dtypes.js";
import { Module } from "./module.js";
import { Optimizer } from "./optimizer.js";
import { readHead } from "./runtime/protobuf.js";
import { readModel, Runtime } from "./runtime/sessions.js";
import {
  ConstantLRScheduler, CosineLRScheduler, LinearLRScheduler, OneCycleLRScheduler, PolynomialLRScheduler, StepLRScheduler,
} from "./schedulers.js";
import { CheckpointState } from "./state.js";

/** @typedef {import("./runtime/sessions.js").FileSource} FileSource */
/** @typedef {import("./batches.js").Dataset} Dataset */
/**
 * @typedef {{training: FileSource, eval: FileSource, optimizer: FileSource, checkpoint: FileSource,
 *   externalData?: Record<string, FileSource>}} ArtifactFiles
 * @typedef {{onStart?: (trainer: Trainer) => void, onStep?: (trainer: Trainer, row: any) => boolean | void,
 *   onEpoch?: (trainer: Trainer, row: any) => boolean | void, onEnd?: (trainer: Trainer) => void}} Callback
 * @typedef {{learningRate?: number, schedule?: string, warmup?: number, gradientAccumulationSteps?: number,
 *   accumulation?: number,
 *   clipNorm?: number | null, metrics?: string[] | "auto", callbacks?: Callback[], seed?: number,
 *   onNonfinite?: "raise" | "skip" | "ignore", runtime?: Runtime}} TrainerOptions
 */

const SCHEDULES = ["constant", "linear", "cosine", "step", "one-cycle", "polynomial"];
const TURN = 24; // milliseconds of training between the browser's turns

export class Trainer {
  /** @param {Module} module @param {Optimizer} optimizer @param {TrainerOptions} options */
  constructor(module, optimizer, {
    learningRate = 1e-3, schedule = "constant", warmup = 0, accumulation = 1, gradientAccumulationSteps = accumulation,
    clipNorm, metrics = [], callbacks = [], seed = 0,
  } = {}) {
    if (!(Number.isInteger(gradientAccumulationSteps) && gradientAccumulationSteps >= 1)) {
      throw new RangeError(`gradientAccumulationSteps is ${gradientAccumulationSteps}: it must be 1 or more`);
    }
    const { labels, modelOutputs } = module._plan;
    const wanted = metrics === "auto" ? (labels.length && modelOutputs.length ? ["accuracy"] : []) : metrics;
    const unknown = wanted.find((name) => name !== "accuracy");
    if (unknown) throw new RangeError(`no metric '${unknown}': there is accuracy`);
    this.module = module;
    this.optimizer = optimizer;
    this.state = module._state;
    this.learningRate = learningRate;
    this.callbacks = callbacks;
    /** Rows of what happened. @type {{steps: any[], epochs: any[]}} */
    this.history = { steps: [], epochs: [] };
    this.epoch = 0;
    this.step = 0;
    this.totalSteps = 0;
    this.schedule = schedule;
    this._settings = { warmup, gradientAccumulationSteps, metrics: wanted, seed };
    if (clipNorm !== undefined) optimizer._updater.clipNorm = clipNorm;
    /** @type {(() => void) | null} set while paused */
    this._wake = null;
    /** @type {Promise<void> | null} */
    this._paused = null;
    this._stopped = false;
    this._turn = 0;
  }

  /**
   * A trainer for what `generate_artifacts` wrote: the address of the directory, or the four files.
   * @param {string | URL | ArtifactFiles} artifacts @param {TrainerOptions} [options]
   */
  static async create(artifacts, options = {}) {
    const files = artifactFiles(artifacts);
    const state = await CheckpointState.load(files.checkpoint);
    const runtime = options.runtime ?? (await Runtime.load());
    const module = await Module.create(files.training, state, files.eval, {
      runtime, seed: options.seed, onNonfinite: options.onNonfinite, outputs: await scoreOutputs(files, options),
      externalData: files.externalData,
    });
    const optimizer = await Optimizer.create(files.optimizer, module);
    return new Trainer(module, optimizer, options);
  }

  /** Whether a run is waiting for `resume()`. */
  get paused() {
    return this._paused !== null;
  }

  /** Let a run wait after the step that is running. */
  pause() {
    this._paused ??= new Promise((resolve) => {
      this._wake = resolve;
    });
  }

  /** Let a paused run go on. */
  resume() {
    this._wake?.();
    this._wake = this._paused = null;
  }

  /** End a run after the step that is running. */
  stop() {
    this._stopped = true;
    this.resume();
  }

  /**
   * Train for some epochs and return the history. A second call trains on, with a schedule of its own.
   * @param {Dataset} trainData @param {Dataset | null} [evalData]
   * @param {{epochs?: number, batchSize?: number, shuffle?: boolean}} [options]
   */
  async fit(trainData, evalData = null, { epochs = 1, batchSize = 32, shuffle = true } = {}) {
    if (!(Number.isInteger(epochs) && epochs >= 1)) throw new RangeError(`epochs is ${epochs}: it must be 1 or more`);
    const names = this.module._plan.inputs;
    const batches = new Batches(trainData, names, { batchSize, shuffle, seed: this._settings.seed });
    const evaluation = evalData === null ? null : new Batches(evalData, names, { batchSize });
    this.epoch = this.step = 0;
    this._stopped = false;
    this.totalSteps = Math.ceil(batches.count / this._settings.gradientAccumulationSteps) * epochs;
    const scheduler = this._makeSchedule();
    this.callbacks.forEach((callback) => callback.onStart?.(this));
    try {
      while (this.epoch < epochs && !this._stopped) {
        const row = await this._runEpoch(batches, scheduler);
        if (evaluation) {
          const { loss, ...figures } = await this.evaluate(evaluation);
          Object.assign(row, { evalLoss: loss, ...figures });
        }
        this.epoch += 1;
        this.history.epochs.push(row);
        if (this.callbacks.map((callback) => callback.onEpoch?.(this, row)).includes(true)) this._stopped = true;
      }
    } finally {
      this.callbacks.forEach((callback) => callback.onEnd?.(this));
    }
    return this.history;
  }

  /**
   * The loss and the metrics over some data, dropout off.
   * @param {Dataset | Batches} data @param {{batchSize?: number}} [options]
   * @returns {Promise<{loss: number, accuracy?: number}>}
   */
  async evaluate(data, { batchSize = 64 } = {}) {
    const batches = data instanceof Batches ? data : new Batches(data, this.module._plan.inputs, { batchSize });
    const before = this.module.training;
    const wantsAccuracy = this._settings.metrics.includes("accuracy");
    const sum = { loss: 0, weight: 0, right: 0, labels: 0 };
    this.module.eval();
    try {
      for (const batch of batches.epoch()) {
        const { loss, outputs } = await this.module.run(...batch);
        const weight = batchWeight(this.module._plan, batch);
        if (weight) sum.loss += loss * weight; // without a label that counts there is no loss
        sum.weight += weight;
        if (wantsAccuracy) {
          const { right, labels } = countRight(this.module._plan, outputs, batch);
          sum.right += right;
          sum.labels += labels;
        }
        await this._yield();
      }
    } finally {
      this.module.train(before);
    }
    const figures = { loss: sum.loss / sum.weight };
    return wantsAccuracy ? { ...figures, accuracy: sum.right / sum.labels } : figures;
  }

  /** The numbers below `count` in an order that depends on the seed alone. @param {number} count */
  shuffled(count) {
    const order = Array.from({ length: count }, (_, index) => index);
    shuffleInPlace(order, randomNumbers(this._settings.seed));
    return order;
  }

  /** Free the sessions. */
  async release() {
    this.stop();
    await this.module.release();
  }

  /** @param {Batches} batches @param {import("./schedulers.js").LRScheduler} scheduler */
  async _runEpoch(batches, scheduler) {
    const started = performance.now();
    const plan = this.module._plan;
    /** @type {{loss: number, weight: number}[]} batches whose gradients are added up at the moment */
    let window = [];
    let windowBatches = 0;
    const size = this._settings.gradientAccumulationSteps;
    const epoch = { loss: 0, weight: 0, batches: 0, samples: 0 };
    this.module.train();
    for (const batch of batches.epoch(this.epoch)) {
      const weight = batchWeight(plan, batch);
      // Dropout goes by the number of the batch in the run, as in Python: the last update of an epoch may have fewer.
      this.module._steps = this.step * size + windowBatches;
      windowBatches += 1;
      epoch.batches += 1;
      epoch.samples += batch[0].dims[0];
      if (weight) {
        const last = window.at(-1)?.weight ?? weight;
        // each sample counts the same: what is there counts in units of the next batch
        if (last !== weight) await this.module._scaleGradients(last / weight);
        const { loss } = await this.module.run(...batch);
        window.push({ loss, weight });
        epoch.loss += loss * weight;
        epoch.weight += weight;
      }
      if (windowBatches < size && epoch.batches !== batches.count) continue;
      windowBatches = 0;
      if (!window.length) continue; // no label that counts
      const row = await this._update(window, scheduler);
      this.module._steps = this.step * size;
      window = [];
      this.history.steps.push(row);
      if (this.callbacks.map((callback) => callback.onStep?.(this, row)).includes(true)) this._stopped = true;
      await this._yield();
      if (this._stopped) break;
    }
    const seconds = (performance.now() - started) / 1000;
    return {
      epoch: this.epoch + 1, step: this.step, loss: epoch.loss / epoch.weight,
      learningRate: this.optimizer.getLearningRate(), seconds,
      samplesPerSecond: epoch.samples / Math.max(seconds, 1e-9),
    };
  }

  /** @param {{loss: number, weight: number}[]} window @param {import("./schedulers.js").LRScheduler} scheduler */
  async _update(window, scheduler) {
    const learningRate = this.optimizer.getLearningRate();
    const weight = window.reduce((sum, part) => sum + part.weight, 0);
    this.optimizer.gradientScale = window[window.length - 1].weight / weight;
    await this.optimizer.step();
    this.module.lazyResetGrad();
    scheduler.step();
    this.step += 1;
    const loss = window.reduce((sum, part) => sum + part.loss * part.weight, 0) / weight;
    return { step: this.step, epoch: this.epoch + 1, loss, learningRate, gradientNorm: this.optimizer.gradientNorm };
  }

  /** Give the browser its turn now and then, and wait while paused. */
  async _yield() {
    if (performance.now() - this._turn > TURN) {
      await new Promise((resolve) => setTimeout(resolve));
      this._turn = performance.now();
    }
    if (this._paused) await this._paused;
  }

  _makeSchedule() {
    const { schedule } = this;
    const { warmup } = this._settings;
    if (!SCHEDULES.includes(schedule)) {
      throw new RangeError(`no schedule '${schedule}': there are ${SCHEDULES.join(", ")}`);
    }
    const total = this.totalSteps;
    const rate = this.learningRate;
    const steps = warmup > 0 && warmup < 1 ? Math.round(warmup * total) : Math.floor(warmup);
    const options = { totalStepCount: total, warmupStepCount: steps };
    const { optimizer } = this;
    this.state._data.extras.delete("scheduler"); // of an earlier run: this one starts its own
    if (schedule === "linear") return new LinearLRScheduler(optimizer, steps, total, rate);
    if (schedule === "cosine") return new CosineLRScheduler(optimizer, rate, options);
    if (schedule === "step") {
      return new StepLRScheduler(optimizer, rate, { stepSize: Math.max(1, Math.floor(total / 3)), warmupStepCount: steps });
    }
    if (schedule === "polynomial") return new PolynomialLRScheduler(optimizer, rate, { ...options, power: 2 });
    if (schedule === "one-cycle") return new OneCycleLRScheduler(optimizer, rate, { totalStepCount: total });
    return new ConstantLRScheduler(optimizer, rate, { warmupStepCount: steps });
  }
}

/** @param {string | URL | ArtifactFiles} artifacts @returns {ArtifactFiles} */
export function artifactFiles(artifacts) {
  if (typeof artifacts !== "string" && !(artifacts instanceof URL)) return artifacts;
  const base = String(artifacts).replace(/\/*$/, "/");
  return {
    training: `${base}training_model.onnx`, eval: `${base}eval_model.onnx`, optimizer: `${base}optimizer_model.onnx`,
    checkpoint: `${base}checkpoint`,
  };
}

/** The scores that accuracy is counted from. @param {ArtifactFiles} files @param {TrainerOptions} options */
async function scoreOutputs(files, { metrics = [] }) {
  if (metrics !== "auto" && !metrics.includes("accuracy")) return [];
  const { bytes, path } = await readModel(files.eval, "eval");
  const names = JSON.parse(readHead(bytes, path).metadata.get("onward.outputs") ?? "[]");
  return names.slice(0, 1);
}

/**
 * How many terms the mean of a batch's loss has: labels that are not ignored, or samples.
 * @param {import("./runtime/plan.js").Plan} plan @param {any[]} batch
 */
function batchWeight(plan, batch) {
  const [label] = plan.labels;
  if (!label) return batch[0].dims[0];
  const labels = batch[label.index].data;
  if (label.ignored === undefined) return labels.length;
  return labels.reduce((/** @type {number} */ n, /** @type {any} */ v) => n + Number(Number(v) !== label.ignored), 0);
}

/**
 * How many labels have the highest score, of those that are not ignored. Classes are the last axis of the scores,
 * or the second one.
 * @param {import("./runtime/plan.js").Plan} plan @param {Record<string, {data: any, dims: number[]}>} outputs
 * @param {any[]} batch
 */
function countRight(plan, outputs, batch) {
  const [scores] = Object.values(outputs);
  const [label] = plan.labels;
  if (!scores || !label) throw new RangeError("accuracy needs a model that gives scores and takes class numbers");
  const { dims, data } = scores;
  const axis = dims[dims.length - 1] === label.classes ? dims.length - 1 : 1;
  const stride = sizeOf(dims.slice(axis + 1));
  const found = { right: 0, labels: 0 };
  batch[label.index].data.forEach((/** @type {any} */ value, /** @type {number} */ place) => {
    if (Number(value) === label.ignored) return;
    const start = Math.floor(place / stride) * stride * label.classes + (place % stride);
    let best = 0;
    for (let k = 1; k < label.classes; k++) {
      if (data[start + k * stride] > data[start + best * stride]) best = k;
    }
    found.labels += 1;
    found.right += Number(best === Number(value));
  });
  return found;
}
