// Not compiled here.
plugins {
    id("com.android.application")
    kotlin("android")
}

android {
    namespace = "app.onward.training"
    compileSdk = 35
    defaultConfig {
        applicationId = "app.onward.training"
        minSdk = 26 // java.nio.file, which replaces a file at once
        targetSdk = 35
        versionCode = 1
        versionName = "1"
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
    kotlinOptions {
        jvmTarget = "17"
    }
}

dependencies {
    // The newest, because it must not be older than the onnxruntime that wrote the .ort files. Or the archive of a reduced
    // build: implementation(files("libs/onnxruntime-release.aar"))
    implementation("com.microsoft.onnxruntime:onnxruntime-android:1.+")
}
