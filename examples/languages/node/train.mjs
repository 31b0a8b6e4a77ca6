// node train.mjs ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes
// on from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Trainer } from "./trainer.mjs";

const files = {};

function readBatch(trainer, folder, number, count) {
  const batch = {};
  for (const input of trainer.inputs.filter(({ role }) => role === "batch")) {
    const name = `${input.name}.bin`, size = input.dims[0] < 0 ? input.size * count : input.size;
    const content = (files[name] ??= readFileSync(join(folder, name)));
    if (content.length % input.size || content.length < size)
      throw new Error(`'${name}' has ${content.length} bytes, not ${size} or more in samples of ${input.size}`);
    const first = (number % Math.floor(content.length / size)) * size;
    batch[input.name] = input.tensor(content.subarray(first, first + size));
  }
  return batch;
}

const [folder, data, updates = "100", size = "32", rate = "1e-3", parts = "1"] = process.argv.slice(2);
try {
  const trainer = await Trainer.open(folder, parts > 1);
  for (let i = 0; i < updates * parts; i++) {
    const batch = readBatch(trainer, data, trainer.steps, Number(size));
    const update = i % parts === parts - 1 ? 1 / parts : 0;
    console.log("loss", await trainer.train(batch, Number(rate), update));
  }
  const batch = readBatch(trainer, data, 0, Number(size));
  console.log("evaluation", await trainer.evaluate(batch));
  trainer.save();
  console.log("answer", ...(await trainer.answer(batch)));
  await trainer.close();
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
}
