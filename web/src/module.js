/**
 * Module: runs the training and the evaluation model over one set of parameters.
 *
 * Parameters and gradients live in flat vectors, or on a GPU from step to step. Knows graphs only by their
 * inputs and outputs; what each is for is in the files' metadata.
 */
import { extraNumber } from "./checkpoint/data.js";
import { elementType } from "./checkpoint/dtypes.js";
import { ModelError, NonFiniteError, OnwardError } from "./errors.js";
import { FlatBuffer } from "./runtime/flat.js";
import { GpuError } from "./runtime/gpu_session.js";
import { checkLabels, prepare } from "./runtime/inputs.js";
import { BUFFER, OUT, Plan, RESET, SEED } from "./runtime/plan.js";
import { addOutputs, readHead, specializeReset } from "./runtime/protobuf.js";
import { Exclusive, message, readExternal, readModel, Runtime } from "./runtime/sessions.js";
import { CheckpointState } from "./state.js";

const PATIENCE = 10;
const MIX = [0x9e3779b97f4a7c15n, 0xd1b54a32d192ed03n];

/** @typedef {import("./runtime/sessions.js").FileSource} FileSource */
/** @typedef {import("./checkpoint/data.js").CheckpointData} CheckpointData */
/** @typedef {{bytes: Uint8Array, plan: Plan, externalData: import("./runtime/sessions.js").ExternalData}} Artifact */

/** A model that trains. Made by `Module.create`. */
export class Module {
  /**
   * @param {Runtime} runtime @param {Artifact} training @param {Artifact | null} evaluation
   * @param {CheckpointState} state
   * @param {{onNonfinite: "raise" | "skip" | "ignore", seed?: number | bigint}} options
   */
  constructor(runtime, training, evaluation, state, { onNonfinite, seed }) {
    this.runtime = runtime;
    this.training = true;
    this.onNonfinite = onNonfinite;
    this._files = { training, evaluation };
    this._plan = training.plan;
    this._state = state;
    const shapes = new Map(this._plan.trainable.map((name) => [name, this._plan.shape(name)]));
    this._parameters = new FlatBuffer(shapes);
    this._gradients = new FlatBuffer(shapes, BUFFER);
    /** What sessions are fed, and what training changes. */
    this._memory = runtime.memory();
    /** @type {Map<string, any>} */
    this._sessions = new Map();
    this._exclusive = new Exclusive();
    /** @type {import("./optimizer.js").Optimizer | null} */
    this._optimizer = null;
    this._reset = true;
    this._badInARow = 0;
    /** @type {string | null} */
    this._invalid = null;
    this._released = false;
    this._adopt(state._data);
    const { extras, accumulation } = state._data;
    this._seed = BigInt(seed ?? extras.get("seed")?.slice(2) ?? 0);
    this._steps = extraNumber(extras.get("train_step")) ?? 0;
    for (const [name, tensor] of accumulation) {
      this._gradients.views.get(name)?.set(tensor.data); // nothing was handed to a GPU yet
      this._reset = false;
    }
    state._module = this;
  }

  /**
   * A module over a state. `outputs` are values of the evaluation model that it should also return, by name.
   * `onNonfinite` says what to do about a loss or gradient that is not finite: raise (parameters keep their
   * values), skip that update, or ignore it. `seed` makes dropout reproducible. `externalData` are the files with
   * weights that a model refers to, by name; without it they are read from beside a model given by its address.
   * @param {FileSource} trainModel @param {CheckpointState} state @param {FileSource | null} [evalModel]
   * @param {{onNonfinite?: "raise" | "skip" | "ignore", seed?: number | bigint, runtime?: Runtime,
   *   outputs?: string[], externalData?: Record<string, FileSource>}} [options]
   */
  static async create(trainModel, state, evalModel = null, options = {}) {
    const { onNonfinite = "raise", seed, runtime, outputs = [], externalData } = options;
    if (!(state instanceof CheckpointState)) throw new TypeError("Module takes a CheckpointState");
    if (!["raise", "skip", "ignore"].includes(onNonfinite)) {
      throw new RangeError(`onNonfinite is '${onNonfinite}': choose raise, skip or ignore`);
    }
    if (state._module) {
      throw new OnwardError("this CheckpointState belongs to another Module; load the checkpoint once for each");
    }
    if (state.isNominal) {
      throw new OnwardError("the state is nominal: it has no parameter values. Load a checkpoint that has them.");
    }
    const training = await openArtifact(trainModel, "training", { externalData });
    const evaluation = evalModel === null ? null : await openArtifact(evalModel, "eval", { outputs, externalData });
    const module = new Module(runtime ?? (await Runtime.load()), training, evaluation, state, { onNonfinite, seed });
    try {
      await module._onGpuOrHere(() => module._session("step"));
    } catch (error) {
      state._module = null; // it can be used with a model that opens
      throw error;
    }
    return module;
  }

