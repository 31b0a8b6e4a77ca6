/** The demo: draw, teach, watch. The model is an Onward module; a lesson is a few dozen ordinary training steps. */
import { CheckpointState, Module, Optimizer, randomNumbers } from "onward-web";
import { LossChart } from "./chart.js";
import { readArrays } from "./data.js";
import { Pad } from "./pad.js";
import { careful, complain, element, offerDownload, percent, stayUsableOffline } from "./page.js";
import { toImage } from "./strokes.js";

const LESSON = 60; // steps
const RATE = 2e-3;
const BATCH = 64; // at most 16 of them the visitor's, the rest other people's, so that those are not forgotten

const chart = new LossChart(element("chart"), {
  what: "Loss", names: ["while learning", "on other people's digits"],
});
const pad = new Pad(element("pad"), { onChange: look, onDigit: (digit) => teach(digit) });

let state = null;
let module = null;
let optimizer = null;
let replay = null;
let test = null;
let othersBefore = null;
let steps = 0;
/** @type {{strokes: [number, number][][], image: Float32Array, label: number, atFirst: number, now: number}[]} */
let taught = [];
let random = randomNumbers(1);
let queue = Promise.resolve(); // one thing at a time runs on the model
let looking = false;

/** Do something with the model after what is being done. */
function inTurn(work) {
  const next = queue.then(work);
  queue = next.catch(() => {});
  return next;
}

async function open(checkpoint) {
  const loaded = await CheckpointState.load(checkpoint);
  const fresh = await Module.create("artifacts/training_model.onnx", loaded, "artifacts/eval_model.onnx", {
    outputs: ["scores"], seed: 1,
  });
  const update = await Optimizer.create("artifacts/optimizer_model.onnx", fresh);
  await module?.release();
  [state, module, optimizer] = [loaded, fresh, update];
}

/** The scores of some images, as probabilities, and their loss. */
async function read(images, labels) {
  module.eval();
  const count = labels.length;
  const { loss, outputs } = await module.run({ data: images, dims: [count, 1, 8, 8] }, labels);
  module.train();
  const rows = [];
  for (let row = 0; row < count; row++) {
    const scores = Array.from(outputs.scores.data.subarray(row * 10, row * 10 + 10));
    const top = Math.max(...scores);
    const raised = scores.map((score) => Math.exp(score - top));
    const sum = raised.reduce((a, b) => a + b);
    rows.push(raised.map((value) => value / sum));
  }
  return { loss, rows };
}

function best(shares) {
  return shares.indexOf(Math.max(...shares));
}

/** Show what the model reads in the drawing, as soon as it has time. */
function look() {
  const image = toImage(pad.strokes);
  paint(element("seen"), image);
  element("guess").setAttribute("aria-busy", "true");
  if (!module || looking) return;
  looking = true;
  inTurn(async () => {
    looking = false; // what is drawn from now on is looked at again
    const shares = pad.strokes.length ? (await read(toImage(pad.strokes), BigInt64Array.of(0n))).rows[0] : null;
    showReading(shares);
    element("guess").setAttribute("aria-busy", String(looking));
  }).catch(complain);
}

function showReading(shares) {
  element("guess").textContent = shares ? String(best(shares)) : "–";
  [...element("bars").children].forEach((bar, digit) => {
    const share = shares?.[digit] ?? 0;
    bar.querySelector(".fill").style.width = `${100 * share}%`;
    bar.querySelector(".share").textContent = shares ? `${Math.round(100 * share)} %` : "";
  });
}

async function teach(label) {
  complain("");
  if (!module) return;
  if (!pad.strokes.length) return say("Draw something first, then say what it is.");
  const strokes = pad.strokes;
  const image = toImage(strokes);
  pad.clear();
  try {
    await inTurn(async () => {
      const { rows } = await read(image, BigInt64Array.of(0n));
      const guess = best(rows[0]);
      taught.push({ strokes, image, label, atFirst: guess, now: guess });
      say(guess === label ? `It read ${label} as well. Learning…` : `It read ${guess}, you say ${label}. Learning…`);
      await learn(LESSON);
      say(
        guess === label
          ? `It knew that ${label}, and knows your hand a little better now.`
          : `It took that for a ${guess}. Now it reads ${taught.at(-1)?.now}. Draw another one.`,
      );
    });
  } catch (error) {
    complain(error);
  }
}

async function learn(count) {
  enable(false);
  try {
    for (let i = 0; i < count; i++) {
      const { images, labels } = lesson();
      // rises first, since a young optimizer's first steps are its largest, and ends gently
      optimizer.setLearningRate(RATE * Math.sin((Math.PI * (i + 1)) / (count + 1)) ** 2);
      const { loss } = await module.run({ data: images, dims: [labels.length, 1, 8, 8] }, labels);
      await optimizer.step();
      module.lazyResetGrad();
      steps += 1;
      chart.add(0, steps, loss);
      if (i % 3 === 2) await new Promise((resolve) => requestAnimationFrame(resolve));
    }
    await judge();
  } finally {
    module.lazyResetGrad();
    enable(true);
  }
}

