/* Trains with onnxruntime's C API, over the files that `onward artifacts MODEL --portable` writes. Lift this file and
 * sha256.h; train.c shows how to use them. It goes on from state.bin in the folder. An error ends the program. */

#define _POSIX_C_SOURCE 200809L /* fsync */
#include <inttypes.h>
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "sha256.h"

#define fail(...) (fputs("error: ", stderr), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))
#define join(path, folder, name, end) snprintf(path, sizeof path, "%s/%s%s", folder, name, end)

enum { MOST_DIMS = 16, MOST_PATH = 4096 };

typedef struct { /* a line of the table `onward.inputs`, of an input of the step */
  char role[9];  /* batch, rate, state, steps (a part of the state) or gradient (a sum of these) */
  size_t offset, size, rank; /* where it begins in the state file, or 0; its bytes: of one sample, where the first axis is free */
  ONNXTensorElementDataType type;
  int64_t dims[MOST_DIMS];
  OrtValue *value;
} Input;

typedef struct {
  OrtSession *session;
  size_t inputs, outputs;
  char **names; /* of the inputs, then of the outputs */
} Model;

typedef struct {
  const char *folder;
  Model step, evaluation;
  Input *inputs, *rate, *steps; /* of the step, in its order: batch, learning rate, state, sums of gradients */
  size_t results, file_size;
  char *file, *problems;
} Trainer;

static const OrtApi *api;
static OrtEnv *env;
static OrtAllocator *allocator;
static OrtMemoryInfo *memory;

static void check(OrtStatus *status) {
  if (status) fail("%s", api->GetErrorMessage(status));
}

static void *allocate(size_t count, size_t size) {
  void *pointer = calloc(count + 1, size); /* one more: nothing is not NULL */
  if (!pointer) fail("out of memory");
  return pointer;
}

static char *read_file(const char *path, size_t *size) {
  FILE *stream = fopen(path, "rb");
  if (!stream || fseek(stream, 0, SEEK_END)) fail("'%s' cannot be read", path);
  *size = (size_t)ftell(stream);
  char *content = allocate(*size, 1);
  rewind(stream);
  if (fread(content, 1, *size, stream) != *size || fclose(stream)) fail("'%s' cannot be read", path);
  return content;
}

static Model open_model(const char *folder, const char *name) {
  Model model = {0};
  char path[MOST_PATH];
  OrtSessionOptions *options = NULL;
  join(path, folder, name, ".onnx");
  check(api->CreateSessionOptions(&options));
  check(api->SetIntraOpNumThreads(options, 1)); /* more pay only for large models */
  check(api->CreateSession(env, path, options, &model.session));
  api->ReleaseSessionOptions(options);
  check(api->SessionGetInputCount(model.session, &model.inputs));
  check(api->SessionGetOutputCount(model.session, &model.outputs));
  char **name_at = model.names = allocate(model.inputs + model.outputs, sizeof *model.names);
  for (size_t i = 0; i < model.inputs; ++i) check(api->SessionGetInputName(model.session, i, allocator, name_at++));
  for (size_t i = 0; i < model.outputs; ++i) check(api->SessionGetOutputName(model.session, i, allocator, name_at++));
  return model;
}

static void close_model(Model *model) {
  for (size_t i = 0; i < model->inputs + model->outputs; ++i) allocator->Free(allocator, model->names[i]);
  free(model->names);
  api->ReleaseSession(model->session);
}

/* A text of the model's metadata, which the caller frees with the allocator. */
static char *about(const Model *model, const char *key) {
  OrtModelMetadata *metadata = NULL;
  char *value = NULL;
  check(api->SessionGetModelMetadata(model->session, &metadata));
  check(api->ModelMetadataLookupCustomMetadataMap(metadata, allocator, key, &value));
  if (!value) fail("the model has no %s: it is not a portable step of version 2", key);
  api->ReleaseModelMetadata(metadata);
  return value;
}

static void *data_of(OrtValue *value) {
  void *data = NULL;
  check(api->GetTensorMutableData(value, &data));
  return data;
}

/* Feeds an input from memory that outlives the next run: as many samples as there are, where the first axis is free. */
static void feed(Input *input, void *data, size_t size) {
  int64_t dims[MOST_DIMS];
  memcpy(dims, input->dims, sizeof dims);
  if (dims[0] < 0) dims[0] = (int64_t)(size / input->size);
  if (input->value) api->ReleaseValue(input->value);
  check(api->CreateTensorWithDataAsOrtValue(memory, data, size, dims, input->rank, input->type, &input->value));
}

/* Reads the state file: an error, if it is damaged or another model's. */
static void read_state(Trainer *t) {
  char path[MOST_PATH], hex[65];
  uint8_t sum[32];
  join(path, t->folder, "state", ".bin");
  t->file = read_file(path, &t->file_size);
  if (t->file_size >= 96) sha256((uint8_t *)t->file, t->file_size - 32, sum);
  if (t->file_size < 96 || memcmp(sum, t->file + t->file_size - 32, 32))
    fail("'%s' is damaged: its content does not match its checksum", path);
  for (size_t i = 0; i < 32; ++i) snprintf(hex + 2 * i, 3, "%02x", t->file[32 + i] & 255);
  char *digest = about(&t->step, "onward.state_digest");
  if (strcmp(hex, digest)) fail("'%s' is the state of another model", path);
  allocator->Free(allocator, digest);
}

