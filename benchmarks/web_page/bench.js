// Times training steps of each model that `models.json` lists, and counts the bytes that they copy; shown beside Python's.
import * as wasm from "onnxruntime-web/wasm";
import { CheckpointState, Module, Optimizer, Runtime } from "onward-web";
import { copied, countOnHost } from "./copies.js";

const models = await (await fetch("models.json")).json();
const button = document.getElementById("start");
const status = document.getElementById("status");
const rows = document.getElementById("rows");

const median = (numbers) => numbers.toSorted((a, b) => a - b)[Math.floor(numbers.length / 2)];

/** Batches of a model: its inputs from a file each, as many samples as there are. */
async function batches({ name, dims, integers, batch }) {
  const read = async (file) => (await fetch(`${name}/${file}`)).arrayBuffer();
  const x = new (integers ? BigInt64Array : Float32Array)(await read("x.bin"));
  const labels = new BigInt64Array(await read("labels.bin"));
  const width = dims.reduce((a, b) => a * b, 1);
  const count = Math.floor(labels.length / batch);
  return (step) => {
    const first = (step % count) * batch;
    return [
      { data: x.subarray(first * width, (first + batch) * width), dims: [batch, ...dims] },
      labels.subarray(first, first + batch),
    ];
  };
}

/** The median time of a step, after some that are not counted, and the bytes that one copies there and back. */
async function measure(model, provider) {
  const runtime = await Runtime.load({ threads: 1, provider });
  const folder = provider === "webgpu" ? `${model.name}-webgpu` : model.name;
  const state = await CheckpointState.load(`${folder}/checkpoint`);
  const module = await Module.create(`${folder}/training_model.onnx`, state, undefined, { runtime });
  const optimizer = await Optimizer.create(`${folder}/optimizer_model.onnx`, module);
  const given = await batches(model);
  const taken = [];
  let before = { ...copied };
  for (let step = 0; step < model.steps; step++) {
    if (step === model.warm) before = { ...copied };
    const started = performance.now();
    await module.run(...given(step));
    await optimizer.step();
    module.lazyResetGrad();
    taken.push(performance.now() - started);
  }
  const counted = model.steps - model.warm;
  const [up, down] = [(copied.up - before.up) / counted, (copied.down - before.down) / counted];
  await module.release();
  if (runtime.provider !== provider) throw new Error(runtime.fallback);
  return { time: median(taken.slice(model.warm)), up, down };
}

/** Measure one model, or all of them, and fill the table. */
window.measure = async ({ name: wanted, provider = "wasm" } = {}) => {
  const figures = {};
  if (provider === "wasm") countOnHost(wasm);
  for (const model of models.filter(({ name }) => wanted === undefined || name === wanted)) {
    status.textContent = `${model.name} …`;
    const own = await measure(model, provider);
    figures[model.name] = own;
    const row = rows.insertRow();
    const ratio = model.python === null ? "" : (own.time / model.python).toFixed(1);
    const copies = `${(own.up / 1000).toFixed(1)} + ${(own.down / 1000).toFixed(1)}`;
    for (const text of [model.name, provider, own.time.toFixed(2), model.python?.toFixed(2) ?? "", ratio, copies]) {
      row.insertCell().textContent = text;
    }
  }
  status.textContent = "done";
  return figures;
};

button.onclick = async () => {
  button.disabled = true;
  rows.replaceChildren();
  try {
    await window.measure({ provider: document.getElementById("provider").value });
  } catch (error) {
    status.textContent = `it failed: ${error.message}`;
  }
  button.disabled = false;
};
window.ready = true;
