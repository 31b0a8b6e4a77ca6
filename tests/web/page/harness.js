// What the tests do in the page: each function takes and returns what JSON can hold.
import * as onnxruntime from "onnxruntime-web/wasm";
import * as onward from "onward-web";
import { copied } from "./copies.js";

const { CheckpointState, Module, Optimizer } = onward;
const SHAPES = { mlp: [64], based: [64], wide: [64], lora: [64], cnn: [1, 8, 8], lstm: [8, 8], encoder: [6] };

async function load(name, { checkpoint, module: moduleOptions, optimizer: optimizerFile } = {}) {
  const state = await CheckpointState.load(checkpoint ?? `${name}/checkpoint`);
  const module = await Module.create(`${name}/training_model.onnx`, state, `${name}/eval_model.onnx`, moduleOptions);
  const optimizer = await Optimizer.create(`${name}/${optimizerFile ?? "optimizer_model.onnx"}`, module);
  return { state, module, optimizer };
}

async function data(given) {
  const name = given.replace(/-gpu$/, "");
  const read = async (file) => (await fetch(`${name}/${file}`)).arrayBuffer();
  const Kind = name === "encoder" ? BigInt64Array : Float32Array;
  const x = new Kind(await read("x.bin"));
  const labels = new BigInt64Array(await read("labels.bin"));
  const width = SHAPES[name].reduce((a, b) => a * b);
  return (first, count) => [
    { data: x.subarray(first * width, (first + count) * width), dims: [count, ...SHAPES[name]] },
    labels.subarray(first, first + count),
  ];
}

async function steps({ module, optimizer, scheduler }, batches, { first = 0, count, batch = 16, accumulate = 1 }) {
  const losses = [];
  for (let i = first; i < first + count; i++) {
    const { loss } = await module.run(...batches(i * batch, batch));
    losses.push(loss);
    if ((i + 1) % accumulate) continue;
    await optimizer.step();
    module.lazyResetGrad();
    scheduler?.step();
  }
  return losses;
}

const artifactsOf = (name) => ({
  training: `${name}/training_model.onnx`, eval: `${name}/eval_model.onnx`, optimizer: `${name}/optimizer_model.onnx`,
  checkpoint: `${name}/checkpoint`,
});

/** What some work gives, or the name and the message of its error. */
async function told(work) {
  try {
    return await work();
  } catch (error) {
    return [error.constructor.name, error.message];
  }
}

/** Let a session's float outputs on the GPU be others than they should, as those of a driver that computes wrong. */
function spoil(session, { output, by }) {
  const { run } = session;
  session.run = async (feeds) => {
    const results = await run.call(session, feeds);
    const name = session.outputNames.find((one) => one.endsWith(output));
    if (!name) return results;
    const data = Float32Array.from(await results[name].getData(true), (value) => value + by);
    const { Tensor } = onnxruntime;
    return { ...results, [name]: new Tensor("float32", data, results[name].dims) };
  };
  return session;
}

/** The result of some work, and how often a timer of this page went off meanwhile. */
async function counted(work) {
  let ticks = 0;
  const timer = setInterval(() => ticks++, 5);
  const result = await work();
  clearInterval(timer);
  return [result, ticks];
}

const base64 = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));

