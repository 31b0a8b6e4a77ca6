/* Trains with onnxruntime's C API, over the files that `onward artifacts MODEL --portable` writes. Lift this file and
 * sha256.h; train.c shows how to use them. It goes on where trained.bin in the folder stopped. An error ends the program. */

#define _POSIX_C_SOURCE 200809L /* fsync, strdup */
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
  char role;     /* the first letter of batch, rate, update, state or gradient (a sum of these) */
  size_t offset, size, rank; /* where it begins in a state file; its bytes: of one sample, where the first axis is free */
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
  Input *inputs; /* of the step, in its order: batch, learning rate, state, sums of gradients */
  size_t results, weights_size, file_size;
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

/* All of the file or none: what was there stays until the new content is on the disk. */
static void write_file(const Trainer *t, const char *name, size_t size) {
  char temporary[MOST_PATH], path[MOST_PATH];
  join(temporary, t->folder, name, ".tmp"), join(path, t->folder, name, "");
  FILE *stream = fopen(temporary, "wb");
  if (!stream || fwrite(t->file, 1, size, stream) != size || fflush(stream) || fsync(fileno(stream)) || fclose(stream) ||
      rename(temporary, path))
    fail("'%s' cannot be written", path);
}

static Model open_model(const Trainer *t, const char *name) {
  Model model = {0};
  char path[MOST_PATH];
  OrtSessionOptions *options = NULL;
  join(path, t->folder, name, ".onnx");
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

/* A text of the step's metadata, which the caller frees. */
static char *about(const Trainer *t, const char *key) {
  OrtModelMetadata *metadata = NULL;
  char *value = NULL;
  check(api->SessionGetModelMetadata(t->step.session, &metadata));
  check(api->ModelMetadataLookupCustomMetadataMap(metadata, allocator, key, &value));
  char *text = strdup(value ? value : "");
  if (value) allocator->Free(allocator, value);
  api->ReleaseModelMetadata(metadata);
  return text;
}

static size_t number(const Trainer *t, const char *key) {
  char *text = about(t, key);
  const size_t value = strtoull(text, NULL, 10);
  free(text);
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

/* Opens the artifacts of a folder. Where it accumulates, several batches can make one update. */
static Trainer trainer_open(const char *folder, int accumulates) {
  Trainer t = {.folder = folder};
  char path[MOST_PATH], hex[65] = "";
  uint8_t sum[32];
  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  check(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "", &env));
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  t.step = open_model(&t, accumulates ? "accumulate_step" : "train_step");
  t.evaluation = open_model(&t, "eval_step");
  if (number(&t, "onward.portable") != 2) fail("this is not a portable step of version 2");
  join(path, folder, "trained", ".bin");
  if (access(path, F_OK)) join(path, folder, "state", ".bin");
  t.file = read_file(path, &t.file_size);
  if (t.file_size >= 96) sha256((uint8_t *)t.file, t.file_size - 32, sum);
  if (t.file_size < 96 || memcmp(sum, t.file + t.file_size - 32, 32))
    fail("'%s' is damaged: its content does not match its checksum", path);
  for (size_t i = 0; i < 32; ++i) snprintf(hex + 2 * i, 3, "%02x", t.file[32 + i] & 255);
  char *digest = about(&t, "onward.state_digest"), *table = about(&t, "onward.inputs"), *at = table;
  if (strcmp(hex, digest)) fail("'%s' is the state of another model", path);
  t.results = number(&t, "onward.results"), t.weights_size = number(&t, "onward.weights_size");
  t.problems = about(&t, "onward.problems");
  t.inputs = allocate(t.step.inputs, sizeof *t.inputs);
  for (Input *input = t.inputs; *at; ++at, ++input) {
    input->role = *at, at = strchr(at, ' ');
    input->offset = strtoull(at, &at, 10), input->size = strtoull(at, &at, 10);
    input->type = (ONNXTensorElementDataType)strtol(at, &at, 10);
    while (*at != '\n' && input->rank < MOST_DIMS) input->dims[input->rank++] = strtoll(at, &at, 10);
    if (input->role == 'b') continue;
    check(api->CreateTensorAsOrtValue(allocator, input->dims, input->rank, input->type, &input->value));
    if (input->role == 's') memcpy(data_of(input->value), t.file + input->offset, input->size);
    else memset(data_of(input->value), 0, input->size);
  }
  free(digest), free(table);
  return t;
}

static void trainer_close(Trainer *t) {
  for (size_t i = 0; i < t->step.inputs; ++i) api->ReleaseValue(t->inputs[i].value);
  close_model(&t->step), close_model(&t->evaluation);
  free(t->inputs), free(t->file), free(t->problems);
  api->ReleaseMemoryInfo(memory);
  api->ReleaseEnv(env);
}

/* How many batches this state has seen: the tensor before the last one of the state. */
static int64_t trainer_steps(const Trainer *t) {
  size_t last = t->step.inputs - 1;
  while (t->inputs[last].role != 's') --last;
  return *(int64_t *)data_of(t->inputs[last - 1].value);
}

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

static void release(OrtValue **values, size_t count) {
  for (size_t i = 0; i < count; ++i) api->ReleaseValue(values[i]);
}

/* The loss; or an error that says what is wrong with the batch, and nothing has changed. */
static float checked_loss(const Trainer *t, OrtValue **outputs, size_t results) {
  const int64_t *problem = data_of(outputs[results - 1]); /* a line of `onward.problems`, and a number */
  const char *line = t->problems;
  for (int64_t i = 1; i < problem[0]; ++i) line = strchr(line, '\n') + 1;
  if (problem[0]) fail("%.*s%" PRId64, (int)strcspn(line, "\n"), line, problem[1]);
  return *(float *)data_of(outputs[0]);
}

/* Trains on the batch that was fed and returns its loss. A trainer that accumulates multiplies the sum of the gradients by
 * `update`, 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch. */
static float trainer_train(Trainer *t, float rate, float update) {
  for (size_t i = 0; i < t->step.inputs; ++i) {
    if (t->inputs[i].role == 'r') *(float *)data_of(t->inputs[i].value) = rate;
    if (t->inputs[i].role == 'u') *(float *)data_of(t->inputs[i].value) = update;
  }
  OrtValue **outputs = run(t, &t->step);
  const float loss = checked_loss(t, outputs, t->results);
  Input *changing = t->inputs + t->step.inputs - (t->step.outputs - t->results); /* frozen tensors come first and stay */
  release(outputs, t->results);
  for (size_t i = t->results; i < t->step.outputs; ++i, ++changing) {
    api->ReleaseValue(changing->value);
    changing->value = outputs[i];
  }
  free(outputs);
  return loss;
}

static float trainer_evaluate(const Trainer *t) {
  OrtValue **outputs = run(t, &t->evaluation);
  const float loss = checked_loss(t, outputs, t->evaluation.outputs);
  release(outputs, t->evaluation.outputs);
  free(outputs);
  return loss;
}

/* The first output of the inference model, which the caller releases. */
static OrtValue *trainer_answer(const Trainer *t) {
  Model model = open_model(t, "inference_model");
  OrtValue **outputs = run(t, &model), *first = outputs[0];
  release(outputs + 1, model.outputs - 1);
  free(outputs);
  close_model(&model);
  return first;
}

/* Writes the state, and the weights of the inference model: the first bytes of the state. */
static void trainer_save(const Trainer *t) {
  for (Input *input = t->inputs; input < t->inputs + t->step.inputs; ++input)
    if (input->role == 's') memcpy(t->file + input->offset, data_of(input->value), input->size);
  sha256((uint8_t *)t->file, t->file_size - 32, (uint8_t *)t->file + t->file_size - 32);
  write_file(t, "trained.bin", t->file_size);
  write_file(t, "inference_model.bin", t->weights_size);
}
