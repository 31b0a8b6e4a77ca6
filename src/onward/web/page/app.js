/** The page that trains any artifacts: data in, loss curve, pause, evaluation, checkpoints in and out. */
import { CheckpointState, WorkerTrainer } from "onward-web";
import { LossChart } from "./chart.js";
import { fitToInputs, readArrays } from "./data.js";
import { careful, complain, element, offerDownload, percent, stayUsableOffline } from "./page.js";

const FILES = {
  training: "artifacts/training_model.onnx",
  eval: "artifacts/eval_model.onnx",
  optimizer: "artifacts/optimizer_model.onnx",
};
const chart = new LossChart(element("chart"), { what: "Loss", names: ["training loss", "held-out loss"] });

/** @type {WorkerTrainer | null} */
let trainer = null;
/** @type {File | null} */
let dataFile = null;
/** @type {{train: any[], held: any[] | null} | null} */
let data = null;
let running = false;
let stepsBefore = 0; // of earlier runs, so that the curve goes on

async function open(checkpoint, provider = element("provider").value) {
  await trainer?.release();
  trainer = null;
  enable();
  trainer = await WorkerTrainer.create({ ...FILES, checkpoint }, {
    runtime: { provider }, metrics: "auto", callbacks: [{ onStep: showStep, onEpoch: showEpoch }],
  });
  describe();
  if (dataFile) await takeData(dataFile);
  enable();
}

function describe() {
  const about = trainer.describe();
  const { runtime } = trainer;
  const shape = ({ name, dims, type }) => `${name}: ${type} [${dims?.join(", ") ?? "?"}]`;
  const facts = {
    Inputs: about.inputs.map(shape).join("; "),
    Labels: about.labels.map(({ name, classes }) => `${name}: ${classes} classes`).join("; ") || "—",
    Parameters: `${about.trainable.toLocaleString("en")} trainable of ${about.parameters.toLocaleString("en")}`,
    "Runs on": runtime.provider === "webgpu" ? "WebGPU" : `WebAssembly, ${runtime.threads} thread${runtime.threads > 1 ? "s" : ""}`,
  };
  if (runtime.fallback) facts["Runs on"] += ` (${runtime.fallback})`;
  if (runtime.notes.length) facts["Runs on"] += ` (${runtime.notes.join("; ")})`;
  if (!trainer.sealed) facts.Checkpoint = "has no checksum: damage would go unnoticed";
  element("facts").replaceChildren(...Object.entries(facts).flatMap(([name, text]) => {
    const [term, definition] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    definition.textContent = text;
    return [term, definition];
  }));
}

async function takeData(file) {
  dataFile = file;
  data = null;
  enable();
  if (!trainer) return;
  const divisor = Number(element("divisor").value);
  if (!(divisor > 0)) throw new Error("values can be divided by a number above 0 only");
  const arrays = fitToInputs(await readArrays(file), trainer.describe().inputs, divisor);
  const rows = arrays[0].dims[0];
  const held = Math.floor(rows * Number(element("share").value));
  const order = trainer.shuffled(rows);
  data = { train: take(arrays, order.slice(held)), held: held ? take(arrays, order.slice(0, held)) : null };
  element("data-status").textContent =
    `${file.name}: ${rows.toLocaleString("en")} samples, ${held.toLocaleString("en")} held out.`;
  say("Ready to train.");
  enable();
}

function take(arrays, rows) {
  return arrays.map(({ data: values, dims }) => {
    const width = dims.slice(1).reduce((a, b) => a * b, 1);
    const taken = new values.constructor(rows.length * width);
    rows.forEach((row, index) => taken.set(values.subarray(row * width, (row + 1) * width), index * width));
    return { data: taken, dims: [rows.length, ...dims.slice(1)] };
  });
}

