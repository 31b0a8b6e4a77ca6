plugins {
    application
}

repositories {
    mavenCentral()
}

dependencies {
    implementation("com.microsoft.onnxruntime:onnxruntime:1.20.0")
}

application {
    mainClass.set("Train")
}
