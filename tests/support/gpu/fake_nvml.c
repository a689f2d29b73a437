/* Fake NVML, the library of NVIDIA's driver, to test GPU monitoring without GPUs:

       cc -shared -fPIC -pthread -o libnvidia-ml.so.1 fake_nvml.c      (loaded through LD_LIBRARY_PATH)

   With -DOLD_DRIVER, symbols that older drivers lack are missing. fake_nvml.py is the same in Python.
   fake_nvml_scene.h reads the scene file, which describes the host. */
#include "fake_nvml_scene.h"

#define ENTER(handle, index)                                                                                           \
  struct call call = enter(__func__, handle, index);                                                                   \
  if (call.code) return call.code
#define HOST ENTER(NULL, ANY)
#define DEVICE ENTER(device ? device : "", ANY)
#define GPU_ONLY DEVICE; const struct device *gpu = call.gpu; if (call.mig) return NOT_SUPPORTED

#define GIVE(text, room, ...) return snprintf(text, room, __VA_ARGS__) < (int)(room) ? SUCCESS : INSUFFICIENT_SIZE

static nvmlReturn_t give_handle(void **handle, const struct device *device, nvmlReturn_t otherwise) {
  if (!device) return otherwise;
  *handle = handle_of(device);
  return SUCCESS;
}

/* ---- The host ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; HOST; users++; return SUCCESS; }
nvmlReturn_t nvmlInit_v2(void) { HOST; users++; return SUCCESS; }
nvmlReturn_t nvmlShutdown(void) { HOST; users--; return SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t code) {
  static const char *const texts[] = {
    "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
    "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
    "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM",
    "GPU is lost", "GPU requires reset", "The operating system has blocked the request",
    "Driver/library version mismatch", "In use", "Insufficient Memory", "No data"};
  enter(__func__, NULL, ANY);
  return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned room) { HOST; GIVE(text, room, "%s", call.scene->driver); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned room) {
  HOST;
  GIVE(text, room, "%d.%s", call.scene->cuda / 1000, call.scene->driver);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { HOST; *version = call.scene->cuda; return SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { HOST; *version = call.scene->cuda; return SUCCESS; }

/* ---- Handles ---- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { HOST; *count = (unsigned)call.scene->gpu_count; return SUCCESS; }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  ENTER(NULL, (int)index);
  return give_handle(device, index < call.scene->gpu_count ? &call.scene->gpus[index] : NULL, INVALID_ARGUMENT);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  HOST;
  const struct device *found = with_uuid(call.scene->gpus, call.scene->gpu_count, uuid);
  if (!found) found = with_uuid(call.scene->instances, call.scene->instance_count, uuid);
  return give_handle(device, found, NOT_FOUND);
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  HOST;
  const struct device *gpu = call.scene->gpus, *end = gpu + call.scene->gpu_count;
  for (unsigned a[4], b[4]; gpu < end; gpu++) /* the domain has four or eight digits */
    if (sscanf(gpu->bus, "%x:%x:%x.%x", a, a + 1, a + 2, a + 3) == 4 &&
        sscanf(bus, "%x:%x:%x.%x", b, b + 1, b + 2, b + 3) == 4 && !memcmp(a, b, sizeof a)) break;
  return give_handle(device, gpu < end ? gpu : NULL, NOT_FOUND);
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **mig) {
  GPU_ONLY;
  const struct device *found = call.scene->instances, *end = found + call.scene->instance_count;
  while (found < end && (found->index != gpu->index || index--)) found++;
  return give_handle(mig, found < end ? found : NULL, NOT_FOUND);
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **parent) {
  DEVICE;
  return give_handle(parent, call.mig ? call.gpu : NULL, INVALID_ARGUMENT);
}

/* ---- A GPU's readings ---- */

#define WHERE(condition) if (!(condition)) return NOT_SUPPORTED
#define NUMBER(name, type, reading)                                                                                    \
  nvmlReturn_t name(void *device, type *out) {                                                                         \
    GPU_ONLY; double value = reading; WHERE(value >= 0); *out = (type)value; return SUCCESS; }
