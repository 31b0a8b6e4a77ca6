// Stands in for Apple's CryptoKit: the one function that the program uses.

import Foundation
import Runtime

public enum SHA256 {
    public static func hash(data: Data) -> [UInt8] {
        var digest = [UInt8](repeating: 0, count: 32)
        data.withUnsafeBytes { rt_sha256($0.baseAddress!.assumingMemoryBound(to: UInt8.self), $0.count, &digest) }
        return digest
    }
}
