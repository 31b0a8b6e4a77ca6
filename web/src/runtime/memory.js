/**
 * Where the tensors of training are: on the host, in arrays that sessions read, or in buffers of a GPU, where what
 * one run wrote is what the next one reads. Both kinds have the same methods; the host's arrays are what checkpoints
 * hold.
 */
import { tinyModel } from "./protobuf.js";

/** @typedef {import("./flat.js").FlatBuffer} FlatBuffer */

// Elements of one run of an update or a reduction: large enough that calls do not matter, small enough that their
// memory does not. A GPU's kernels want more of them than a processor's caches do.
const HOST_BLOCK = 1 << 18;
const GPU_BLOCK = 1 << 22;
// What shaders read as it is; tensors of other types are handed over at each run.
const GPU_TYPES = new Set(["float32", "float16"]);
const USAGE = { mapRead: 1, copySource: 4, copyTarget: 8, storage: 128 };

/** Tensors in the host's arrays: sessions copy them in, and results are copied back. */
export class HostMemory {
  /** @param {any} ort */
  constructor(ort) {
    this._ort = ort;
    /** @type {Map<string, {array: any, tensor: any}>} */
    this._entries = new Map();
    this.onGpu = false;
    this.block = HOST_BLOCK;
  }

  /** @param {string} name @param {any} array @param {string} type @param {readonly number[]} dims */
  add(name, array, type, dims) {
    this._entries.set(name, { array, tensor: new this._ort.Tensor(type, array, dims) });
  }

  /** @param {string} name */
  has(name) {
    return this._entries.has(name);
  }

  /** What a session is to read. @param {string} name */
  async feed(name) {
    return this._entry(name).tensor;
  }

  /** Hold what a run wrote. @param {string} name @param {any} tensor */
  take(name, tensor) {
    this._entry(name).array.set(tensor.data);
    tensor.dispose();
  }

  /** The host's array was changed. @param {string} name */
  touch(name) {
    this._entry(name);
  }

  /** Whether the host's array is older than what training computed. @param {string} name */
  isStale(name) {
    return !this._entry(name);
  }

  /** Bring the host's arrays up to date. */
  async pull() {}

  /** Tensors of a flat buffer from one element to another. @param {FlatBuffer} flat @param {number} start @param {number} stop */
  gather(flat, start, stop) {
    return new this._ort.Tensor("float32", flat.vector.subarray(start, stop), [stop - start]);
  }

  /** Put back what `gather` gave, changed. @param {FlatBuffer} flat @param {number} start @param {any} tensor */
  scatter(flat, start, tensor) {
    flat.vector.set(tensor.data, start);
    tensor.dispose();
  }

  /** Σg² in double precision. @param {FlatBuffer} flat */
  async squaredNorm(flat) {
    return sumOfSquares(flat.vector);
  }

  /** @param {FlatBuffer} flat @param {number} factor */
  async scale(flat, factor) {
    for (let i = 0; i < flat.vector.length; i++) flat.vector[i] *= factor;
  }

  async release() {}

  /** @param {string} name */
  _entry(name) {
    const entry = this._entries.get(name);
    if (!entry) throw new Error(`no tensor '${name}'`);
    return entry;
  }
}

/** Tensors in buffers of a GPU; each is uploaded when it is first needed, and again after `touch`. */
export class GpuMemory {
  /** @param {any} ort an onnxruntime-web with WebGPU @param {(bytes: Uint8Array, resident: string[]) => Promise<any>} openKernel */
  constructor(ort, openKernel) {
    this._ort = ort;
    this._openKernel = openKernel;
    /** @type {Map<string, {array: any, type: string, dims: readonly number[], tensor: any, stale: boolean}>} */
    this._entries = new Map();
    /** @type {Map<string, any>} tensors that parts of others are gathered in, by flat buffer and size */
    this._blocks = new Map();
    /** @type {Map<string, Promise<any>>} */
    this._kernels = new Map();
    this.onGpu = true;
    this.block = GPU_BLOCK;
  }

  /** @param {string} name @param {any} array @param {string} type @param {readonly number[]} dims */
  add(name, array, type, dims) {
    this._entries.set(name, { array, type, dims, tensor: null, stale: false });
  }

  /** @param {string} name */
  has(name) {
    return this._entries.has(name);
  }

  /** @param {string} name */
  async feed(name) {
    const entry = this._entry(name);
    if (!GPU_TYPES.has(entry.type) || !entry.array.length) return new this._ort.Tensor(entry.type, entry.array, entry.dims);
    if (!entry.tensor) {
      const device = await this._device();
      entry.tensor = this._allocate(device, entry.array.byteLength, entry.type, entry.dims);
      const { buffer, byteOffset, byteLength } = entry.array;
      const odd = byteLength % 4; // a write is of whole words
      const bytes = odd ? Uint8Array.from({ length: byteLength + 4 - odd }, (_, i) => new Uint8Array(buffer, byteOffset)[i]) : null;
      device.queue.writeBuffer(entry.tensor.gpuBuffer, 0, bytes ?? buffer, bytes ? 0 : byteOffset, bytes?.length ?? byteLength);
    }
    return entry.tensor;
  }

  /** @param {string} name @param {any} tensor */
  take(name, tensor) {
    const entry = this._entry(name);
    if (tensor.location === "cpu") { // without elements
      entry.array.set(tensor.data);
      tensor.dispose();
      return;
    }
    entry.tensor?.dispose();
    entry.tensor = tensor;
    entry.stale = true;
  }

