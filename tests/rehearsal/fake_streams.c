/* Streams and events of the fake CUDA runtime: the work of a stream is done when the call that adds it returns. */
#include "fake_cuda.h"
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

atomic_bool gpus_hang = false;

/* Wait for the GPU, forever if it hangs. */
static cudaError_t synchronize(bool hangs, const char *function) {
  while (hangs) pause();
  return create_context(current_device, function);
}
cudaError_t cudaDeviceSynchronize(void) { return synchronize(gpus_hang, __func__); }

struct CUstream_st { int device; };
struct CUevent_st { int device; bool has_timing, recorded, hangs; struct timespec time; };

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int) {
  CONTEXT;
  *out = malloc(sizeof **out);
  **out = (struct CUstream_st){current_device};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { CONTEXT; return gpus_hang ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronize(gpus_hang, __func__); }
RETURNS(cudaStreamGetPriority, 0, cudaStream_t, int *out)
RETURNS(cudaStreamIsCapturing, cudaStreamCaptureStatusNone, cudaStream_t, enum cudaStreamCaptureStatus *out)
#if CUDART_VERSION < 13000
#define EDGES
#else
#define EDGES const cudaGraphEdgeData **,
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *, const cudaGraphNode_t **, EDGES size_t *count) {
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
  CONTEXT;
  return event ? cudaSuccess : fail(cudaErrorInvalidResourceHandle, __func__);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  CONTEXT;
  *out = malloc(sizeof **out);
  **out = (struct CUevent_st){.device = current_device, .has_timing = !(flags & cudaEventDisableTiming)};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  CONTEXT;
  bool is_default_stream = (size_t)stream <= 2; /* cudaStreamLegacy is 1, cudaStreamPerThread 2 */
  if ((is_default_stream ? current_device : stream->device) != event->device)
    return fail(cudaErrorInvalidResourceHandle, __func__);
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  event->recorded = true;
  event->hangs = gpus_hang;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) { CONTEXT; return event->hangs ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return synchronize(event->hangs, __func__); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->has_timing || !end->has_timing || !start->recorded || !end->recorded)
    return fail(cudaErrorInvalidResourceHandle, __func__);
  double seconds = (double)(end->time.tv_sec - start->time.tv_sec);
  *milliseconds = (float)(seconds * 1e3 + (double)(end->time.tv_nsec - start->time.tv_nsec) / 1e6);
  return cudaSuccess;
}
