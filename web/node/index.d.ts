// What onward-web offers in Node.js and Electron: all that it offers in browsers, and files.
import type { CheckpointState } from "../src/index.js";

export * from "../src/index.js";

/** Write a checkpoint file; the old one stays until the new one is safely there. */
export function saveCheckpoint(
  state: CheckpointState, file: string | URL, options?: { includeOptimizerState?: boolean },
): Promise<void>;