async function train() {
  running = true;
  enable();
  try {
    trainer.learningRate = Number(element("rate").value);
    trainer.schedule = element("schedule").value;
    await trainer.fit(data.train, data.held, {
      epochs: Number(element("epochs").value), batchSize: Number(element("batch").value),
    });
    say(trainer.step < trainer.totalSteps ? `Stopped after ${trainer.step} steps.` : `Done: ${trainer.step} steps.`);
  } catch (error) {
    say(`Training ended at step ${trainer.step}.`);
    throw error;
  } finally {
    stepsBefore += trainer.step;
    running = false;
    describe(); // WebGPU may have failed at something
    enable();
  }
}

function showStep(current, row) {
  chart.add(0, stepsBefore + row.step, row.loss);
  element("progress").value = row.step / current.totalSteps;
  const now = performance.now();
  if (now - (showStep.last ?? 0) < 150 && row.step < current.totalSteps) return;
  showStep.last = now;
  say(`Epoch ${row.epoch}, step ${row.step} of ${current.totalSteps}, loss ${row.loss.toPrecision(4)}`);
}

function showEpoch(current, row) {
  if (row.evalLoss !== undefined) chart.add(1, stepsBefore + row.step, row.evalLoss);
  element("epochs-table").hidden = false;
  const cells = [
    row.epoch, row.loss.toFixed(4), row.evalLoss?.toFixed(4) ?? "—",
    row.accuracy === undefined ? "—" : percent(row.accuracy), Math.round(row.samplesPerSecond).toLocaleString("en"),
  ];
  const line = element("epochs-table").tBodies[0].insertRow();
  cells.forEach((text) => (line.insertCell().textContent = text));
}

async function evaluate() {
  const figures = await trainer.evaluate(data.held ?? data.train);
  const what = data.held ? "held-out data" : "training data";
  const accuracy = figures.accuracy === undefined ? "" : `, accuracy ${percent(figures.accuracy)}`;
  say(`On the ${what}: loss ${figures.loss.toFixed(4)}${accuracy}`);
}

function say(text) {
  element("status").textContent = text;
}

function enable() {
  const ready = trainer !== null;
  element("train").disabled = !ready || !data || running;
  element("evaluate").disabled = !ready || !data || running;
  element("pause").disabled = element("stop").disabled = !running;
  element("pause").textContent = trainer?.paused ? "Resume" : "Pause";
  element("download").disabled = !ready || (running && !trainer.paused);
  element("upload").disabled = running;
  element("provider").disabled = running;
}

element("data-file").addEventListener("change", careful((event) => event.target.files[0] && takeData(event.target.files[0])));
for (const id of ["divisor", "share"]) element(id).addEventListener("change", careful(() => dataFile && takeData(dataFile)));
element("train").addEventListener("click", careful(train));
element("evaluate").addEventListener("click", careful(evaluate));
element("stop").addEventListener("click", () => trainer.stop());
element("pause").addEventListener("click", () => {
  if (trainer.paused) trainer.resume();
  else {
    trainer.pause();
    say("Paused.");
  }
  enable();
});
element("download").addEventListener("click", careful(async () => {
  offerDownload(await trainer.save(), "checkpoint");
}));
element("upload").addEventListener("change", careful(async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  await CheckpointState.load(file); // refused before anything of the present state is given up
  const before = trainer
    ? await trainer.save()
    : "artifacts/checkpoint";
  try {
    await open(file);
  } catch (error) {
    await open(before);
    throw error;
  }
  say(`Loaded ${file.name}.`);
}));
element("provider").addEventListener("change", careful(async (event) => {
  const saved = await trainer.save();
  await open(saved, event.target.value);
}));
const drop = element("drop");
for (const name of ["dragover", "dragleave", "drop"]) {
  drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
  });
}
drop.addEventListener("drop", careful((event) => event.dataTransfer.files[0] && takeData(event.dataTransfer.files[0])));

try {
  const about = await (await fetch("site.json")).json();
  element("title").textContent = document.title = `Train ${about.title}`;
  element("provider-row").hidden = !about.webgpu;
  await open("artifacts/checkpoint");
  stayUsableOffline();
} catch (error) {
  element("facts").replaceChildren();
  complain(error);
}
document.documentElement.dataset.ready = "yes";
