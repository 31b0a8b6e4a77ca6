// What onward-web offers, for TypeScript and for editors.

/** A file: its address (in Node.js also its path), a File or Blob of the user's, or its bytes. */
export type FileSource = string | URL | Blob | ArrayBuffer | Uint8Array;
export type NonfinitePolicy = "raise" | "skip" | "ignore";
export type TypedArray =
  | Float32Array | Float64Array | Int8Array | Int16Array | Int32Array | BigInt64Array
  | Uint8Array | Uint16Array | Uint32Array | BigUint64Array;

/** Numbers with their shape. */
export interface NDArray {
  data: TypedArray;
  dims: readonly number[];
}

/** What a step gives back; `type` is onnxruntime's name of the element type. */
export interface OutputTensor {
  data: TypedArray;
  dims: number[];
  type: string;
}

/** An input of a step: with its shape, or flat where the model fixes all dimensions but one. */
export type Input = NDArray | TypedArray | readonly number[] | readonly bigint[] | readonly boolean[];

export class OnwardError extends Error {}
export class ModelError extends OnwardError {}
export class NonFiniteError extends OnwardError {}
export class CheckpointError extends OnwardError {
  path: string;
  reason: string;
  field: string;
  offset: number | undefined;
}

export class Parameter {
  readonly name: string;
  readonly dims: number[];
  readonly requiresGrad: boolean;
  /** A copy of the numbers; assign to change them. After steps on WebGPU, `await state.sync()` comes first. */
  get data(): TypedArray;
  set data(values: TypedArray);
  /** A copy of the accumulated gradient, null where frozen. */
  readonly grad: Float32Array | null;
}

export class Properties {
  readonly size: number;
  get(name: string): number | bigint | string | undefined;
  set(name: string, value: number | bigint | string): this;
  has(name: string): boolean;
  delete(name: string): boolean;
  [Symbol.iterator](): IterableIterator<[string, number | bigint | string]>;
}

export class CheckpointState {
  private constructor();
  readonly parameters: Map<string, Parameter>;
  readonly properties: Properties;
  /** Whether the file had a checksum. */
  readonly sealed: boolean;
  readonly isNominal: boolean;
  /** Copy here what a GPU holds: after steps on WebGPU, before parameters and gradients are read. */
  sync(): Promise<void>;
  /** Read a checkpoint, verified before anything of it is used. */
  static load(source: FileSource): Promise<CheckpointState>;
  /** The bytes of a checkpoint file, which Python and this package load. */
  static save(state: CheckpointState, options?: { includeOptimizerState?: boolean }): Promise<Uint8Array>;
}

export interface RuntimeOptions {
  provider?: "wasm" | "webgpu";
  threads?: number;
  wasmPaths?: string | Record<string, string>;
  /** Whether the first run of each model on WebGPU is compared with WebAssembly's; true by default. */
  check?: boolean;
}

export class Runtime {
  private constructor();
  /** The onnxruntime itself. */
  readonly ort: any;
  /** wasm or webgpu on onnxruntime-web, cpu on others, or what `use` was given. */
  readonly provider: string;
  /** Why WebGPU is not used though it was asked for. */
  readonly fallback: string | undefined;
  readonly threads: number | undefined;
  /** What runs on WebAssembly although the rest of its model runs on WebGPU, and why. */
  readonly notes: string[];
  /** The onnxruntime of this place: onnxruntime-web in a browser, onnxruntime-node in Node.js. */
  static load(options?: RuntimeOptions): Promise<Runtime>;
  /** An onnxruntime that the program has loaded: a module with InferenceSession and Tensor. */
  static use(ort: object, options?: { provider?: string; sessionOptions?: Record<string, unknown> }): Runtime;
}

export interface ModuleOptions {
  onNonfinite?: NonfinitePolicy;
  seed?: number | bigint;
  runtime?: Runtime;
  /** Values of the evaluation model that it should also return, by name. */
  outputs?: string[];
  /** Files with weights that a model refers to, by name; else read from beside a model given by its address. */
  externalData?: Record<string, FileSource>;
}

export interface ModuleDescription {
  inputs: { name: string; dims: (number | string)[] | undefined; type: string }[];
  outputs: string[];
  labels: { name: string; classes: number }[];
  parameters: number;
  trainable: number;
}