  /** @param {string} name */
  touch(name) {
    const entry = this._entry(name);
    entry.tensor?.dispose();
    entry.tensor = null;
    entry.stale = false;
  }

  /** @param {string} name */
  isStale(name) {
    return this._entry(name).stale;
  }

  async pull() {
    for (const entry of this._entries.values()) {
      if (!entry.stale) continue;
      entry.array.set(await readTensor(this._ort, entry.tensor));
      entry.stale = false;
    }
  }

  /** @param {FlatBuffer} flat @param {number} start @param {number} stop */
  async gather(flat, start, stop) {
    const device = await this._device();
    const key = `${flat.suffix} ${stop - start}`;
    const whole = this._blocks.get(key) ?? this._allocate(device, 4 * (stop - start), "float32", [stop - start]);
    this._blocks.set(key, whole);
    const tensors = new Map();
    const parts = flat.parts(start, stop);
    for (const { name } of parts) tensors.set(name, await this.feed(name + flat.suffix));
    const encoder = device.createCommandEncoder();
    encoder.clearBuffer(whole.gpuBuffer); // gaps between parameters count as nothing
    for (const { name, from, to, size } of parts) {
      encoder.copyBufferToBuffer(tensors.get(name).gpuBuffer, 4 * from, whole.gpuBuffer, 4 * to, 4 * size);
    }
    device.queue.submit([encoder.finish()]);
    return whole;
  }

  /** @param {FlatBuffer} flat @param {number} start @param {any} tensor */
  async scatter(flat, start, tensor) {
    const device = await this._device();
    const encoder = device.createCommandEncoder();
    for (const { name, from, to, size } of flat.parts(start, start + tensor.dims[0])) {
      const entry = this._entry(name + flat.suffix);
      encoder.copyBufferToBuffer(tensor.gpuBuffer, 4 * to, entry.tensor.gpuBuffer, 4 * from, 4 * size);
      entry.stale = true;
    }
    device.queue.submit([encoder.finish()]);
    tensor.dispose();
  }

  /** Σg²: in float32 on the GPU, on the host where that overflows. @param {FlatBuffer} flat */
  async squaredNorm(flat) {
    const kernel = await this._kernel("ReduceSumSquare", ["x"]);
    let square = 0;
    for (const [start, stop] of flat.blocks(this.block)) {
      const { y } = await kernel.run({ x: await this.gather(flat, start, stop) });
      square += y.data[0];
      y.dispose();
    }
    if (Number.isFinite(square)) return square;
    await this.pull();
    return sumOfSquares(flat.vector);
  }

  /** @param {FlatBuffer} flat @param {number} factor */
  async scale(flat, factor) {
    const kernel = await this._kernel("Mul", ["x", "s"], ["y"]);
    const s = new this._ort.Tensor("float32", Float32Array.of(factor), []);
    for (const name of flat.views.keys()) {
      const { y } = await kernel.run({ x: await this.feed(name + flat.suffix), s });
      this.take(name + flat.suffix, y);
    }
  }

  async release() {
    for (const { tensor } of this._entries.values()) tensor?.dispose();
    for (const tensor of this._blocks.values()) tensor.dispose();
    for (const kernel of this._kernels.values()) await (await kernel).release();
    this._blocks.clear();
    this._kernels.clear();
  }

  /** @param {any} device @param {number} bytes @param {string} type @param {readonly number[]} dims */
  _allocate(device, bytes, type, dims) {
    const usage = USAGE.copySource | USAGE.copyTarget | USAGE.storage;
    // kernels read four numbers at a time
    const gpuBuffer = device.createBuffer({ size: Math.max(16, Math.ceil(bytes / 16) * 16), usage });
    return this._ort.Tensor.fromGpuBuffer(gpuBuffer, { dataType: type, dims, dispose: () => gpuBuffer.destroy() });
  }

  /** A session of one operator. @param {string} operator @param {string[]} inputs @param {string[]} [resident] */
  _kernel(operator, inputs, resident = []) {
    const kernel = this._kernels.get(operator) ?? this._openKernel(tinyModel(operator, inputs), resident);
    this._kernels.set(operator, kernel);
    return kernel;
  }

  async _device() {
    return this._ort.env.webgpu.device;
  }

  /** @param {string} name */
  _entry(name) {
    const entry = this._entries.get(name);
    if (!entry) throw new Error(`no tensor '${name}'`);
    return entry;
  }
}

/** @param {Float32Array} vector */
function sumOfSquares(vector) {
  let square = 0;
  for (let i = 0; i < vector.length; i++) square += vector[i] * vector[i];
  return square;
}

/**
 * A copy of a tensor's numbers, wherever they are. The tensor stays as it is: `getData` would make it one of the host's.
 * @param {any} ort @param {any} tensor
 */
export async function readTensor(ort, tensor) {
  if (tensor.location === "cpu") return tensor.data;
  const device = await ort.env.webgpu.device;
  const { size } = tensor.gpuBuffer;
  const landing = device.createBuffer({ size, usage: USAGE.copyTarget | USAGE.mapRead });
  const encoder = device.createCommandEncoder();
  encoder.copyBufferToBuffer(tensor.gpuBuffer, 0, landing, 0, size);
  device.queue.submit([encoder.finish()]);
  await landing.mapAsync(1);
  const Kind = tensor.type === "float16" ? Uint16Array : Float32Array;
  const copy = new Kind(landing.getMappedRange().slice(0, tensor.size * Kind.BYTES_PER_ELEMENT));
  landing.destroy();
  return copy;
}
