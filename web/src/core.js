/** Onward in JavaScript: trains what `onward.artifacts.generate_artifacts` writes, on any stock onnxruntime. */
export { CheckpointError, ModelError, NonFiniteError, OnwardError } from "./errors.js";
export { CheckpointState, Parameter, Properties } from "./state.js";
export { Module } from "./module.js";
export { Optimizer } from "./optimizer.js";
export { Runtime } from "./runtime/sessions.js";
export {
  ConstantLRScheduler, CosineLRScheduler, LinearLRScheduler, LRScheduler, OneCycleLRScheduler, PolynomialLRScheduler,
  StepLRScheduler,
} from "./schedulers.js";
export { Batches, randomNumbers } from "./batches.js";
export { Trainer } from "./trainer.js";