export class Module {
  private constructor();
  readonly runtime: Runtime;
  readonly training: boolean;
  onNonfinite: NonfinitePolicy;
  static create(
    trainModel: FileSource, state: CheckpointState, evalModel?: FileSource | null, options?: ModuleOptions,
  ): Promise<Module>;
  train(mode?: boolean): this;
  eval(): this;
  /** Let the next training step replace the gradients instead of adding to them. */
  lazyResetGrad(): void;
  /** A training step after `train()`, an evaluation after `eval()`. */
  run(...inputs: Input[]): Promise<{ loss: number; outputs: Record<string, OutputTensor> }>;
  inputNames(): string[];
  outputNames(): string[];
  getParametersSize(trainableOnly?: boolean): number;
  describe(): ModuleDescription;
  /** Free the sessions; the state stays usable. */
  release(): Promise<void>;
}

export class Optimizer {
  private constructor();
  /** What gradients are multiplied by: 1 / (number of accumulated steps) averages them. */
  gradientScale: number;
  readonly gradientNorm: number | null;
  static create(optimizerModel: FileSource, module: Module): Promise<Optimizer>;
  /** False where a gradient was not finite and the update was skipped. */
  step(): Promise<boolean>;
  setLearningRate(rate: number): void;
  getLearningRate(): number;
  release(): Promise<void>;
}

export abstract class LRScheduler {
  constructor(optimizer: Optimizer, initialLr: number, options?: { warmupStepCount?: number });
  abstract factor(step: number): number;
  step(): void;
  rate(step: number): number;
  /** Set the optimizer's rate; a subclass does it at the end of its constructor. */
  apply(): void;
}
export class LinearLRScheduler extends LRScheduler {
  constructor(optimizer: Optimizer, warmupStepCount: number, totalStepCount: number, initialLr: number);
  factor(step: number): number;
}
export class ConstantLRScheduler extends LRScheduler {
  constructor(optimizer: Optimizer, initialLr: number, options?: { warmupStepCount?: number });
  factor(step?: number): number;
}
export class StepLRScheduler extends LRScheduler {
  constructor(
    optimizer: Optimizer, initialLr: number, options: { stepSize: number; gamma?: number; warmupStepCount?: number },
  );
  factor(step: number): number;
}
export class CosineLRScheduler extends LRScheduler {
  constructor(
    optimizer: Optimizer, initialLr: number,
    options: { totalStepCount: number; warmupStepCount?: number; finalFactor?: number },
  );
  factor(step: number): number;
}
export class PolynomialLRScheduler extends LRScheduler {
  constructor(
    optimizer: Optimizer, initialLr: number,
    options: { totalStepCount: number; power?: number; warmupStepCount?: number; finalFactor?: number },
  );
  factor(step: number): number;
}
export class OneCycleLRScheduler extends LRScheduler {
  constructor(
    optimizer: Optimizer, maxLr: number,
    options: { totalStepCount: number; pctStart?: number; divFactor?: number; finalDivFactor?: number },
  );
  factor(step: number): number;
}

/** Arrays in the order of the model's inputs, or by name; their first dimension counts samples. */
export type Dataset = NDArray[] | Record<string, NDArray>;

export class Batches {
  constructor(data: Dataset, names: string[], options?: { batchSize?: number; shuffle?: boolean; seed?: number });
  readonly samples: number;
  readonly count: number;
  epoch(number?: number): Generator<NDArray[]>;
}

/** Uniform numbers in [0, 1) that depend on the seeds alone. */
export function randomNumbers(...seeds: number[]): () => number;

export interface StepRow {
  step: number;
  epoch: number;
  loss: number;
  learningRate: number;
  gradientNorm: number | null;
}
export interface EpochRow {
  epoch: number;
  step: number;
  loss: number;
  learningRate: number;
  seconds: number;
  samplesPerSecond: number;
  evalLoss?: number;
  accuracy?: number;
}

/** Called while training; true from `onStep` or `onEpoch` stops it. */
export interface Callback {
  onStart?(trainer: Trainer): void;
  onStep?(trainer: Trainer, row: StepRow): boolean | void;
  onEpoch?(trainer: Trainer, row: EpochRow): boolean | void;
  onEnd?(trainer: Trainer): void;
}

