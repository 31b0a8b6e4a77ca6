/** WorkerTrainer: a Trainer in a Web Worker, so that the page stays responsive whatever a step takes. */
import { randomNumbers, shuffleInPlace } from "./batches.js";
import * as errors from "./errors.js";
import { artifactFiles } from "./trainer.js";

/** @typedef {import("./runtime/sessions.js").FileSource} FileSource */
/** @typedef {import("./batches.js").Dataset} Dataset */
/** @typedef {import("./trainer.js").Callback} Callback */
/** @typedef {import("./runtime/host.js").RuntimeOptions} RuntimeOptions */
/** @typedef {Omit<import("./trainer.js").TrainerOptions, "runtime"> & {runtime?: RuntimeOptions}} WorkerTrainerOptions */

/** What is known here of the trainer in the worker. @typedef {{model: any, sealed: boolean, runtime: any}} Facts */

/**
 * Trains in a worker with the methods of `Trainer`. Its callbacks hear of steps shortly after they were made. Made by
 * `WorkerTrainer.create`.
 */
export class WorkerTrainer {
  /** @param {Worker} worker @param {WorkerTrainerOptions} options */
  constructor(worker, { learningRate = 1e-3, schedule = "constant", callbacks = [], seed = 0 }) {
    this._worker = worker;
    this._seed = seed;
    /** @type {Map<number, {resolve: (value: any) => void, reject: (error: Error) => void}>} calls without an answer yet */
    this._calls = new Map();
    this._count = 0;
    /** Why the worker answers no more. @type {Error | null} */
    this._ended = null;
    this.learningRate = learningRate;
    this.schedule = schedule;
    this.callbacks = callbacks;
    this.history = { steps: /** @type {any[]} */ ([]), epochs: /** @type {any[]} */ ([]) };
    this.epoch = 0;
    this.step = 0;
    this.totalSteps = 0;
    this.paused = false;
    /** @type {Facts} */
    this._facts = { model: null, sealed: true, runtime: {} };
    worker.onmessage = ({ data }) => this._hear(data);
    worker.onerror = (event) => this._fail(new errors.OnwardError(`the worker cannot run: ${event.message || "its script does not load"}`));
  }

  /**
   * A trainer for what `generate_artifacts` wrote, in a new worker: the address of the directory, or the four files.
   * `runtime` are options of `Runtime.load`.
   * @param {string | URL | import("./trainer.js").ArtifactFiles} artifacts @param {WorkerTrainerOptions} [options]
   */
  static async create(artifacts, { callbacks, ...options } = {}) {
    const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    const trainer = new WorkerTrainer(worker, { callbacks, ...options });
    try {
      await trainer._call("create", sendable(artifactFiles(artifacts)), options, document.baseURI);
    } catch (error) {
      worker.terminate();
      throw error;
    }
    return trainer;
  }

  /** What the model takes and has, as `Module.describe` says it. */
  describe() {
    return this._facts.model;
  }

  /** What it runs on: the provider, threads, why WebGPU is not used, and what of it runs on WebAssembly. */
  get runtime() {
    return this._facts.runtime;
  }

  /** Whether the checkpoint had a checksum. */
  get sealed() {
    return this._facts.sealed;
  }

  /** @param {Dataset} trainData @param {Dataset | null} [evalData] @param {{epochs?: number, batchSize?: number, shuffle?: boolean}} [options] */
  async fit(trainData, evalData = null, options = {}) {
    const { learningRate, schedule } = this;
    await this._call("fit", trainData, evalData, options, { learningRate, schedule });
    return this.history;
  }

  /** @param {Dataset} data @param {{batchSize?: number}} [options] @returns {Promise<{loss: number, accuracy?: number}>} */
  async evaluate(data, options = {}) {
    return this._call("evaluate", data, options);
  }

  /** The bytes of a checkpoint with the state of training. */
  async save() {
    return /** @type {Promise<Uint8Array>} */ (this._call("save"));
  }

  pause() {
    this.paused = true;
    this._tell("pause");
  }

  resume() {
    this.paused = false;
    this._tell("resume");
  }

  stop() {
    this.paused = false;
    this._tell("stop");
  }

  /** The numbers below `count` in an order that depends on the seed alone. @param {number} count */
  shuffled(count) {
    const order = Array.from({ length: count }, (_, index) => index);
    shuffleInPlace(order, randomNumbers(this._seed));
    return order;
  }

  /** End the worker. */
  async release() {
    if (this._ended) return;
    try {
      await this._call("release");
    } finally {
      this._worker.terminate();
      this._fail(new errors.OnwardError("this trainer was released"));
    }
  }

  /** @param {string} method @param {...any} given @returns {Promise<any>} */
  async _call(method, ...given) {
    if (this._ended) throw this._ended;
    const id = this._count++;
    return new Promise((resolve, reject) => {
      this._calls.set(id, { resolve, reject });
      this._worker.postMessage({ id, method, given });
    });
  }

  /** Ask for what has no answer. @param {string} method */
  _tell(method) {
    this._call(method).catch(() => {}); // of a worker that has ended, there is nothing to pause
  }

  /** @param {any} message */
  _hear({ id, event, row, value, error, progress, facts }) {
    if (facts) this._facts = facts;
    if (progress) Object.assign(this, progress);
    if (event === "onStep") this.history.steps.push(row);
    if (event === "onEpoch") this.history.epochs.push(row);
    if (event) {
      const answers = this.callbacks.map((callback) => /** @type {any} */ (callback)[event]?.(this, row));
      if (answers.includes(true)) this.stop();
      return;
    }
    const call = this._calls.get(id);
    this._calls.delete(id);
    if (error) call?.reject(revive(error));
    else call?.resolve(value);
  }

  /** @param {Error} error */
  _fail(error) {
    this._ended = error;
    for (const { reject } of this._calls.values()) reject(error);
    this._calls.clear();
  }
}

/** The files as messages can hold them. @param {any} files @returns {any} */
function sendable(files) {
  return Object.fromEntries(Object.entries(files).map(([name, source]) => {
    if (name === "externalData") return [name, sendable(source)];
    return [name, source instanceof URL ? source.href : source];
  }));
}

/** An error of the worker as one of here. @param {{name: string, message: string, [field: string]: any}} told */
function revive({ name, message, ...fields }) {
  const Kind = /** @type {any} */ ({ ...errors, RangeError, TypeError })[name] ?? Error;
  const error = Object.create(Kind.prototype);
  Object.defineProperty(error, "message", { value: message, configurable: true, writable: true });
  return Object.assign(error, { name, ...fields });
}