#define PAIR(name, reading)                                                                                            \
  nvmlReturn_t name(void *device, unsigned *current, unsigned *pending) {                                              \
    GPU_ONLY; double value = reading; WHERE(value >= 0); *current = *pending = (unsigned)value; return SUCCESS; }
#define CHOICE(name, limit, reading)                                                                                   \
  nvmlReturn_t name(void *device, unsigned which, unsigned *out) {                                                     \
    GPU_ONLY; if (which >= limit) return INVALID_ARGUMENT;                                                             \
    double value = reading; WHERE(value >= 0); *out = (unsigned)value; return SUCCESS; }

NUMBER(nvmlDeviceGetIndex, unsigned, gpu->index)
NUMBER(nvmlDeviceGetMinorNumber, unsigned, gpu->index)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, gpu->power * 1000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, gpu->limit * 1000)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, gpu->limit * 1000)
NUMBER(nvmlDeviceGetFanSpeed, unsigned, gpu->fan)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, gpu->pstate)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, gpu->throttle)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, gpu->pcie_gen)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, gpu->pcie_gen)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, gpu->pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, gpu->pcie_width)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, gpu->replays)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, gpu->mig == 1 ? 7 : 0)
NUMBER(nvmlDeviceGetDisplayActive, unsigned, gpu->display)
PAIR(nvmlDeviceGetEccMode, gpu->ecc)
CHOICE(nvmlDeviceGetTemperature, 1, gpu->temperature)
CHOICE(nvmlDeviceGetClockInfo, 4, which == 2 ? gpu->memory_clock : gpu->sm_clock)
CHOICE(nvmlDeviceGetMaxClockInfo, 4, which == 2 ? gpu->max_memory_clock : gpu->max_sm_clock)
CHOICE(nvmlDeviceGetPcieThroughput, 2, (wait_for(20), which ? gpu->rx : gpu->tx)) /* the real one measures over 20 ms */
#ifndef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, gpu->throttle)
PAIR(nvmlDeviceGetMigMode, gpu->mig)
#endif

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  GPU_ONLY;
  *major = (int)gpu->capability / 10, *minor = (int)gpu->capability % 10;
  return SUCCESS;
}

/* Other monitors call these and fail if the symbol is missing. */
#define UNSUPPORTED(name) nvmlReturn_t name(void *device) { GPU_ONLY; WHERE(!gpu); return SUCCESS; }
UNSUPPORTED(nvmlDeviceGetComputeMode)
UNSUPPORTED(nvmlDeviceGetDecoderUtilization)
UNSUPPORTED(nvmlDeviceGetDisplayMode)
UNSUPPORTED(nvmlDeviceGetDriverModel)
UNSUPPORTED(nvmlDeviceGetEncoderUtilization)
UNSUPPORTED(nvmlDeviceGetPersistenceMode)
/* torch calls these with dlsym when the memory of a GPU is full, so fake_nvml.py cannot replace them. */
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
/* torch 2.9 and 2.11 end a failed allocation with an internal error unless this one succeeds. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) {
  GPU_ONLY;
  (void)infos, *count = 0;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, u64 *count) {
  GPU_ONLY;
  if (type > 1 || counter > 1) return INVALID_ARGUMENT;
  WHERE(gpu->ecc > 0);
  *count = (u64)(type ? gpu->uncorrected : gpu->corrected);
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
  GPU_ONLY;
  WHERE(gpu->nvlinks > 0);
  if (link >= gpu->nvlinks) return INVALID_ARGUMENT;
  *active = 1;
  return SUCCESS;
}

struct field_value { unsigned field, scope; long long timestamp, latency; unsigned type; nvmlReturn_t code; u64 value; };
nvmlReturn_t nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values) {
  GPU_ONLY;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  double seconds = (double)now.tv_sec + (double)now.tv_nsec / 1e9;
  for (struct field_value *it = values; it < values + count; it++) {
    double value = it->field == 82 ? gpu->memory_temperature : -1;
    if ((it->field == 138 || it->field == 139) && gpu->nvlinks > 0) /* a counter in KiB, for one link or for all */
      value = (it->field == 138 ? gpu->nvlink_tx : gpu->nvlink_rx) * seconds / 1.024 /
              (it->scope == nothing ? 1 : gpu->nvlinks);
    it->code = value < 0 ? NOT_SUPPORTED : SUCCESS;
    it->value = value < 0 ? 0 : (u64)value;
  }
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {
  GPU_ONLY;
  WHERE(gpu->mig != 1 && gpu->util >= 0 && gpu->memory_util >= 0);
  rates[0] = (unsigned)gpu->util, rates[1] = (unsigned)gpu->memory_util;
  return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
nvmlReturn_t nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
  GPU_ONLY;
  *pci = (struct pci){.id = 0x233010DE, .subsystem = 0x16C110DE};
  snprintf(pci->text, sizeof pci->text, "%.31s", gpu->bus);
  sscanf(gpu->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
  snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF,
           pci->device & 0xFF);
  return SUCCESS;
}