export interface TrainerOptions {
  learningRate?: number;
  schedule?: "constant" | "linear" | "cosine" | "step" | "one-cycle" | "polynomial";
  warmup?: number;
  gradientAccumulationSteps?: number;
  /** The old name of `gradientAccumulationSteps`. */
  accumulation?: number;
  clipNorm?: number | null;
  metrics?: "accuracy"[] | "auto";
  callbacks?: Callback[];
  seed?: number;
  onNonfinite?: NonfinitePolicy;
  runtime?: Runtime;
}

export interface ArtifactFiles {
  training: FileSource;
  eval: FileSource;
  optimizer: FileSource;
  checkpoint: FileSource;
  externalData?: Record<string, FileSource>;
}

export class Trainer {
  constructor(module: Module, optimizer: Optimizer, options?: TrainerOptions);
  readonly module: Module;
  readonly optimizer: Optimizer;
  readonly state: CheckpointState;
  readonly history: { steps: StepRow[]; epochs: EpochRow[] };
  readonly callbacks: Callback[];
  readonly epoch: number;
  readonly step: number;
  readonly totalSteps: number;
  readonly paused: boolean;
  learningRate: number;
  schedule: NonNullable<TrainerOptions["schedule"]>;
  /** A trainer for what `generate_artifacts` wrote: the address of the directory, or the four files. */
  static create(artifacts: string | URL | ArtifactFiles, options?: TrainerOptions): Promise<Trainer>;
  fit(
    trainData: Dataset, evalData?: Dataset | null, options?: { epochs?: number; batchSize?: number; shuffle?: boolean },
  ): Promise<{ steps: StepRow[]; epochs: EpochRow[] }>;
  evaluate(data: Dataset | Batches, options?: { batchSize?: number }): Promise<{ loss: number; accuracy?: number }>;
  pause(): void;
  resume(): void;
  stop(): void;
  shuffled(count: number): number[];
  release(): Promise<void>;
}

/** What a trainer in a worker runs on. */
export interface WorkerRuntime {
  provider: string;
  threads: number | undefined;
  fallback: string | undefined;
  notes: string[];
}

/** Called of what a worker does, shortly after it; true from `onStep` or `onEpoch` stops it soon. */
export interface WorkerCallback {
  onStart?(trainer: WorkerTrainer): void;
  onStep?(trainer: WorkerTrainer, row: StepRow): boolean | void;
  onEpoch?(trainer: WorkerTrainer, row: EpochRow): boolean | void;
  onEnd?(trainer: WorkerTrainer): void;
}

/** A `Trainer` in a Web Worker, in browsers: the page stays responsive whatever a step takes. */
export class WorkerTrainer {
  private constructor();
  readonly history: { steps: StepRow[]; epochs: EpochRow[] };
  readonly callbacks: WorkerCallback[];
  readonly epoch: number;
  readonly step: number;
  readonly totalSteps: number;
  readonly paused: boolean;
  readonly runtime: WorkerRuntime;
  /** Whether the checkpoint had a checksum. */
  readonly sealed: boolean;
  learningRate: number;
  schedule: NonNullable<TrainerOptions["schedule"]>;
  static create(
    artifacts: string | URL | ArtifactFiles,
    options?: Omit<TrainerOptions, "runtime" | "callbacks"> & { runtime?: RuntimeOptions; callbacks?: WorkerCallback[] },
  ): Promise<WorkerTrainer>;
  describe(): ModuleDescription;
  fit(
    trainData: Dataset, evalData?: Dataset | null, options?: { epochs?: number; batchSize?: number; shuffle?: boolean },
  ): Promise<{ steps: StepRow[]; epochs: EpochRow[] }>;
  evaluate(data: Dataset, options?: { batchSize?: number }): Promise<{ loss: number; accuracy?: number }>;
  /** The bytes of a checkpoint with the state of training. */
  save(): Promise<Uint8Array>;
  pause(): void;
  resume(): void;
  stop(): void;
  shuffled(count: number): number[];
  /** End the worker. */
  release(): Promise<void>;
}