/* Opens the artifacts of a folder. Where it accumulates, several batches can make one update. */
static Trainer trainer_open(const char *folder, int accumulates) {
  Trainer t = {.folder = folder};
  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  check(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "", &env));
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  t.step = open_model(folder, accumulates ? "accumulate_step" : "train_step");
  t.evaluation = open_model(folder, "eval_step");
  char *version = about(&t.step, "onward.portable"), *results = about(&t.step, "onward.results");
  char *table = about(&t.step, "onward.inputs"), *at = table;
  if (strcmp(version, "2")) fail("this is not a portable step of version 2");
  t.results = strtoull(results, NULL, 10);
  t.problems = about(&t.step, "onward.problems");
  read_state(&t);
  t.inputs = allocate(t.step.inputs, sizeof *t.inputs);
  for (Input *input = t.inputs; *at; ++at, ++input) {
    int type, length;
    sscanf(at, "%8s %zu %zu %d%n", input->role, &input->offset, &input->size, &type, &length);
    input->type = (ONNXTensorElementDataType)type;
    for (at += length; *at != '\n' && input->rank < MOST_DIMS;) input->dims[input->rank++] = strtoll(at, &at, 10);
    if (!strcmp(input->role, "batch")) continue;
    if (!strcmp(input->role, "rate")) t.rate = input;
    if (!strcmp(input->role, "steps")) t.steps = input;
    check(api->CreateTensorAsOrtValue(allocator, input->dims, input->rank, input->type, &input->value));
    if (input->offset) memcpy(data_of(input->value), t.file + input->offset, input->size);
    else memset(data_of(input->value), 0, input->size);
  }
  allocator->Free(allocator, version), allocator->Free(allocator, results), allocator->Free(allocator, table);
  return t;
}

static void trainer_close(Trainer *t) {
  for (size_t i = 0; i < t->step.inputs; ++i) api->ReleaseValue(t->inputs[i].value);
  allocator->Free(allocator, t->problems);
  close_model(&t->step), close_model(&t->evaluation);
  free(t->inputs), free(t->file);
  api->ReleaseMemoryInfo(memory);
  api->ReleaseEnv(env);
}

/* How many batches this state has seen. */
static int64_t trainer_steps(const Trainer *t) { return *(int64_t *)data_of(t->steps->value); }

/* Runs a model on what it takes of the batch and the state. */
static OrtValue **run(const Trainer *t, const Model *model) {
  const OrtValue **values = allocate(model->inputs, sizeof *values);
  OrtValue **outputs = allocate(model->outputs, sizeof *outputs);
  for (size_t i = 0; i < model->inputs; ++i) {
    size_t j = model == &t->step ? i : 0;
    while (j < t->step.inputs && strcmp(model->names[i], t->step.names[j])) ++j;
    if (j == t->step.inputs) fail("'%s' is not in the batch", model->names[i]);
    values[i] = t->inputs[j].value;
  }
  const char *const *names = (const char *const *)model->names;
  check(api->Run(model->session, NULL, names, values, model->inputs, names + model->inputs, model->outputs, outputs));
  free(values);
  return outputs;
}

/* The loss, and the results are released; or an error that says what is wrong with the batch, and nothing has changed. */
static float take_loss(const Trainer *t, OrtValue **outputs, size_t results) {
  const int64_t *problem = data_of(outputs[results - 1]); /* a line of `onward.problems`, and a number */
  const char *line = t->problems;
  for (int64_t i = 1; i < problem[0]; ++i) line = strchr(line, '\n') + 1;
  if (problem[0]) fail("%.*s%" PRId64, (int)strcspn(line, "\n"), line, problem[1]);
  const float loss = *(float *)data_of(outputs[0]);
  for (size_t i = 0; i < results; ++i) api->ReleaseValue(outputs[i]);
  return loss;
}

/* Trains on the batch that was fed and returns its loss. A trainer that accumulates multiplies the sum of the gradients by
 * `update`, 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch. */
static float trainer_train(Trainer *t, float rate, float update) {
  const float numbers[] = {rate, update};
  memcpy(data_of(t->rate->value), numbers, t->rate->size); /* of the first alone, where it does not accumulate */
  OrtValue **outputs = run(t, &t->step);
  const float loss = take_loss(t, outputs, t->results);
  Input *changing = t->inputs + t->step.inputs - (t->step.outputs - t->results); /* frozen tensors come first and stay */
  for (size_t i = t->results; i < t->step.outputs; ++i, ++changing) {
    api->ReleaseValue(changing->value);
    changing->value = outputs[i];
  }
  free(outputs);
  return loss;
}

static float trainer_evaluate(const Trainer *t) {
  OrtValue **outputs = run(t, &t->evaluation);
  const float loss = take_loss(t, outputs, t->evaluation.outputs);
  free(outputs);
  return loss;
}

/* The first output of the inference model, which the caller releases. It reads the weights that were saved. */
static OrtValue *trainer_answer(const Trainer *t) {
  Model model = open_model(t->folder, "inference_model");
  OrtValue **outputs = run(t, &model), *first = outputs[0];
  for (size_t i = 1; i < model.outputs; ++i) api->ReleaseValue(outputs[i]);
  free(outputs);
  close_model(&model);
  return first;
}

/* Writes all of the state or nothing: what was there stays until the new content is on the disk. */
static void trainer_save(const Trainer *t) {
  char temporary[MOST_PATH], path[MOST_PATH];
  for (Input *input = t->inputs; input < t->inputs + t->step.inputs; ++input)
    if (input->offset) memcpy(t->file + input->offset, data_of(input->value), input->size);
  sha256((uint8_t *)t->file, t->file_size - 32, (uint8_t *)t->file + t->file_size - 32);
  join(temporary, t->folder, "state", ".tmp"), join(path, t->folder, "state", ".bin");
  FILE *stream = fopen(temporary, "wb");
  if (!stream || fwrite(t->file, 1, t->file_size, stream) != t->file_size || fflush(stream) || fsync(fileno(stream)) ||
      fclose(stream) || rename(temporary, path))
    fail("'%s' cannot be written", path);
}
