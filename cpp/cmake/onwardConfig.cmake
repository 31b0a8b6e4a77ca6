include(${CMAKE_CURRENT_LIST_DIR}/onnxruntime.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/onwardTargets.cmake)
