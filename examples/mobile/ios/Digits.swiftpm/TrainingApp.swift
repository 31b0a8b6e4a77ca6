// Not compiled here, only parsed: this is the window. One button: each press trains 100 updates more, evaluates, saves, and
// answers for one sample.
import SwiftUI

@main
struct TrainingApp: App {
    var body: some Scene {
        WindowGroup { TrainingView() }
    }
}

struct TrainingView: View {
    @State private var lines: [String] = []
    @State private var busy = false

    var body: some View {
        VStack {
            Button("Train") {
                busy = true
                Task.detached {
                    do { try train { line in Task { @MainActor in lines.append(line) } } }
                    catch { await MainActor.run { lines.append("error: \(error.localizedDescription)") } }
                    await MainActor.run { busy = false }
                }
            }
            .disabled(busy)
            List(lines, id: \.self) { Text($0) }
        }
    }
}
