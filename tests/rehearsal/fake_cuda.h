/* What the files of the fake CUDA runtime share. */
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { MAX_DEVICES = 16, HOST_MEMORY = -1 };

/* An allocation; `device` is HOST_MEMORY if it is pinned memory of the host. */
struct allocation { char *start; size_t size; int device; struct allocation *next; };

extern __thread int current_device;

/* Whether the GPUs of this process never finish their work: NCCL waits for a rank that hangs. */
extern atomic_bool gpus_hang;

/* Append a line to the log of this process, $FAKE_CUDA_LOG/PID. */
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Create this process's context on a device, as the first CUDA call on it does. */
cudaError_t create_context(int device, const char *function);
/* Return the allocation that contains an address, or NULL. */
const struct allocation *find_allocation(const void *address);
/* Log an error of a function and return it; it becomes the last error of this thread. */
cudaError_t fail(cudaError_t error, const char *function);

/* Parameters that a function ignores have no names, as C23 allows. */
#define CONTEXT do { cudaError_t error_ = create_context(current_device, __func__); if (error_) return error_; } while (0)
#define NEEDS_CONTEXT(name, ...) cudaError_t name(__VA_ARGS__) { CONTEXT; return cudaSuccess; }
#define RETURNS(name, value, ...) cudaError_t name(__VA_ARGS__) { *out = value; return cudaSuccess; }
