// Times training steps of each model that `models.json` lists, and shows them beside Python's.
import { CheckpointState, Module, Optimizer, Runtime } from "onward-web";

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

/** The median time of a step, after some that are not counted. */
async function time(model) {
  const runtime = await Runtime.load({ threads: 1 });
  const state = await CheckpointState.load(`${model.name}/checkpoint`);
  const module = await Module.create(`${model.name}/training_model.onnx`, state, undefined, { runtime });
  const optimizer = await Optimizer.create(`${model.name}/optimizer_model.onnx`, module);
  const given = await batches(model);
  const taken = [];
  for (let step = 0; step < model.steps; step++) {
    const started = performance.now();
    await module.run(...given(step));
    await optimizer.step();
    module.lazyResetGrad();
    taken.push(performance.now() - started);
  }
  await module.release();
  return median(taken.slice(model.warm));
}

/** Time one model, or all of them, and fill the table. */
window.measure = async (wanted) => {
  const found = {};
  for (const model of models.filter(({ name }) => wanted === undefined || name === wanted)) {
    status.textContent = `${model.name} …`;
    const own = await time(model);
    found[model.name] = own;
    const row = rows.insertRow();
    const ratio = model.python === null ? "" : (own / model.python).toFixed(1);
    for (const text of [model.name, own.toFixed(2), model.python?.toFixed(2) ?? "", ratio]) {
      row.insertCell().textContent = text;
    }
  }
  status.textContent = "done";
  return found;
};

button.onclick = async () => {
  button.disabled = true;
  rows.replaceChildren();
  try {
    await window.measure();
  } catch (error) {
    status.textContent = `it failed: ${error.message}`;
  }
  button.disabled = false;
};
window.ready = true;
