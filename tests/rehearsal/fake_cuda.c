/* Fake libcudart and libcuda, to run torch's CUDA build without a GPU. With fake_nccl.c it is one library, preloaded
   under an unchanged torch: device memory is host memory, and each stream runs its work at once. No kernel runs:
   cpu_kernels.py computes each operator on the CPU, on the same memory. The launch of a real kernel is an error.

   It keeps these rules of CUDA: a process that was forked after CUDA was initialized gets error 3. Each thread has its
   own current device. Memory is limited. An event is recorded on a stream of its own device, and only an event with
   timing can be timed.

   Environment: FAKE_CUDA_DEVICES (number of GPUs, 2), FAKE_CUDA_MEMORY (bytes of each GPU, separated by commas; the last
   number also applies to the following GPUs; 2 GiB), FAKE_CUDA_CAPABILITY (major compute capability, 8),
   FAKE_CUDA_NAN (fill new device memory with NaN), FAKE_CUDA_LOG (folder; each process logs contexts, NCCL calls and
   errors to its PID). */
#define _GNU_SOURCE
#include "fake_cuda.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
__thread int current_device = 0;
static __thread cudaError_t last_error = cudaSuccess;
static pid_t initialized_by = 0;
static bool has_context[MAX_DEVICES];
static size_t used_bytes[MAX_DEVICES];

void log_line(const char *format, ...) {
  const char *folder = getenv("FAKE_CUDA_LOG");
  if (!folder) return;
  char path[512], text[1024];
  snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
  va_list values;
  va_start(values, format);
  int length = vsnprintf(text, sizeof text - 1, format, values);
  va_end(values);
  if (length > (int)sizeof text - 2) length = sizeof text - 2;
  text[length++] = '\n';
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (file < 0 || write(file, text, length) != length) abort();
  close(file);
}
cudaError_t fail(cudaError_t error, const char *function) {
  log_line("error %d in %s", error, function);
  return last_error = error;
}

/* ---- Devices ---- */

/* UUIDs of tests/support/gpu/fake_gpu_host.py */
static void write_uuid(char uuid[64], int index) {
  snprintf(uuid, 64, "GPU-%1$x%1$x%1$x%1$x0000-1111-2222-3333-444444444444", index);
}
static void parse_uuid(const char *uuid, char bytes[16]) {
  const char *digit = strchr(uuid, '-') + 1;
  for (int byte = 0; byte < 16; byte++, digit += 2) {
    unsigned value = 0;
    while (*digit == '-') digit++;
    sscanf(digit, "%2x", &value);
    bytes[byte] = (char)value;
  }
}
/* Return the number of visible devices, and their UUIDs if the array is not NULL. */
static int visible_devices(char uuids[MAX_DEVICES][64]) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *number = getenv("FAKE_CUDA_DEVICES");
  int count = 0;
  if (!visible) {
    int present = number ? atoi(number) : 2;
    for (; count < present && count < MAX_DEVICES; count++)
      if (uuids) write_uuid(uuids[count], count);
    return count;
  }
  char copy[1024], *rest = NULL;
  snprintf(copy, sizeof copy, "%s", visible);
  for (char *word = strtok_r(copy, ",", &rest); word && count < MAX_DEVICES; word = strtok_r(NULL, ",", &rest)) {
    if (uuids && strchr(word, '-')) snprintf(uuids[count], 64, "%s", word);
    else if (uuids) write_uuid(uuids[count], atoi(word));
    count++;
  }
  return count;
}
/* Return the number of a visible device among all GPUs: the first digit of its UUID. */
static int physical_index(int device) {
  char uuids[MAX_DEVICES][64];
  int index = 0;
  if (device < visible_devices(uuids)) sscanf(strchr(uuids[device], '-') + 1, "%1x", (unsigned *)&index);
  return index;
}
static size_t device_bytes(int device) {
  const char *bytes = getenv("FAKE_CUDA_MEMORY"), *comma;
  for (int index = physical_index(device); bytes && index && (comma = strchr(bytes, ',')); index--) bytes = comma + 1;
  return bytes ? strtoull(bytes, NULL, 10) : (size_t)2 << 30;
}
static int capability_major(void) {
  const char *major = getenv("FAKE_CUDA_CAPABILITY");
  return major ? atoi(major) : 8;
}
/* As the driver does it: the first call initializes CUDA for this process, and not for those that it forks later. */
static cudaError_t initialize(const char *function) {
  if (!initialized_by) {
    initialized_by = getpid();
    log_line("initialized by %s", function);
  }
  if (initialized_by != getpid()) return fail(cudaErrorInitializationError, function);
  return visible_devices(NULL) ? cudaSuccess : fail(cudaErrorNoDevice, function);
}
cudaError_t create_context(int device, const char *function) {
  cudaError_t error = initialize(function);
  if (error) return error;
  if (device < 0 || device >= visible_devices(NULL)) return fail(cudaErrorInvalidDevice, function);
  if (!has_context[device]) log_line("context on device %d by %s", device, function);
  has_context[device] = true;
  return cudaSuccess;
}
#define INITIALIZED do { cudaError_t error_ = initialize(__func__); if (error_) return error_; } while (0)

cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
RETURNS(cudaDriverGetVersion, CUDART_VERSION, int *out)
RETURNS(cudaGetDevice, current_device, int *out)
RETURNS(cudaDeviceCanAccessPeer, 1, int *out, int, int)
NEEDS_CONTEXT(cudaDeviceEnablePeerAccess, int, unsigned)
cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  INITIALIZED;
  *count = visible_devices(NULL);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { /* since CUDA 12, it creates a context */
  cudaError_t error = create_context(device, __func__);
  if (!error) current_device = device;
  return error;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return cudaSuccess; }
static int bus_number(int device) { return (physical_index(device) + 1) * 0x10 & 0xFF; } /* as in the fake NVML */
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", bus_number(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability_major()
           : attribute == cudaDevAttrMultiProcessorCount    ? 108
           : attribute == cudaDevAttrMaxThreadsPerBlock     ? 1024
           : attribute == cudaDevAttrWarpSize               ? 32
                                                            : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) { /* of an A100 */
  char uuids[MAX_DEVICES][64];
  INITIALIZED;
  if (device >= visible_devices(uuids)) return fail(cudaErrorInvalidDevice, __func__);
  *properties = (struct cudaDeviceProp){
    .name = "NVIDIA A100-SXM4-80GB", .totalGlobalMem = device_bytes(device), .major = capability_major(), .minor = 0,
    .multiProcessorCount = 108, .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
    .regsPerMultiprocessor = 65536, .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = 163 << 10,
    .sharedMemPerMultiprocessor = 164 << 10, .maxGridSize = {0x7fffffff, 65535, 65535},
    .maxThreadsDim = {1024, 1024, 64}, .l2CacheSize = 40 << 20, .pciBusID = bus_number(device)};
  parse_uuid(uuids[device], properties->uuid.bytes);
  return cudaSuccess;
}

/* ---- Memory ---- */

static struct allocation *allocations = NULL;

static cudaError_t allocate(void **out, size_t size, int device, const char *function) {
  pthread_mutex_lock(&memory_lock);
  bool fits = device == HOST_MEMORY || used_bytes[device] + size <= device_bytes(device);
  struct allocation *made = fits ? malloc(sizeof *made) : NULL;
  if (made) {
    char *start = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) abort();
    /* NaN in each floating-point type. */
    if (device != HOST_MEMORY && getenv("FAKE_CUDA_NAN")) memset(start, 0xff, size);
    *made = (struct allocation){start, size, device, allocations};
    allocations = made;
    if (device != HOST_MEMORY) used_bytes[device] += size;
    *out = start;
  }
  pthread_mutex_unlock(&memory_lock);
  return made ? cudaSuccess : fail(cudaErrorMemoryAllocation, function);
}
/* Remove an allocation from the list; return it, or NULL. */
static struct allocation *unlink_allocation(const void *start) {
  pthread_mutex_lock(&memory_lock);
  struct allocation **place = &allocations, *found;
  while (*place && (*place)->start != start) place = &(*place)->next;
  if ((found = *place)) {
    *place = found->next;
    if (found->device != HOST_MEMORY) used_bytes[found->device] -= found->size;
  }
  pthread_mutex_unlock(&memory_lock);
  return found;
}
static cudaError_t release(void *start, const char *function) {
  if (!start) return cudaSuccess;
  struct allocation *found = unlink_allocation(start);
  if (!found) return fail(cudaErrorInvalidValue, function);
  munmap(found->start, found->size ? found->size : 1);
  free(found);
  return cudaSuccess;
}
const struct allocation *find_allocation(const void *address) {
  const char *byte = address;
  pthread_mutex_lock(&memory_lock);
  const struct allocation *found = allocations;
  while (found && (byte < found->start || byte >= found->start + found->size)) found = found->next;
  pthread_mutex_unlock(&memory_lock);
  return found;
}
static bool is_device_memory(const void *address) {
  const struct allocation *found = find_allocation(address);
  return found && found->device != HOST_MEMORY;
}
cudaError_t cudaMalloc(void **out, size_t size) { CONTEXT; return allocate(out, size, current_device, __func__); }
cudaError_t cudaFree(void *start) { CONTEXT; return release(start, __func__); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) {
  CONTEXT;
  return allocate(out, size, HOST_MEMORY, __func__);
}
cudaError_t cudaFreeHost(void *start) { CONTEXT; return release(start, __func__); }
cudaError_t cudaHostRegister(void *start, size_t size, unsigned) {
  CONTEXT;
  if (find_allocation(start)) return fail(cudaErrorHostMemoryAlreadyRegistered, __func__);
  struct allocation *made = malloc(sizeof *made);
  pthread_mutex_lock(&memory_lock);
  *made = (struct allocation){start, size, HOST_MEMORY, allocations};
  allocations = made;
  pthread_mutex_unlock(&memory_lock);
  log_line("pinned %zu bytes in place", size);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *start) {
  CONTEXT;
  struct allocation *found = unlink_allocation(start);
  free(found);
  return found ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered, __func__);
}
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  CONTEXT;
  *total = device_bytes(current_device), *unused = *total - used_bytes[current_device];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  const struct allocation *found = find_allocation(address);
  bool pinned = found && found->device == HOST_MEMORY;
  *attributes = (struct cudaPointerAttributes){
    .type = !found ? cudaMemoryTypeUnregistered : pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice,
    .device = found && !pinned ? found->device : 0,
    .devicePointer = found ? (void *)address : NULL,
    .hostPointer = pinned ? (void *)address : NULL};
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t) {
  CONTEXT;
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((to_device && !is_device_memory(to)) || (from_device && !is_device_memory(from)))
    return fail(cudaErrorInvalidValue, __func__);
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t) {
  CONTEXT;
  if (!find_allocation(start)) return fail(cudaErrorInvalidValue, __func__);
  memset(start, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, NULL); }