  /** Make calls training steps. @param {boolean} [mode] */
  train(mode = true) {
    this.training = mode;
    return this;
  }

  /** Make calls evaluations: dropout off, batch norm by its running statistics. */
  eval() {
    return this.train(false);
  }

  /** Let the next training step replace the gradients instead of adding to them. */
  lazyResetGrad() {
    this._reset = true;
  }

  /**
   * A training step after `train()` (the default), an evaluation after `eval()`.
   * @param {...any} inputs in the order of `inputNames()`
   * @returns {Promise<{loss: number, outputs: Record<string, {data: any, dims: number[], type: string}>}>}
   */
  async run(...inputs) {
    const evaluation = this._files.evaluation;
    if (!this.training && !evaluation) {
      throw new ModelError("no eval model was given: pass it to Module.create");
    }
    const plan = this.training || !evaluation ? this._plan : evaluation.plan;
    const feeds = prepare(plan, inputs);
    checkLabels(plan, feeds);
    return this._exclusive.run(() => (this.training ? this._train(feeds) : this._evaluate(plan, feeds)));
  }

  /** The names of the inputs that a call takes, in order. */
  inputNames() {
    return [...this._active().inputs];
  }

  /** The names of what a call returns, the loss first. */
  outputNames() {
    return [...this._active().outputs];
  }

  /** How many numbers the parameters have. @param {boolean} [trainableOnly] */
  getParametersSize(trainableOnly = true) {
    const chosen = trainableOnly ? this._plan.trainable : this._plan.parameters;
    return chosen.reduce((total, name) => total + this._state._tensor(name).data.length, 0);
  }

  /** What the model takes and has: for a page that must ask for it. */
  describe() {
    const plan = this._plan;
    return {
      inputs: plan.inputs.map((name) => {
        const value = plan.values.get(name);
        return { name, dims: value?.dims, type: elementType(value?.dtype ?? 0)?.name ?? "unknown" };
      }),
      outputs: [...plan.modelOutputs],
      labels: plan.labels.map(({ name, classes }) => ({ name, classes })),
      parameters: this.getParametersSize(false),
      trainable: this.getParametersSize(true),
    };
  }

  /** Free the sessions; the state stays usable. */
  async release() {
    try {
      await this._pull();
    } finally {
      this._released = true;
      await this._releaseSessions();
      await this._optimizer?.release();
      await this._memory.release();
    }
  }

  _active() {
    return this.training || !this._files.evaluation ? this._plan : this._files.evaluation.plan;
  }

  /** @param {import("./runtime/inputs.js").Feed[]} inputs */
  async _train(inputs) {
    const plan = this._plan;
    const reset = this._reset;
    const step = this._steps + 1;
    /** @type {Record<string, any>} */
    const own = {};
    if (plan.random) {
      const mixed = BigInt.asIntN(64, this._seed * MIX[0] + BigInt(step) * MIX[1]);
      own[SEED] = { type: "int64", data: BigInt64Array.of(mixed), dims: [1] };
    }
    if (!reset) {
      own[RESET] = { type: "bool", data: Uint8Array.of(0), dims: [1] };
      plan.inputs.forEach((name, index) => {
        if (!plan.inputGradients.includes(name)) return;
        const { dims, data } = inputs[index];
        own[name + BUFFER] = { type: "float32", data: new Float32Array(data.length), dims };
      });
    }
    const results = await this._runSession(reset ? "step" : "accumulate", plan, inputs, own);
    this._steps = step;
    this._reset = false;
    for (const name of this._gradients.views.keys()) this._take(name + BUFFER, name + OUT, results);
    const answer = collect(plan, results);
    if (this.onNonfinite !== "ignore" && !Number.isFinite(answer.loss)) {
      this._refuse(`the loss is ${answer.loss} at training step ${step}`);
    } else {
      for (const name of plan.statistics) {
        if (this._state._data.frozen.has(name)) this._take(name, `${name}.next`, results);
      }
    }
    for (const tensor of Object.values(results)) tensor.dispose();
    return answer;
  }

