// Batches from files: each input of the model has one, NAME.bin, with its samples one after another, little-endian.

import Foundation

struct Batches {
    private let files: [(input: Input, content: Data)], size: Int

    /// `size` is how many samples make a batch.
    init(of trainer: Trainer, in folder: URL, size: Int) throws {
        self.size = size
        files = try trainer.inputs.filter { $0.role == "batch" }.map { ($0, try Data(contentsOf: folder.appendingPathComponent($0.name + ".bin"))) }
    }

    func read(_ number: Int) throws -> Trainer.Values {
        var batch: Trainer.Values = [:]
        for (input, content) in files {
            let bytes = input.dims[0] < 0 ? input.size * size : input.size
            guard content.count % input.size == 0, content.count >= bytes
            else { throw TrainingError("'\(input.name).bin' has \(content.count) bytes, not \(bytes) or more in samples of \(input.size)") }
            let first = number % (content.count / bytes) * bytes
            batch[input.name] = try input.tensor(content.subdata(in: first..<first + bytes))
        }
        return batch
    }
}