/* ---- Functions for GPUs and MIG instances ---- */

#define EITHER DEVICE; const struct device *it = call.mig ? call.mig : call.gpu

nvmlReturn_t nvmlDeviceGetUUID(void *device, char *text, unsigned room) { EITHER; GIVE(text, room, "%s", it->uuid); }
nvmlReturn_t nvmlDeviceGetName(void *device, char *text, unsigned room) { EITHER; GIVE(text, room, "%s", it->name); }

static u64 bytes(double mib) { return (u64)mib << 20; }

/* Since driver 510, version 1 counts reserved memory as used and version 2 does not. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(void *device, u64 memory[3]) { /* total, free, used */
  EITHER;
  memory[0] = bytes(it->total), memory[2] = bytes(it->used + it->reserved), memory[1] = memory[0] - memory[2];
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(void *device, u64 memory[3]) { /* required by other monitors */
  EITHER;
  memory[0] = bytes(it->total), memory[2] = bytes(1), memory[1] = memory[0] - memory[2];
  return SUCCESS;
}
#ifndef OLD_DRIVER
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
  EITHER;
  if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
  memory->total = bytes(it->total);
  memory->reserved = bytes(it->reserved);
  memory->used = bytes(it->used);
  memory->free = memory->total - memory->reserved - memory->used;
  return SUCCESS;
}
#endif

#define INSTANCE_ID(name, key)                                                                                         \
  nvmlReturn_t name(void *device, unsigned *id) {                                                                      \
    DEVICE; WHERE(call.mig); *id = (unsigned)call.mig->key; return SUCCESS; }
INSTANCE_ID(nvmlDeviceGetGpuInstanceId, gi)
INSTANCE_ID(nvmlDeviceGetComputeInstanceId, ci)