  /** Keep an output of a run as a tensor of training. @param {string} name @param {string} output @param {Record<string, any>} results */
  _take(name, output, results) {
    this._memory.take(name, results[output]);
    delete results[output];
  }

  /** @param {Plan} plan @param {import("./runtime/inputs.js").Feed[]} inputs */
  async _evaluate(plan, inputs) {
    const results = await this._runSession("evaluate", plan, inputs, {});
    const answer = collect(plan, results);
    for (const tensor of Object.values(results)) tensor.dispose();
    return answer;
  }

  /**
   * @param {"step" | "accumulate" | "evaluate"} purpose @param {Plan} plan @param {import("./runtime/inputs.js").Feed[]} inputs
   * @param {Record<string, import("./runtime/inputs.js").Feed>} own further inputs by name
   * @returns {Promise<Record<string, any>>}
   */
  async _runSession(purpose, plan, inputs, own) {
    try {
      return await this._onGpuOrHere(async () => {
        const session = await this._session(purpose);
        /** @type {Record<string, any>} */
        const feeds = {};
        for (const name of session.inputNames) {
          const { type, data, dims } = own[name] ?? inputs[plan.inputs.indexOf(name)] ?? {};
          feeds[name] = type ? new this.runtime.ort.Tensor(type, data, dims) : await this._memory.feed(name);
        }
        return session.run(feeds);
      });
    } catch (error) {
      if (error instanceof OnwardError) throw error;
      const given = plan.inputs.map((name, index) => `${name} [${inputs[index].dims}]`).join(", ");
      throw new OnwardError(`the step failed on inputs ${given}: ${message(error)}`, { cause: error });
    }
  }

