#include "runtime.h"

#include <onnxruntime_c_api.h>
#include <sha256.h>
#include <stdlib.h>
#include <string.h>

static const OrtApi *api;
static OrtEnv *env;
static OrtAllocator *allocator;
static OrtMemoryInfo *memory;

static char *copy(const char *text) {
  char *own = malloc(strlen(text) + 1);
  return own ? strcpy(own, text) : NULL;
}

static char *message(OrtStatus *status) {
  if (!status) return NULL;
  char *text = copy(api->GetErrorMessage(status));
  api->ReleaseStatus(status);
  return text;
}

char *rt_start(void) {
  if (api) return NULL;
  api = OrtGetApiBase()->GetApi(17);
  OrtStatus *status = api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "", &env);
  if (!status) status = api->GetAllocatorWithDefaultOptions(&allocator);
  if (!status) status = api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory);
  return message(status);
}

char *rt_open(const char *path, void **session) {
  OrtSessionOptions *options = NULL;
  OrtStatus *status = api->CreateSessionOptions(&options);
  if (!status) status = api->SetIntraOpNumThreads(options, 1);
  if (!status) status = api->CreateSession(env, path, options, (OrtSession **)session);
  if (options) api->ReleaseSessionOptions(options);
  return message(status);
}

void rt_close(void *session) { api->ReleaseSession(session); }

size_t rt_inputs(void *session) {
  size_t count = 0;
  free(message(api->SessionGetInputCount(session, &count)));
  return count;
}

size_t rt_outputs(void *session) {
  size_t count = 0;
  free(message(api->SessionGetOutputCount(session, &count)));
  return count;
}

char *rt_name(void *session, int output, size_t index) {
  char *name = NULL;
  free(message((output ? api->SessionGetOutputName : api->SessionGetInputName)(session, index, allocator, &name)));
  char *own = copy(name ? name : "");
  if (name) allocator->Free(allocator, name);
  return own;
}

static OrtStatus *describe(const OrtTensorTypeAndShapeInfo *info, int *type, size_t *rank, int64_t *dims) {
  ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  OrtStatus *status = api->GetTensorElementType(info, &element);
  *type = (int)element;
  if (!status) status = api->GetDimensionsCount(info, rank);
  if (!status && *rank > 16) *rank = 16;
  return status ? status : api->GetDimensions(info, dims, *rank);
}

char *rt_info(void *session, int output, size_t index, int *type, size_t *rank, int64_t *dims) {
  OrtTypeInfo *about = NULL;
  const OrtTensorTypeAndShapeInfo *info = NULL;
  OrtStatus *status = (output ? api->SessionGetOutputTypeInfo : api->SessionGetInputTypeInfo)(session, index, &about);
  if (!status) status = api->CastTypeInfoToTensorInfo(about, &info);
  if (!status) status = describe(info, type, rank, dims);
  if (about) api->ReleaseTypeInfo(about);
  return message(status);
}

char *rt_metadata(void *session, const char *key) {
  OrtModelMetadata *about = NULL;
  char *text = NULL, *own = NULL;
  OrtStatus *status = api->SessionGetModelMetadata(session, &about);
  if (!status) status = api->ModelMetadataLookupCustomMetadataMap(about, allocator, key, &text);
  free(message(status));
  if (text) own = copy(text), allocator->Free(allocator, text);
  if (about) api->ReleaseModelMetadata(about);
  return own;
}

char *rt_tensor(void *data, size_t size, const int64_t *dims, size_t rank, int type, void **value) {
  return message(api->CreateTensorWithDataAsOrtValue(memory, data, size, dims, rank, (ONNXTensorElementDataType)type,
                                                     (OrtValue **)value));
}

char *rt_value(void *value, void **data, size_t *count, int *type, size_t *rank, int64_t *dims) {
  OrtTensorTypeAndShapeInfo *info = NULL;
  OrtStatus *status = api->GetTensorTypeAndShape(value, &info);
  if (!status) status = describe(info, type, rank, dims);
  if (!status) status = api->GetTensorShapeElementCount(info, count);
  if (!status) status = api->GetTensorMutableData(value, data);
  if (info) api->ReleaseTensorTypeAndShapeInfo(info);
  return message(status);
}

void rt_release(void *value) { api->ReleaseValue(value); }

char *rt_run(void *session, const char *const *in, void *const *inputs, size_t ins, const char *const *out,
             void **outputs, size_t outs) {
  return message(api->Run(session, NULL, in, (const OrtValue *const *)inputs, ins, out, outs, (OrtValue **)outputs));
}

void rt_sha256(const uint8_t *data, size_t size, uint8_t *digest) { sha256(data, size, digest); }