/** A batch: the visitor's digits in slightly changed hands, the newest one most often, and other people's. */
function lesson() {
  const images = new Float32Array(BATCH * 64);
  const labels = new BigInt64Array(BATCH);
  const any = (count) => Math.floor(random() * count);
  const between = (low, high) => low + random() * (high - low);
  const mine = Math.min(16, 6 + 2 * taught.length);
  for (let i = 0; i < BATCH; i++) {
    if (i < mine) {
      const sample = i % 3 === 0 ? taught[taught.length - 1] : taught[any(taught.length)];
      const change = {
        turn: between(-0.15, 0.15), slant: between(-0.15, 0.15), pen: between(2.2, 3.4), stretch: between(0.85, 1.15),
      };
      images.set(toImage(sample.strokes, change), i * 64);
      labels[i] = BigInt(sample.label);
    } else {
      const other = any(replay.labels.length);
      images.set(replay.images.subarray(other * 64, other * 64 + 64), i * 64);
      labels[i] = replay.labels[other];
    }
  }
  return { images, labels };
}

/** Count what it gets right now. */
async function judge() {
  const { loss, rows } = await read(test.images, test.labels);
  const right = rows.filter((shares, row) => BigInt(best(shares)) === test.labels[row]).length;
  const others = right / rows.length;
  othersBefore ??= others;
  chart.add(1, steps, loss);
  if (taught.length) {
    const images = new Float32Array(taught.length * 64);
    taught.forEach((sample, row) => images.set(sample.image, row * 64));
    const mine = await read(images, BigInt64Array.from(taught, ({ label }) => BigInt(label)));
    mine.rows.forEach((shares, row) => (taught[row].now = best(shares)));
  }
  const count = (right_) => (taught.length ? `${taught.filter(right_).length} of ${taught.length}` : "–");
  element("first").textContent = count((sample) => sample.atFirst === sample.label);
  element("mine").textContent = count((sample) => sample.now === sample.label);
  element("others").textContent = percent(others);
  element("others-before").textContent = `of ${rows.length} it never trained on; ${percent(othersBefore)} at first`;
  showGallery();
}

function showGallery() {
  element("gallery-empty").hidden = taught.length > 0;
  element("gallery").replaceChildren(...taught.map((sample) => {
    const [item, button, picture, caption] = ["li", "button", "canvas", "span"].map((tag) => document.createElement(tag));
    const right = sample.now === sample.label;
    Object.assign(picture, { width: 8, height: 8 });
    paint(picture, sample.image);
    caption.textContent = right ? `${sample.label} ✓` : `${sample.label}, read ${sample.now}`;
    button.className = right ? "" : "wrong";
    button.title = "Remove";
    button.setAttribute("aria-label", `Your ${sample.label}, read as ${sample.now}. Remove it`);
    button.addEventListener("click", careful(() => inTurn(async () => {
      taught = taught.filter((each) => each !== sample);
      await judge();
      enable(true);
    })));
    button.append(picture, caption);
    item.append(button);
    return item;
  }));
}

function paint(canvas, image) {
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(8, 8);
  image.forEach((value, index) => pixels.data.set([28, 27, 25, Math.round(255 * value)], 4 * index));
  context.putImageData(pixels, 0, 0);
}

function say(text) {
  element("status").textContent = text;
}

function enable(on) {
  for (const button of element("digits").children) button.disabled = !on;
  element("forget").disabled = element("download").disabled = !on;
  element("practise").disabled = !on || !taught.length;
}

for (let digit = 0; digit < 10; digit++) {
  const bar = document.createElement("li");
  bar.innerHTML = `<span>${digit}</span><span class="track"><span class="fill"></span></span><span class="share"></span>`;
  element("bars").append(bar);
  const button = document.createElement("button");
  button.textContent = String(digit);
  button.setAttribute("aria-label", `This is a ${digit}`);
  button.disabled = true;
  button.addEventListener("click", () => teach(digit));
  element("digits").append(button);
}
element("clear").addEventListener("click", () => pad.clear());
element("practise").addEventListener("click", careful(() => inTurn(async () => {
  say("Practising…");
  await learn(100);
  say("Practised 100 steps more.");
  look();
})));
element("forget").addEventListener("click", careful(() => inTurn(async () => {
  await open("artifacts/checkpoint");
  [taught, steps, random] = [[], 0, randomNumbers(1)];
  chart.clear();
  await judge();
  enable(true);
  say("It has forgotten everything you taught it.");
})));
element("download").addEventListener("click", careful(() => inTurn(async () => {
  offerDownload(await CheckpointState.save(state, { includeOptimizerState: true }), "my-hand.checkpoint");
})));
element("upload").addEventListener("change", careful((event) => inTurn(async () => {
  const [file] = event.target.files;
  if (!file) return;
  event.target.value = "";
  await open(file);
  await judge();
  enable(true);
  say(`Loaded ${file.name}.`);
})));

try {
  const response = await fetch("digits.npz");
  if (!response.ok) throw new Error(`digits.npz cannot be fetched: ${response.status} ${response.statusText}`);
  const arrays = await readArrays(new File([await response.blob()], "digits.npz"));
  const images = ({ data }) => Float32Array.from(data, (value) => value / 16);
  replay = { images: images(arrays.replay_images), labels: arrays.replay_labels.data };
  test = { images: images(arrays.test_images), labels: arrays.test_labels.data };
  await open("artifacts/checkpoint");
  await inTurn(judge);
  enable(true);
  look();
  say("Ready. Draw on the pad.");
  stayUsableOffline();
} catch (error) {
  say("");
  complain(error);
}
document.documentElement.dataset.ready = "yes";
