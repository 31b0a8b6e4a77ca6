rootProject.name = "train"
