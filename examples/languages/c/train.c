/* train ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
 *
 * DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes on
 * from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model. */

#include "trainer.h"

/* Feeds samples of the files, which are read once into `files`. */
static void read_batch(Trainer *t, const char *folder, int64_t batch, size_t count, char **files, size_t *sizes) {
  for (size_t i = 0; !strcmp(t->inputs[i].role, "batch"); ++i) {
    Input *input = &t->inputs[i];
    char path[MOST_PATH];
    join(path, folder, t->step.names[i], ".bin");
    if (!files[i]) files[i] = read_file(path, &sizes[i]);
    const size_t size = input->dims[0] < 0 ? input->size * count : input->size;
    if (sizes[i] % input->size || sizes[i] < size)
      fail("'%s' has %zu bytes, not %zu or more in samples of %zu", path, sizes[i], size, input->size);
    feed(input, files[i] + (size_t)batch % (sizes[i] / size) * size, size);
  }
}

/* Prints the row of the first sample. */
static void print_first(const char *label, OrtValue *value) {
  OrtTensorTypeAndShapeInfo *info = NULL;
  size_t count = 0;
  int64_t samples = 1;
  check(api->GetTensorTypeAndShape(value, &info));
  check(api->GetTensorShapeElementCount(info, &count));
  check(api->GetDimensions(info, &samples, 1));
  printf("%s", label);
  for (size_t i = 0; i < count / (size_t)samples; ++i) printf(" %.9g", ((float *)data_of(value))[i]);
  printf("\n");
  api->ReleaseTensorTypeAndShapeInfo(info);
}

int main(int words, char **word) {
  if (words < 3) fail("usage: %s ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]", word[0]);
  const long updates = words > 3 ? atol(word[3]) : 100, parts = words > 6 ? atol(word[6]) : 1;
  const size_t count = words > 4 ? strtoul(word[4], NULL, 10) : 32;
  const float rate = words > 5 ? strtof(word[5], NULL) : 1e-3f;
  Trainer t = trainer_open(word[1], parts > 1);
  char **files = allocate(t.step.inputs, sizeof *files);
  size_t *sizes = allocate(t.step.inputs, sizeof *sizes);
  for (long i = 0; i < updates * parts; ++i) {
    read_batch(&t, word[2], trainer_steps(&t), count, files, sizes);
    printf("loss %.9g\n", trainer_train(&t, rate, i % parts == parts - 1 ? 1 / (float)parts : 0));
  }
  read_batch(&t, word[2], 0, count, files, sizes);
  printf("evaluation %.9g\n", trainer_evaluate(&t));
  trainer_save(&t);
  OrtValue *answer = trainer_answer(&t);
  print_first("answer", answer);
  api->ReleaseValue(answer);
  for (size_t i = 0; i < t.step.inputs; ++i) free(files[i]);
  free(files), free(sizes);
  trainer_close(&t);
}
