/* What the stand-ins for bindings need of onnxruntime's C API, as plain functions: they take and give handles. A function
   that can fail returns its message, to be freed, or nothing. */
#ifndef RUNTIME_H
#define RUNTIME_H

#include <stddef.h>
#include <stdint.h>

char *rt_start(void);
char *rt_open(const char *path, void **session);
void rt_close(void *session);
size_t rt_inputs(void *session);
size_t rt_outputs(void *session);
char *rt_name(void *session, int output, size_t index);
/* type of the elements, number of dimensions (at most 16), the dimensions */
char *rt_info(void *session, int output, size_t index, int *type, size_t *rank, int64_t *dims);
char *rt_metadata(void *session, const char *key); /* to be freed, or nothing */
char *rt_tensor(void *data, size_t size, const int64_t *dims, size_t rank, int type, void **value);
char *rt_value(void *value, void **data, size_t *count, int *type, size_t *rank, int64_t *dims);
void rt_release(void *value);
/* outputs that are null are made */
char *rt_run(void *session, const char *const *in, void *const *inputs, size_t ins, const char *const *out,
             void **outputs, size_t outs);
void rt_sha256(const uint8_t *data, size_t size, uint8_t *digest);

#endif
