/**
 * Counts bytes that sessions are given and give back: to the GPU and from it by what browsers offer for that (what kernels
 * are called with is left out), or, after `countOnHost`, to WebAssembly and from it.
 */
export const copied = { up: 0, down: 0 };
if (globalThis.GPUQueue) {
  const UNIFORM = 64;
  const { writeBuffer } = GPUQueue.prototype;
  GPUQueue.prototype.writeBuffer = function (buffer, offset, data, start = 0, size = undefined) {
    const unit = data.BYTES_PER_ELEMENT ?? 1;
    if (!(buffer.usage & UNIFORM)) copied.up += size === undefined ? data.byteLength - start * unit : size * unit;
    return size === undefined ? writeBuffer.call(this, buffer, offset, data, start) : writeBuffer.call(this, buffer, offset, data, start, size);
  };
  const { createBuffer } = GPUDevice.prototype;
  GPUDevice.prototype.createBuffer = function (about) {
    if (about.mappedAtCreation) copied.up += about.size;
    return createBuffer.call(this, about);
  };
  const { mapAsync } = GPUBuffer.prototype;
  GPUBuffer.prototype.mapAsync = function (mode, ...range) {
    copied[mode & 1 ? "down" : "up"] += this.size;
    return mapAsync.call(this, mode, ...range);
  };
}

/** Count what sessions of an onnxruntime copy from the page and into it. */
export function countOnHost({ InferenceSession }) {
  const { create } = InferenceSession;
  const size = (tensors) => Object.values(tensors).reduce((sum, { data }) => sum + data.byteLength, 0);
  InferenceSession.create = async (...given) => {
    const session = await create(...given);
    const { run } = session;
    session.run = async (feeds, ...more) => {
      const results = await run.call(session, feeds, ...more);
      copied.up += size(feeds);
      copied.down += size(results);
      return results;
    };
    return session;
  };
}
