module train

go 1.19

require github.com/yalue/onnxruntime_go v1.13.0