/* ---- Kernels: a launch is refused, with the name of the kernel ---- */

static struct { const void *function; const char *name; } *kernels = NULL;
static size_t kernel_count = 0, kernel_room = 0;

void __cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
  static void (*real)(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *);
  if (!real) real = dlsym(RTLD_NEXT, "__cudaRegisterFunction");
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 1 << 16;
    kernels = realloc(kernels, sizeof *kernels * kernel_room);
  }
  kernels[kernel_count].function = function, kernels[kernel_count++].name = name;
  real(module, function, device_function, name, limit, thread, block, block_size, grid_size, warp_size);
}
static cudaError_t refuse_kernel(const void *function) {
  const char *name = "of unknown name";
  for (size_t i = 0; i < kernel_count; i++)
    if (kernels[i].function == function) name = kernels[i].name;
  fprintf(stderr, "fake CUDA runtime: launch of the kernel %s, which cpu_kernels.py does not replace\n", name);
  return fail(cudaErrorNotSupported, name);
}
cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse_kernel(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
  return refuse_kernel(function);
}
RETURNS(__cudaGetKernel, (cudaKernel_t)function, cudaKernel_t *out, const void *function)
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse_kernel((const void *)kernel);
}
RETURNS(cudaFuncGetAttributes, (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024},
        struct cudaFuncAttributes *out, const void *)
cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int) { return cudaSuccess; }

/* ---- libcuda: what torch calls apart from kernels. The library has the soname libcuda.so.1. ---- */

enum { CUDA_ERROR_NOT_SUPPORTED = 801, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

int cuInit(unsigned) { return initialize(__func__); }
int cuDeviceGetCount(int *count) { *count = visible_devices(NULL); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid(char bytes[16], int device) {
  char uuids[MAX_DEVICES][64];
  if (device >= visible_devices(uuids)) return cudaErrorInvalidDevice;
  parse_uuid(uuids[device], bytes);
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0, *active = initialized_by == getpid() && has_context[device];
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &has_context[device]; return 0; }
int cuCtxGetCurrent(void **context) { *context = &has_context[current_device]; return 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuGetErrorString(int, const char **text) { *text = "error of the fake CUDA runtime"; return 0; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
  const struct allocation *found = find_allocation((const void *)address);
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_NOT_SUPPORTED;
  *(int *)value = found ? found->device : 0;
  return 0;
}
#define UNSUPPORTED(name) int name(void) { log_line("unsupported: " #name); return CUDA_ERROR_NOT_SUPPORTED; }
UNSUPPORTED(cuFuncGetAttribute) UNSUPPORTED(cuFuncSetAttribute) UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuLaunchCooperativeKernel) UNSUPPORTED(cuLaunchKernel) UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete) UNSUPPORTED(cuLinkCreate_v2) UNSUPPORTED(cuModuleGetFunction) UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadData) UNSUPPORTED(cuModuleLoadDataEx) UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor) UNSUPPORTED(cuTensorMapEncodeTiled)
static UNSUPPORTED(unknown_driver_function)

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *status) {
  *out = dlsym(RTLD_DEFAULT, symbol);
  if (!*out) *out = (void *)unknown_driver_function;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **out, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
  return cudaGetDriverEntryPointByVersion(symbol, out, CUDART_VERSION, flags, status);
}
#endif
