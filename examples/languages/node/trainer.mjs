// Trains with onnxruntime-node, over the files that `onward artifacts MODEL --portable` writes. Lift this file out;
// train.mjs shows how to use it. It goes on from state.bin in the folder.

import { createHash } from "node:crypto";
import { closeSync, fsyncSync, openSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import ort from "onnxruntime-node";

// by ONNX's number of the type
const TYPES = {
  1: ["float32", Float32Array], 2: ["uint8", Uint8Array], 3: ["int8", Int8Array], 6: ["int32", Int32Array],
  7: ["int64", BigInt64Array], 9: ["bool", Uint8Array], 10: ["float16", Uint16Array], 11: ["float64", Float64Array],
};

const checksum = (file) => createHash("sha256").update(file.subarray(0, -32)).digest();

/** A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape. */
class Input {
  constructor(name, line) {
    const [role, ...numbers] = line.split(" ");
    const [offset, size, type, ...dims] = numbers.map(Number);
    Object.assign(this, { name, role, offset, size, type, dims });
  }

  /** A tensor of these bytes: of as many samples as they are, where the first axis is free. */
  tensor(content) {
    const [type, Numbers] = TYPES[this.type];
    const copy = new Uint8Array(content); // begins where its numbers may
    const dims = this.dims[0] < 0 ? [content.length / this.size, ...this.dims.slice(1)] : this.dims;
    return new ort.Tensor(type, new Numbers(copy.buffer), dims);
  }
}

export class Trainer {
  /** Opens the artifacts of a folder. With `accumulates`, several batches can make one update. */
  static async open(folder, accumulates = false) {
    const name = accumulates ? "accumulate_step" : "train_step";
    const about = JSON.parse(readFileSync(join(folder, `${name}.json`), "utf8")); // the binding does not show metadata
    if (about["onward.portable"] !== "2") throw new Error("this is not a portable step of version 2");
    const path = join(folder, "state.bin");
    const file = readFileSync(path);
    if (file.length < 96 || !checksum(file).equals(file.subarray(-32)))
      throw new Error(`'${path}' is damaged: its content does not match its checksum`);
    if (file.toString("hex", 32, 64) !== about["onward.state_digest"])
      throw new Error(`'${path}' is the state of another model`);
    const trainer = Object.assign(new Trainer(), { folder, path, about, file });
    trainer.step = await trainer.open(`${name}.onnx`);
    trainer.evaluation = await trainer.open("eval_step.onnx");
    const lines = about["onward.inputs"].split("\n");
    trainer.inputs = trainer.step.inputNames.map((input, index) => new Input(input, lines[index]));
    trainer.values = {}; // all but the batch
    for (const input of trainer.inputs.filter(({ role }) => role !== "batch")) {
      const content = input.offset ? file.subarray(input.offset, input.offset + input.size) : new Uint8Array(input.size);
      trainer.values[input.name] = input.tensor(content);
    }
    return trainer;
  }

  /** How many batches this state has seen. */
  get steps() {
    return Number(this.values[this.inputs.find(({ role }) => role === "steps").name].data[0]);
  }

  /**
   * Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
   * 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
   */
  async train(batch, rate, update = 1) {
    const input = this.inputs.find(({ role }) => role === "rate"); // has one number, where it does not accumulate
    this.values[input.name] = new ort.Tensor("float32", Float32Array.of(rate, update).subarray(0, input.dims[0]), input.dims);
    const outputs = await this.run(this.step, batch);
    const results = Number(this.about["onward.results"]);
    const loss = this.checkedLoss(outputs, results);
    const next = outputs.slice(results); // frozen tensors come first and stay
    this.inputs.slice(-next.length).forEach(({ name }, index) => (this.values[name] = next[index]));
    return loss;
  }

  async evaluate(batch) {
    const outputs = await this.run(this.evaluation, batch);
    return this.checkedLoss(outputs, outputs.length);
  }

  /** The outputs of the inference model, which reads the weights that were saved, for the first sample. */
  async answer(batch) {
    const session = await this.open("inference_model.onnx");
    const [{ data, dims }] = await this.run(session, batch);
    await session.release();
    return data.slice(0, data.length / dims[0]);
  }

  /** Writes all of the state or nothing: what was there stays until the new content is on the disk. */
  save() {
    for (const { name, offset } of this.inputs.filter(({ offset }) => offset)) {
      const { buffer, byteOffset, byteLength } = this.values[name].data;
      this.file.set(new Uint8Array(buffer, byteOffset, byteLength), offset);
    }
    this.file.set(checksum(this.file), this.file.length - 32);
    const temporary = openSync(`${this.path}.tmp`, "w");
    writeFileSync(temporary, this.file);
    fsyncSync(temporary);
    closeSync(temporary);
    renameSync(`${this.path}.tmp`, this.path);
  }

  async close() {
    await this.step.release();
    await this.evaluation.release();
  }

  open(name) {
    return ort.InferenceSession.create(join(this.folder, name), { intraOpNumThreads: 1 }); // more pay only for large models
  }

  /** Runs a model on what it takes of the batch and the state; its outputs in their order. */
  async run(session, batch) {
    const all = { ...this.values, ...batch };
    const outputs = await session.run(Object.fromEntries(session.inputNames.map((name) => [name, all[name]])));
    return session.outputNames.map((name) => outputs[name]);
  }

  /** The loss; or an error that says what is wrong with the batch, and nothing has changed. */
  checkedLoss(outputs, results) {
    const [line, number] = outputs[results - 1].data; // a line of `onward.problems`, and a number
    if (line !== 0n) throw new Error(this.about["onward.problems"].split("\n")[Number(line) - 1] + number);
    return outputs[0].data[0];
  }
}
