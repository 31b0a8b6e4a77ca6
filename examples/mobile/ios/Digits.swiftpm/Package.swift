// swift-tools-version:5.9
// Not compiled here. Open this folder in Xcode 15 or newer and press run.
import AppleProductTypes
import PackageDescription

let package = Package(
    name: "Training",
    platforms: [.iOS("16.0")],
    products: [
        .iOSApplication(
            name: "Training", targets: ["App"], bundleIdentifier: "app.onward.training", displayVersion: "1", bundleVersion: "1",
            supportedDeviceFamilies: [.pad, .phone], supportedInterfaceOrientations: [.portrait]),
    ],
    dependencies: [
        .package(url: "https://github.com/microsoft/onnxruntime-swift-package-manager", from: "1.20.0"),
    ],
    targets: [
        .executableTarget(
            name: "App",
            dependencies: [.product(name: "onnxruntime", package: "onnxruntime-swift-package-manager")],
            path: ".", exclude: ["Package.swift"], resources: [.copy("models"), .copy("data")]),
    ])