window.harness = {
  onward,

  async curve({ name, count, rate, accumulate, seed, schedule, optimizer: optimizerFile, total }) {
    const parts = await load(name, { module: { seed }, optimizer: optimizerFile });
    parts.optimizer.setLearningRate(rate);
    if (schedule) parts.scheduler = new onward[schedule](parts.optimizer, 5, total, rate);
    const batches = await data(name);
    const losses = await steps(parts, batches, { count, accumulate });
    parts.module.eval();
    const evaluation = (await parts.module.run(...batches(0, 64))).loss;
    const saved = await CheckpointState.save(parts.state, { includeOptimizerState: true });
    await parts.module.release();
    return { losses, evaluation, checkpoint: base64(saved) };
  },

  /** Train on from a checkpoint of any origin. */
  async resume({ name, checkpoint, first, count }) {
    const parts = await load(name, { checkpoint });
    const losses = await steps(parts, await data(name), { first, count });
    await parts.module.release();
    return { losses, rate: parts.optimizer.getLearningRate(), properties: [...parts.state.properties] };
  },

  async resave({ checkpoint }) {
    const state = await CheckpointState.load(checkpoint);
    return base64(await CheckpointState.save(state, { includeOptimizerState: true }));
  },

  /** The message of what loading a checkpoint throws. */
  async refusal({ base64: text }) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    try {
      await CheckpointState.load(bytes);
      return null;
    } catch (error) {
      return [error.constructor.name, error.message];
    }
  },

  /** Bad labels, bad shapes, a NaN: what each says, and whether parameters stayed. */
  async mistakes({ policy }) {
    const parts = await load("mlp", { module: { onNonfinite: policy } });
    const { module, optimizer, state } = parts;
    const batches = await data("mlp");
    const [x, labels] = batches(0, 16);
    const weights = () => JSON.stringify(Array.from(state.parameters.get("w1").data));
    const before = weights();
    const spoiled = { data: x.data.slice(), dims: x.dims };
    spoiled.data[3] = NaN;
    const attempt = async (work) => {
      try {
        return { answer: await work() };
      } catch (error) {
        return { error: error.constructor.name, message: error.message };
      }
    };
    const wrong = labels.slice();
    wrong[5] = 10n;
    const results = {
      label: await attempt(() => module.run(x, wrong)),
      shape: await attempt(() => module.run({ data: x.data.slice(0, 16 * 63), dims: [16, 63] }, labels)),
      type: await attempt(() => module.run(x, new Float32Array(16))),
      count: await attempt(() => module.run(x)),
      overlap: await attempt(async () => {
        const [, second] = await Promise.allSettled([module.run(x, labels), module.run(x, labels)]);
        module.lazyResetGrad();
        throw second.reason;
      }),
      nan: await attempt(() => module.run(spoiled, labels)),
    };
    results.step = await attempt(() => optimizer.step());
    results.unchanged = weights() === before;
    module.lazyResetGrad();
    results.after = await attempt(async () => {
      const { loss } = await module.run(x, labels);
      return [Number.isFinite(loss), await optimizer.step(), weights() !== before];
    });
    await module.release();
    return results;
  },

  /** Bytes in use, JavaScript's and WebAssembly's, before and after many steps; garbage is collected first. */
  async memory({ name, warm, count }) {
    const parts = await load(name);
    const batches = await data(name);
    // the least of a few readings: what is still on its way through the event loop is no leak
    const held = async () => {
      let used = Infinity;
      for (let i = 0; i < 5; i++) {
        await new Promise((resolve) => setTimeout(resolve, 20));
        window.gc();
        used = Math.min(used, performance.memory.usedJSHeapSize);
      }
      return [used, ...window.wasmMemories.map((memory) => memory.buffer.byteLength)];
    };
    const many = async (total) => {
      for (let done = 0; done < total; done += 100) await steps(parts, batches, { count: 100 });
    };
    await many(warm);
    const first = await held();
    await many(count);
    const last = await held();
    await parts.module.release();
    return { first, last };
  },

  /** The rates of a schedule. */
  rates({ kind, given, count }) {
    const extras = new Map();
    const optimizer = { _module: { _state: { _data: { extras } } }, setLearningRate: () => {} };
    const schedule = new onward[kind](optimizer, ...given);
    return Array.from({ length: count }, (_, step) => schedule.rate(step));
  },

  /** A whole run without shuffling. */
  async fit({ name, options, samples, ...given }) {
    const files = artifactsOf(name);
    const trainer = await onward.Trainer.create(files, { ...options, metrics: "auto" });
    const [x, labels] = (await data(name))(0, samples);
    const set = { x, labels: { data: labels, dims: [samples] } };
    const [, ticks] = await counted(() => trainer.fit(set, set, { shuffle: false, ...given }));
    await trainer.release();
    return { ...trainer.history, ticks };
  },

  /**
   * Steps and an evaluation with WebGPU chosen, what they ran on, and the bytes that crossed in each of the last ones.
   * `hidden` pretends that the browser has no WebGPU, `wrong` that its results are off from a run on.
   */
  async webgpu({ name, count, hidden, wrong, accumulate, batch = 16, optimizer: optimizerFile, rate = 3e-3 }) {
    if (hidden) Object.defineProperty(navigator, "gpu", { value: undefined, configurable: true });
    const runtime = await onward.Runtime.load({ provider: "webgpu" });
    if (hidden) delete navigator.gpu;
    const { InferenceSession } = await import("onnxruntime-web/webgpu");
    const { create } = InferenceSession;
    if (wrong) InferenceSession.create = async (...given) => spoil(await create(...given), wrong);
    const parts = await load(name, { module: { runtime, seed: 7 }, optimizer: optimizerFile });
    parts.optimizer.setLearningRate(rate);
    const batches = await data(name);
    const first = await steps(parts, batches, { count: count - 2, accumulate, batch });
    const before = { ...copied };
    const last = await steps(parts, batches, { first: count - 2, count: 2, accumulate, batch });
    const perStep = [(copied.up - before.up) / 2, (copied.down - before.down) / 2];
    const stale = await told(() => parts.state.parameters.values().next().value.data.length);
    parts.module.eval();
    const evaluation = (await parts.module.run(...batches(0, 64))).loss;
    const checkpoint = base64(await CheckpointState.save(parts.state, { includeOptimizerState: true }));
    const fresh = await told(() => parts.state.parameters.values().next().value.data.length);
    await parts.module.release();
    InferenceSession.create = create;
    return {
      losses: [...first, ...last], evaluation, checkpoint, perStep, stale, fresh, provider: runtime.provider,
      fallback: runtime.fallback ?? null, notes: runtime.notes,
    };
  },

  /** The losses of a language model's steps, each on one row of tokens, and the bytes that crossed in the last one. */
  async language({ files, rows, rate, provider }) {
    const bytes = (name) => Uint8Array.from(atob(files[name]), (char) => char.charCodeAt(0));
    const runtime = await onward.Runtime.load({ provider });
    const state = await CheckpointState.load(bytes("checkpoint"));
    const constants = Object.keys(files).filter((name) => name.endsWith(".data"));
    const externalData = Object.fromEntries(constants.map((name) => [name, bytes(name)]));
    const module = await Module.create(bytes("training_model.onnx"), state, null, { runtime, externalData });
    const optimizer = await Optimizer.create(bytes("optimizer_model.onnx"), module);
    optimizer.setLearningRate(rate);
    const losses = [];
    let before = { ...copied };
    for (const row of rows) {
      before = { ...copied };
      const dims = [1, row.length];
      const ids = { data: BigInt64Array.from(row, BigInt), dims };
      const given = { input_ids: ids, labels: ids, attention_mask: { data: new BigInt64Array(row.length).fill(1n), dims } };
      losses.push((await module.run(...module.inputNames().map((name) => given[name]))).loss);
      await optimizer.step();
      module.lazyResetGrad();
    }
    const perStep = [copied.up - before.up, copied.down - before.down];
    await module.release();
    return { losses, perStep, provider: runtime.provider, fallback: runtime.fallback ?? null, notes: runtime.notes };
  },

  /** A run in a worker: its history, its checkpoint, and how often a timer of the page went off meanwhile. */
  async worker({ name, options, samples, ...given }) {
    const files = artifactsOf(name);
    const [x, labels] = (await data(name))(0, samples);
    const set = { x, labels: { data: labels, dims: [samples] } };
    const heard = [];
    const callback = { onStart: () => heard.push("start"), onStep: (_, { step }) => heard.push(step), onEnd: () => heard.push("end") };
    const trainer = await onward.WorkerTrainer.create(files, { metrics: "auto", callbacks: [callback], ...options });
    const [history, ticks] = await counted(() => trainer.fit(set, set, { shuffle: false, ...given }));
    const events = [...heard];
    const { loss } = await trainer.evaluate(set);
    const checkpoint = base64(await trainer.save());
    const { runtime } = trainer;
    const wrong = await told(() => trainer.fit({ x, labels: { data: labels.slice().fill(99n), dims: [samples] } }));
    await trainer.release();
    const after = await told(() => trainer.evaluate(set));
    return { history, heard: events, loss, checkpoint, runtime, ticks, wrong, after, described: trainer.describe() };
  },
};
window.ready = true;
