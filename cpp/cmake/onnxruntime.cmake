# The target onnxruntime::onnxruntime: of its own package where that is installed, else of a header and a library.
if(NOT TARGET onnxruntime::onnxruntime)
  find_package(onnxruntime CONFIG QUIET)
endif()
if(NOT TARGET onnxruntime::onnxruntime)
  find_path(ONNXRUNTIME_INCLUDE_DIR onnxruntime_cxx_api.h
    HINTS ENV ONNXRUNTIME_INCLUDE_DIR PATH_SUFFIXES onnxruntime onnxruntime/core/session
    DOC "The folder of onnxruntime_cxx_api.h")
  find_library(ONNXRUNTIME_LIBRARY onnxruntime DOC "libonnxruntime.so, onnxruntime.lib or libonnxruntime.dylib")
  if(NOT ONNXRUNTIME_INCLUDE_DIR OR NOT ONNXRUNTIME_LIBRARY)
    message(FATAL_ERROR "onnxruntime is not found: set ONNXRUNTIME_INCLUDE_DIR to the folder of "
      "onnxruntime_cxx_api.h and ONNXRUNTIME_LIBRARY to the library")
  endif()
  add_library(onnxruntime::onnxruntime UNKNOWN IMPORTED)
  set_target_properties(onnxruntime::onnxruntime PROPERTIES
    IMPORTED_LOCATION "${ONNXRUNTIME_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${ONNXRUNTIME_INCLUDE_DIR}")
endif()
