// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "train",
    platforms: [.macOS(.v13), .iOS(.v16)],
    dependencies: [
        .package(url: "https://github.com/microsoft/onnxruntime-swift-package-manager", from: "1.20.0"),
    ],
    targets: [
        .executableTarget(
            name: "train",
            dependencies: [.product(name: "onnxruntime", package: "onnxruntime-swift-package-manager")]),
    ])
