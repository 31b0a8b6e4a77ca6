// swift run train ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes on
// from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

import Foundation

do {
    let words = CommandLine.arguments, defaults = ["", "", "", "100", "32", "1e-3", "1"]
    let options = words + defaults.dropFirst(words.count)
    let updates = Int(options[3])!, size = Int(options[4])!, rate = Float(options[5])!, parts = Int(options[6])!
    let trainer = try Trainer(folder: URL(fileURLWithPath: options[1]), accumulates: parts > 1)
    let batches = try Batches(of: trainer, in: URL(fileURLWithPath: options[2]), size: size)
    for i in 0..<updates * parts {
        let update = i % parts == parts - 1 ? 1 / Float(parts) : 0
        print("loss", try trainer.train(batches.read(trainer.steps), rate: rate, update: update))
    }
    let batch = try batches.read(0)
    print("evaluation", try trainer.evaluate(batch))
    try trainer.save()
    print("answer", try trainer.answer(batch).map { String($0) }.joined(separator: " "))
} catch {
    FileHandle.standardError.write(Data("error: \(error.localizedDescription)\n".utf8))
    exit(1)
}
