// Compiled on Linux over a stand-in for onnxruntime's Swift package, never run on a device. What a press of the button does.
import Foundation

private let size = 32, rate: Float = 1e-3

func train(say: (String) -> Void) throws {
    let trainer = try Trainer(folder: writableModels())
    let batches = try Batches(of: trainer, in: Bundle.module.resourceURL!.appendingPathComponent("data"), size: size)
    say("resumed after \(try trainer.steps) steps")
    for update in 0..<100 {
        let loss = try trainer.train(batches.read(trainer.steps), rate: rate)
        if update % 20 == 0 { say("step \(try trainer.steps): loss \(loss)") }
    }
    let batch = try batches.read(0)
    say("evaluation \(try trainer.evaluate(batch))")
    try trainer.save()
    say("saved; answer \(try trainer.answer(batch))")
}

/// The models and the state where they can change: the bundle cannot.
private func writableModels() throws -> URL {
    let files = FileManager.default
    let folder = try files.url(for: .applicationSupportDirectory, in: .userDomainMask, appropriateFor: nil, create: true)
        .appendingPathComponent("models")
    if !files.fileExists(atPath: folder.path) {
        try files.copyItem(at: Bundle.module.resourceURL!.appendingPathComponent("models"), to: folder)
    }
    return folder
}
