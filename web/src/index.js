/** Onward in the browser: takes onnxruntime-web where no other onnxruntime is given. */
import { loadWeb } from "./runtime/browser.js";
import { host } from "./runtime/host.js";

host.load = loadWeb;

export * from "./core.js";
export { WorkerTrainer } from "./worker_trainer.js";
