// Trains with onnxruntime's Swift package (macOS, iOS), over the files that `onward artifacts MODEL --portable` or
// `onward mobile` writes. Lift this file out; main.swift shows how to use it. It goes on from state.bin in the folder.

import CryptoKit
import Foundation
import OnnxRuntimeBindings

struct TrainingError: LocalizedError {
    let errorDescription: String?
    init(_ text: String) { errorDescription = text }
}

/// A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape.
struct Input {
    let name: String, role: String, offset: Int, size: Int, type: ORTTensorElementDataType, dims: [Int]

    init(_ name: String, _ line: Substring) throws {
        let words = line.split(separator: " "), numbers = words.dropFirst().map { Int($0)! }
        let types: [Int: ORTTensorElementDataType] = [1: .float, 2: .uInt8, 3: .int8, 6: .int32, 7: .int64]  // by ONNX's numbers
        guard let type = types[numbers[2]] else { throw TrainingError("'\(name)' has a type that this binding does not have") }
        self.name = name
        self.type = type
        (role, offset, size, dims) = (String(words[0]), numbers[0], numbers[1], Array(numbers[3...]))
    }

    /// A tensor of these bytes: of as many samples as they are, where the first axis is free.
    func tensor(_ content: Data) throws -> ORTValue {
        let shape = dims.map { NSNumber(value: $0 < 0 ? content.count / size : $0) }
        return try ORTValue(tensorData: NSMutableData(data: content), elementType: type, shape: shape)
    }
}

final class Trainer {
    typealias Values = [String: ORTValue]

    let inputs: [Input]  // of the step, in its order: batch, learning rate, state, sums of gradients
    private var values: Values = [:]  // all but the batch
    private let folder: URL, url: URL, env: ORTEnv, step: ORTSession, evaluation: ORTSession
    private let about: [String: String]
    private var file: Data

    /// Opens the artifacts of a folder. With `accumulates`, several batches can make one update.
    init(folder: URL, accumulates: Bool = false) throws {
        self.folder = folder
        env = try ORTEnv(loggingLevel: .warning)
        let name = accumulates ? "accumulate_step" : "train_step"
        step = try Self.open(name, in: folder, env)
        evaluation = try Self.open("eval_step", in: folder, env)
        // the binding does not show a model's metadata
        about = try JSONDecoder().decode([String: String].self, from: Data(contentsOf: folder.appendingPathComponent(name + ".json")))
        guard about["onward.portable"] == "2" else { throw TrainingError("this is not a portable step of version 2") }
        url = folder.appendingPathComponent("state.bin")
        file = try Data(contentsOf: url)
        guard file.count >= 96, Data(SHA256.hash(data: file.dropLast(32))) == file.suffix(32)
        else { throw TrainingError("'\(url.path)' is damaged: its content does not match its checksum") }
        guard file[32..<64].map({ String(format: "%02x", $0) }).joined() == about["onward.state_digest"]
        else { throw TrainingError("'\(url.path)' is the state of another model") }
        inputs = try zip(step.inputNames(), about["onward.inputs"]!.split(separator: "\n")).map { try Input($0, $1) }
        for input in inputs where input.role != "batch" {
            let range = input.offset..<input.offset + input.size
            values[input.name] = try input.tensor(input.offset > 0 ? file.subdata(in: range) : Data(count: input.size))
        }
    }

    /// How many batches this state has seen.
    var steps: Int {
        get throws { Int(try Self.numbers(of: values[inputs.first { $0.role == "steps" }!.name]!, as: Int64.self)[0]) }
    }

    /// Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
    /// 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
    func train(_ batch: Values, rate: Float, update: Float = 1) throws -> Float {
        let input = inputs.first { $0.role == "rate" }!  // has one number, where it does not accumulate
        values[input.name] = try input.tensor([rate, update].withUnsafeBytes { Data($0.prefix(input.size)) })
        let outputs = try run(step, batch), results = Int(about["onward.results"]!)!
        let loss = try checkedLoss(Array(outputs.prefix(results)))
        let next = outputs.dropFirst(results)  // frozen tensors come first and stay
        for (input, value) in zip(inputs.suffix(next.count), next) { values[input.name] = value }
        return loss
    }

    func evaluate(_ batch: Values) throws -> Float { try checkedLoss(run(evaluation, batch)) }

    /// The outputs of the inference model for the first sample. That model reads the weights that were saved; as an .ort file
    /// it takes them.
    func answer(_ batch: Values) throws -> [Float] {
        let first = try run(Self.open("inference_model", in: folder, env), batch)[0]
        let numbers = try Self.numbers(of: first, as: Float.self)
        return Array(numbers.prefix(numbers.count / (try first.tensorTypeAndShapeInfo().shape[0].intValue)))
    }

    /// Writes all of the state or nothing.
    func save() throws {
        for input in inputs where input.offset > 0 {
            file.replaceSubrange(input.offset..<input.offset + input.size, with: Data(referencing: try values[input.name]!.tensorData()))
        }
        file.replaceSubrange(file.count - 32..<file.count, with: Data(SHA256.hash(data: file.dropLast(32))))
        try file.write(to: url, options: .atomic)
    }

    private static func open(_ name: String, in folder: URL, _ env: ORTEnv) throws -> ORTSession {
        let options = try ORTSessionOptions()
        try options.setIntraOpNumThreads(1)  // more pay only for large models
        let onnx = folder.appendingPathComponent(name + ".onnx"), ort = folder.appendingPathComponent(name + ".ort")
        let path = FileManager.default.fileExists(atPath: ort.path) ? ort.path : onnx.path
        return try ORTSession(env: env, modelPath: path, sessionOptions: options)
    }

    /// Runs a model on what it takes of the batch and the state; its outputs in their order.
    private func run(_ session: ORTSession, _ batch: Values) throws -> [ORTValue] {
        let names = try session.outputNames(), taken = Set(try session.inputNames())
        let all = values.merging(batch) { $1 }.filter { taken.contains($0.key) }
        let outputs = try session.run(withInputs: all, outputNames: Set(names), runOptions: nil)
        return names.map { outputs[$0]! }
    }

    /// The loss; or an error that says what is wrong with the batch, and nothing has changed.
    private func checkedLoss(_ results: [ORTValue]) throws -> Float {
        let problem = try Self.numbers(of: results.last!, as: Int64.self)  // a line of `onward.problems`, and a number
        if problem[0] != 0 {
            throw TrainingError(about["onward.problems"]!.split(separator: "\n")[Int(problem[0]) - 1] + String(problem[1]))
        }
        return try Self.numbers(of: results[0], as: Float.self)[0]
    }

    private static func numbers<T>(of value: ORTValue, as type: T.Type) throws -> [T] {
        Data(referencing: try value.tensorData()).withUnsafeBytes { Array($0.bindMemory(to: type)) }
    }
}
