// What the tests do in Node.js: one command as JSON in the first argument, one answer as JSON on the last line.
import { readFile } from "node:fs/promises";
import path from "node:path";
import { pathToFileURL } from "node:url";

import * as onward from "onward-web";

const { CheckpointState, Module, Optimizer, Runtime, saveCheckpoint } = onward;

async function open({ folder, checkpoint, optimizer: name = "optimizer_model.onnx", runtime = "default", seed }) {
  const at = (file) => path.join(folder, file);
  const runtimes = {
    default: () => Runtime.load({ threads: 1 }),
    wasm: async () => {
      const ort = await import("onnxruntime-web");
      ort.env.wasm.numThreads = 1;
      return Runtime.use(ort, { provider: "wasm in Node.js" });
    },
    node: async () => Runtime.use(await import("onnxruntime-node"), { sessionOptions: { intraOpNumThreads: 1 } }),
  };
  const state = await CheckpointState.load(checkpoint ?? at("checkpoint"));
  // one by its path, the other by its address: both name the same kind of file
  const module = await Module.create(at("training_model.onnx"), state, pathToFileURL(at("eval_model.onnx")), {
    runtime: await runtimes[runtime](), seed,
  });
  return { state, module, optimizer: await Optimizer.create(at(name), module) };
}

async function batchesOf({ data, dims, kind = "float32" }) {
  const read = async (name) => (await readFile(path.join(data, name))).buffer;
  const Kind = kind === "int64" ? BigInt64Array : Float32Array;
  const bytes = (buffer) => new Uint8Array(buffer).slice().buffer;
  const x = new Kind(bytes(await read("x.bin")));
  const labels = new BigInt64Array(bytes(await read("labels.bin")));
  const width = dims.reduce((a, b) => a * b);
  return (first, count) => [
    { data: x.subarray(first * width, (first + count) * width), dims: [count, ...dims] },
    labels.subarray(first, first + count),
  ];
}

const attempt = async (work) => {
  try {
    return { answer: (await work()) ?? null };
  } catch (error) {
    return { error: error.constructor.name, message: error.message };
  }
};

const commands = {
  async curve(given) {
    const { first = 0, count, rate, accumulate = 1, total, save } = given;
    const { state, module, optimizer } = await open(given);
    const batches = await batchesOf(given);
    if (rate) optimizer.setLearningRate(rate);
    const schedule = total && new onward.LinearLRScheduler(optimizer, 5, total, rate);
    const losses = [];
    for (let i = first; i < first + count; i++) {
      losses.push((await module.run(...batches(16 * i, 16))).loss);
      if ((i + 1) % accumulate) continue;
      await optimizer.step();
      module.lazyResetGrad();
      if (schedule) schedule.step();
    }
    module.eval();
    const evaluation = (await module.run(...batches(0, 64))).loss;
    if (save) await saveCheckpoint(state, save, { includeOptimizerState: true });
    const { provider } = module.runtime;
    await module.release();
    return { losses, evaluation, provider };
  },

  /** What goes wrong, by name; a checkpoint before and after it must be the same. */
  async mistakes(given) {
    const { state, module, optimizer } = await open(given);
    const [x, labels] = (await batchesOf(given))(0, 16);
    const before = Buffer.from(await CheckpointState.save(state, { includeOptimizerState: false }));
    const wrong = { data: x.data.subarray(0, 16 * 63), dims: [16, 63] };
    const ortLess = { InferenceSession: {} };
    const found = {
      shape: await attempt(() => module.run(wrong, labels)),
      label: await attempt(() => module.run(x, labels.map(() => 10n))),
      count: await attempt(() => module.run(x)),
      nan: await attempt(() => module.run({ data: x.data.map(() => NaN), dims: x.dims }, labels)),
      "no folder": await attempt(() => saveCheckpoint(state, path.join(given.folder, "nowhere", "checkpoint"))),
      "a folder": await attempt(() => saveCheckpoint(state, given.folder)),
      missing: await attempt(() => CheckpointState.load(path.join(given.folder, "missing"))),
      "another model": await attempt(async () =>
        Module.create(path.join(given.folder, "training_model.onnx"), await CheckpointState.load(given.other), null)),
      "no onnxruntime": await attempt(() => Runtime.use(ortLess)),
      unpaired: await attempt(() => Optimizer.create(path.join(given.folder, "training_model.onnx"), module)),
    };
    const after = Buffer.from(await CheckpointState.save(state, { includeOptimizerState: false }));
    await optimizer.release();
    return { found, unchanged: before.equals(after) };
  },

  /** The error of each file that is loaded as a checkpoint; null where there is none. */
  async load({ files }) {
    const found = {};
    for (const file of files) {
      const { error, message } = await attempt(async () => void (await CheckpointState.load(file)));
      found[file] = error ? [error, message] : null;
    }
    return found;
  },

  async save({ checkpoint, target }) {
    return attempt(async () => saveCheckpoint(await CheckpointState.load(checkpoint), target));
  },

  /** The losses of a language model's steps, each on one row of tokens. */
  async language({ folder, rows, rate, runtime }) {
    const { module, optimizer } = await open({ folder, runtime });
    optimizer.setLearningRate(rate);
    const losses = [];
    for (const row of rows) {
      const dims = [1, row.length];
      const ids = { data: BigInt64Array.from(row, BigInt), dims };
      const given = { input_ids: ids, labels: ids, attention_mask: { data: new BigInt64Array(row.length).fill(1n), dims } };
      losses.push((await module.run(...module.inputNames().map((name) => given[name]))).loss);
      await optimizer.step();
      module.lazyResetGrad();
    }
    return losses;
  },

  /** A model whose weights are in a second file: found beside it, given by name, or missing. */
  async external({ folder, file }) {
    const training = path.join(folder, "training_model.onnx");
    const create = async (source, options) => {
      const state = await CheckpointState.load(path.join(folder, "checkpoint"));
      const module = await Module.create(source, state, null, options);
      const x = { data: Float32Array.from({ length: 8 }, (_, i) => i / 8), dims: [2, 4] };
      return (await module.run(x, BigInt64Array.of(0n, 1n))).loss;
    };
    const bytes = await readFile(training);
    return {
      beside: await attempt(() => create(training)),
      given: await attempt(() => create(bytes, { externalData: { [file]: path.join(folder, file) } })),
      neither: await attempt(() => create(bytes)),
      elsewhere: await attempt(() => create(path.join(folder, "hostile.onnx"))),
      "through a link": await attempt(() => create(path.join(folder, "link.onnx"))),
      "no file": await attempt(() => create(path.join(folder, "folder.onnx"))),
      "a prototype": await attempt(() => create(path.join(folder, "prototype.onnx"))),
    };
  },
};

const { command, ...given } = JSON.parse(process.argv[2]);
// at once: threads of WebAssembly would keep the process for seconds
process.stdout.write(`${JSON.stringify(await commands[command](given))}\n`, () => process.exit(0));
