// Stands in for the module OnnxRuntimeBindings of onnxruntime's Swift package: the part of it that the program uses, with
// the names and types that its headers declare, over the same C API.

import Foundation
import Runtime

public enum ORTLoggingLevel: Int32 { case verbose, info, warning, error, fatal }

public enum ORTTensorElementDataType: Int32 { case undefined, float, int8, uInt8, int32, uInt32, int64, uInt64, string }

// by ONNX's numbers
private let types: [Int32: ORTTensorElementDataType] = [1: .float, 2: .uInt8, 3: .int8, 6: .int32, 7: .int64, 12: .uInt32, 13: .uInt64]

private struct RuntimeError: LocalizedError { let errorDescription: String? }

private func text(_ pointer: UnsafeMutablePointer<CChar>) -> String {
    defer { free(pointer) }
    return String(cString: pointer)
}

private func check(_ message: UnsafeMutablePointer<CChar>?) throws {
    if let message { throw RuntimeError(errorDescription: text(message)) }
}

public final class ORTEnv {
    public init(loggingLevel: ORTLoggingLevel) throws { try check(rt_start()) }
}

public final class ORTSessionOptions {
    public init() throws {}
    public func setIntraOpNumThreads(_ count: Int32) throws {}
}

public final class ORTRunOptions {}

public final class ORTTensorTypeAndShapeInfo {
    public let elementType: ORTTensorElementDataType, shape: [NSNumber]
    init(_ type: ORTTensorElementDataType, _ shape: [NSNumber]) { (self.elementType, self.shape) = (type, shape) }
}

public final class ORTValue {
    let handle: UnsafeMutableRawPointer
    private let memory: NSMutableData? // what the tensor lies over

    init(_ handle: UnsafeMutableRawPointer) { (self.handle, memory) = (handle, nil) }

    public init(tensorData: NSMutableData, elementType: ORTTensorElementDataType, shape: [NSNumber]) throws {
        var made: UnsafeMutableRawPointer?
        let dims = shape.map { $0.int64Value }, type = types.first { $0.value == elementType }!.key
        try check(rt_tensor(tensorData.mutableBytes, tensorData.length, dims, dims.count, type, &made))
        (handle, memory) = (made!, tensorData)
    }

    deinit { rt_release(handle) }

    private func describe() throws -> (data: UnsafeMutableRawPointer, count: Int, type: ORTTensorElementDataType, shape: [Int64]) {
        var data: UnsafeMutableRawPointer?, count = 0, type: Int32 = 0, rank = 0, dims = [Int64](repeating: 0, count: 16)
        try check(rt_value(handle, &data, &count, &type, &rank, &dims))
        return (data!, count, types[type]!, Array(dims.prefix(rank)))
    }

    public func tensorTypeAndShapeInfo() throws -> ORTTensorTypeAndShapeInfo {
        let about = try describe()
        return ORTTensorTypeAndShapeInfo(about.type, about.shape.map { NSNumber(value: $0) })
    }

    public func tensorData() throws -> NSMutableData {
        let about = try describe(), width = [.int64, .uInt64].contains(about.type) ? 8 : [.int8, .uInt8].contains(about.type) ? 1 : 4
        return memory ?? NSMutableData(bytesNoCopy: about.data, length: about.count * width, freeWhenDone: false)
    }
}

public final class ORTSession {
    private let session: UnsafeMutableRawPointer

    public init(env: ORTEnv, modelPath: String, sessionOptions: ORTSessionOptions?) throws {
        var made: UnsafeMutableRawPointer?
        try check(rt_open(modelPath, &made))
        session = made!
    }

    deinit { rt_close(session) }

    public func inputNames() throws -> [String] { (0..<rt_inputs(session)).map { text(rt_name(session, 0, $0)) } }

    public func outputNames() throws -> [String] { (0..<rt_outputs(session)).map { text(rt_name(session, 1, $0)) } }

    public func run(withInputs inputs: [String: ORTValue], outputNames: Set<String>, runOptions: ORTRunOptions?) throws -> [String: ORTValue] {
        let pairs = Array(inputs), wanted = Array(outputNames)
        let names = (pairs.map(\.key) + wanted).map { strdup($0) }
        defer { names.forEach { free($0) } }
        let pointers = names.map { UnsafePointer($0) }
        let values = pairs.map { Optional($0.value.handle) }
        var outputs = [UnsafeMutableRawPointer?](repeating: nil, count: wanted.count)
        try pointers.withUnsafeBufferPointer { all in
            try check(rt_run(session, all.baseAddress, values, values.count, all.baseAddress! + values.count, &outputs, wanted.count))
        }
        return Dictionary(uniqueKeysWithValues: zip(wanted, outputs.map { ORTValue($0!) }))
    }
}