struct process_info { unsigned pid; u64 used; unsigned gi, ci; };
static nvmlReturn_t give_processes(struct call call, enum kind kind, unsigned *count, struct process_info *infos) {
  if (call.gpu->mig == 1 && !call.mig && !call.gpu->privileged) return NO_PERMISSION;
  unsigned room = *count, found = 0;
  const struct process *process = call.scene->processes, *end = process + call.scene->process_count;
  for (; process < end; process++) {
    if (process->gpu != call.gpu->index || process->kind != kind) continue;
    if (call.mig && (process->gi != (unsigned)call.mig->gi || process->ci != (unsigned)call.mig->ci)) continue;
    if (found++ < room)
      infos[found - 1] = (struct process_info){
        process->pid, process->used < 0 ? -1ull : bytes(process->used), process->gi,
        process->gi == nothing ? nothing : process->ci};
  }
  *count = found;
  return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
struct process_sample { unsigned pid; u64 time; unsigned sm, memory, encoder, decoder; };
nvmlReturn_t nvmlDeviceGetProcessUtilization(void *device, struct process_sample *samples, unsigned *count, u64 since) {
  GPU_ONLY;
  (void)since;
  WHERE(gpu->sampling);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  unsigned room = samples ? *count : 0, found = 0;
  const struct process *process = call.scene->processes, *end = process + call.scene->process_count;
  for (; process < end; process++)
    if (process->gpu == gpu->index && process->sm > 0 && found++ < room)
      samples[found - 1] = (struct process_sample){
        process->pid, (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000, (unsigned)process->sm, 0, 0, 0};
  *count = found;
  return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
#define RUNNING(name, kind)                                                                                            \
  nvmlReturn_t name(void *device, unsigned *count, struct process_info *infos) {                                       \
    DEVICE; return give_processes(call, kind, count, infos); }
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)
#ifndef OLD_DRIVER
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS)
#endif

/* ---- GPM: metrics between two samples (here: the values of the scene at the time of the query) ---- */

#ifndef OLD_DRIVER
struct sample { void *device; unsigned gi; };
struct metric { unsigned id; nvmlReturn_t code; double value; const char *short_name, *long_name, *unit; };
struct metrics { unsigned version, count; struct sample *samples[2]; struct metric metrics[]; };

nvmlReturn_t nvmlGpmQueryDeviceSupport(void *device, unsigned support[2]) { /* its version, then the answer */
  GPU_ONLY;
  if (support[0] != 1) return ARGUMENT_VERSION_MISMATCH;
  support[1] = gpu->gpm != 0;
  return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(struct sample **sample) {
  HOST;
  *sample = calloc(1, sizeof **sample);
  return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleFree(struct sample *sample) { HOST; free(sample); return SUCCESS; }

static const struct device *with_gpu_instance(const struct scene *scene, unsigned index, unsigned gi) {
  const struct device *mig = scene->instances, *end = mig + scene->instance_count;
  while (mig < end && (mig->index != index || (unsigned)mig->gi != gi)) mig++;
  return mig < end ? mig : NULL;
}

nvmlReturn_t nvmlGpmSampleGet(void *device, struct sample *sample) {
  GPU_ONLY;
  WHERE(gpu->gpm);
  *sample = (struct sample){device, nothing};
  return SUCCESS;
}
nvmlReturn_t nvmlGpmMigSampleGet(void *device, unsigned gi, struct sample *sample) {
  GPU_ONLY;
  WHERE(gpu->gpm);
  if (!with_gpu_instance(call.scene, gpu->index, gi)) return INVALID_ARGUMENT;
  *sample = (struct sample){device, gi};
  return SUCCESS;
}
nvmlReturn_t nvmlGpmMetricsGet(struct metrics *asked) {
  const struct sample *one = asked->samples[0], *two = asked->samples[1];
  void *device = one ? one->device : NULL;
  GPU_ONLY;
  if (asked->version != 1) return ARGUMENT_VERSION_MISMATCH;
  if (!two || one->device != two->device || one->gi != two->gi) return INVALID_ARGUMENT;
  WHERE(gpu->gpm);
  const struct device *measured = one->gi == nothing ? gpu : with_gpu_instance(call.scene, gpu->index, one->gi);
  if (!measured) return INVALID_ARGUMENT;
  const double mib = 1000.0 / (1 << 20), nvlink = gpu->nvlinks > 0 ? mib : -1;
  const struct { unsigned id; const char *name, *unit; double value; } known[] = {
    {2, "SM Util", "%", measured->sm}, {5, "Any Tensor Util", "%", measured->tensor},
    {10, "DRAM BW Util", "%", measured->dram},
    {20, "PCIe TX", "MiB/s", gpu->tx * mib}, {21, "PCIe RX", "MiB/s", gpu->rx * mib},
    {60, "NVLink RX", "MiB/s", gpu->nvlink_rx * nvlink}, {61, "NVLink TX", "MiB/s", gpu->nvlink_tx * nvlink}};
  for (struct metric *metric = asked->metrics; metric < asked->metrics + asked->count; metric++) {
    *metric = (struct metric){.id = metric->id, .code = NOT_SUPPORTED};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      if (known[i].id == metric->id && known[i].value >= 0)
        *metric = (struct metric){
          metric->id, SUCCESS, known[i].value, known[i].name, known[i].name, known[i].unit};
  }
  return SUCCESS;
}
#endif
