/** The worker of a WorkerTrainer: a Trainer that does what messages ask, and tells of its steps. */
import { CheckpointState, Runtime, Trainer } from "./index.js";
import { host } from "./runtime/host.js";

/** @type {Trainer} */
let trainer;
/** @type {Runtime} */
let runtime;

const events = ["onStart", "onStep", "onEpoch", "onEnd"];

const methods = {
  /** @param {any} files @param {any} options @param {string} base what addresses are relative to */
  async create(files, { runtime: runtimeOptions, ...options }, base) {
    const { read, readBeside } = host;
    host.read = (address) => read(new URL(address, base));
    host.readBeside = (name, address) => readBeside(name, new URL(address, base).href);
    runtime = await Runtime.load(runtimeOptions);
    const callback = Object.fromEntries(events.map((event) => [event, (/** @type {any} */ _, /** @type {any} */ row) => tell({ event, row })]));
    trainer = await Trainer.create(files, { ...options, runtime, callbacks: [callback] });
  },
  /** @param {any} train @param {any} held @param {any} options @param {{learningRate: number, schedule: string}} settings */
  async fit(train, held, options, settings) {
    Object.assign(trainer, settings);
    await trainer.fit(train, held, options);
  },
  /** @param {any} data @param {any} options */
  evaluate: (data, options) => trainer.evaluate(data, options),
  save: () => CheckpointState.save(trainer.state, { includeOptimizerState: true }),
  pause: () => trainer.pause(),
  resume: () => trainer.resume(),
  stop: () => trainer.stop(),
  release: () => trainer.release(),
};

/** @param {any} message */
function tell(message) {
  const progress = trainer && { epoch: trainer.epoch, step: trainer.step, totalSteps: trainer.totalSteps };
  postMessage({ ...message, progress });
}

function facts() {
  if (!trainer) return undefined;
  const { provider, threads, fallback, notes } = runtime;
  return { model: trainer.module.describe(), sealed: trainer.state.sealed, runtime: { provider, threads, fallback, notes } };
}

onmessage = async ({ data: { id, method, given } }) => {
  try {
    const value = await /** @type {any} */ (methods)[method](...given);
    tell({ id, value, facts: facts() });
  } catch (error) {
    const { name, message, ...fields } = /** @type {any} */ (error);
    tell({ id, error: { name, message, ...fields, cause: undefined }, facts: facts() });
  }
};