  /** Do something, on WebAssembly from now on where WebGPU cannot. @template T @param {() => Promise<T>} work @returns {Promise<T>} */
  async _onGpuOrHere(work) {
    // another module may have found that WebGPU is of no use
    if (this._memory.onGpu && this.runtime.provider !== "webgpu") await this._leaveGpu(this.runtime.fallback ?? "");
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof GpuError && this._memory.onGpu)) throw error;
      await this._leaveGpu(error.message);
      return work();
    }
  }

  /** Go on with WebAssembly, from the numbers that the GPU holds. @param {string} reason */
  async _leaveGpu(reason) {
    await this._pull();
    this.runtime.leaveGpu(reason);
    await this._releaseSessions();
    await this._memory.release();
    this._memory = this.runtime.memory();
    this._remember();
    await this._optimizer?._reopen();
  }

  /** Bring the host's arrays up to date with what a GPU holds. */
  async _pull() {
    try {
      await this._memory.pull();
    } catch (error) {
      throw new OnwardError(
        `the GPU was lost, and with it what was trained since the last checkpoint: ${message(error)}`, { cause: error },
      );
    }
  }

  async _releaseSessions() {
    const sessions = [...this._sessions.values()];
    this._sessions.clear();
    await Promise.all(sessions.map((session) => session.release()));
  }

  /** The session of a purpose, made when first needed. @param {"step" | "accumulate" | "evaluate"} purpose */
  async _session(purpose) {
    if (this._released) throw new OnwardError("this module was released");
    let session = this._sessions.get(purpose);
    if (!session) {
      const { training, evaluation } = this._files;
      const what = purpose === "evaluate" ? "eval model" : "training model";
      const { bytes, externalData } = purpose === "evaluate" ? /** @type {Artifact} */ (evaluation) : training;
      const model = purpose === "step" ? specializeReset(bytes) : bytes;
      const resident = purpose === "evaluate" ? [] : this._resident();
      session = await this.runtime.session(model, what, { externalData, resident });
      this._sessions.set(purpose, session);
    }
    return session;
  }

  /** The outputs that the next run reads. */
  _resident() {
    const statistics = this._plan.statistics.filter((name) => this._state._data.frozen.has(name));
    return [...this._plan.trainable.map((name) => name + OUT), ...statistics.map((name) => `${name}.next`)];
  }

  /** Multiply the accumulated gradients. @param {number} factor */
  async _scaleGradients(factor) {
    await this._onGpuOrHere(() => this._memory.scale(this._gradients, factor));
  }

  /** Something is not finite: nothing may be updated from this step. @param {string} problem */
  _refuse(problem) {
    this._invalid = problem;
    if (this.onNonfinite !== "raise") return;
    this._reset = true;
    this._invalid = null;
    throw new NonFiniteError(
      `${problem}; parameters are unchanged. Check the data and lower the learning rate, ` +
        "or choose onNonfinite: 'skip'",
    );
  }

  /** What was wrong since the last update, if anything; ten bad updates in a row are an error. */
  _takeInvalid() {
    const problem = this._invalid;
    this._invalid = null;
    if (problem === null) {
      this._badInARow = 0;
      return null;
    }
    this._badInARow += 1;
    this._reset = true;
    if (this._badInARow >= PATIENCE) {
      throw new NonFiniteError(`${PATIENCE} updates in a row were skipped; the last one because ${problem}`);
    }
    return problem;
  }

  /** Move the state's parameters into the vectors that sessions read. @param {CheckpointData} data */
  _adopt(data) {
    const plan = this._plan;
    const missing = plan.parameters.filter((name) => !data.trainable.has(name) && !data.frozen.has(name));
    if (missing.length) {
      throw new OnwardError(
        `the checkpoint lacks ${missing.length} parameters of the training model, for example '${missing[0]}': ` +
          "do they belong together?",
      );
    }
    for (const name of plan.parameters) {
      const tensor = this._state._tensor(name);
      const dims = plan.shape(name);
      if (tensor.dims.length !== dims.length || tensor.dims.some((dim, i) => dim !== dims[i])) {
        throw new OnwardError(
          `parameter '${name}' has shape [${tensor.dims}] in the checkpoint and [${dims}] in the training model: ` +
            "do they belong together?",
        );
      }
      const view = this._parameters.views.get(name);
      if (view) {
        view.set(tensor.data);
        tensor.data = view;
      }
    }
    this._remember();
  }

  /** Tell the memory of training what there is. */
  _remember() {
    for (const name of this._plan.parameters) {
      const { dtype, dims, data } = this._state._tensor(name);
      this._memory.add(name, data, elementType(dtype)?.name ?? "", dims);
    }
    for (const [name, view] of this._gradients.views) {
      this._memory.add(name + BUFFER, view, "float32", this._plan.shape(name));
    }
  }

  /** Add to a checkpoint what a resumed run needs to go on as if it had not stopped. @param {CheckpointData} saved */
  _describeProgress(saved) {
    const data = this._state._data;
    saved.extras.set("seed", `i:${this._seed}`);
    saved.extras.set("train_step", `i:${this._steps}`);
    if (!this._reset) {
      for (const [name, view] of this._gradients.views) {
        saved.accumulation.set(name, { dtype: 1, dims: this._plan.shape(name), data: view });
      }
    }
    if (this._optimizer) {
      this._optimizer._describeProgress(saved);
      return;
    }
    saved.optimizer = data.optimizer;
    for (const [name, text] of data.extras) if (!saved.extras.has(name)) saved.extras.set(name, text);
  }
}

/**
 * @param {FileSource} source @param {string} role
 * @param {{outputs?: string[], externalData?: Record<string, FileSource>}} options @returns {Promise<Artifact>}
 */
async function openArtifact(source, role, { outputs = [], externalData: given }) {
  let { bytes, path } = await readModel(source, role);
  const head = readHead(bytes, path);
  const extra = outputs.filter((name) => !head.outputs.some((value) => value.name === name));
  if (extra.length) {
    bytes = addOutputs(bytes, extra);
    head.outputs.push(...extra.map((name) => ({ name, dtype: 0, dims: undefined })));
  }
  const plan = new Plan(head, path);
  return { bytes, plan, externalData: await readExternal(source, head.external, path, given) };
}

/** @param {Plan} plan @param {Record<string, any>} results */
function collect(plan, results) {
  const [loss, ...others] = plan.outputs;
  const outputs = Object.fromEntries(
    others.map((name) => [name, { data: results[name].data, dims: [...results[name].dims], type: results[name].type }]),
  );
  return { loss: Number(results[loss].data[0]), outputs };
}
