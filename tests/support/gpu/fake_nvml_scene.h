/* Scene file of fake_nvml.c, and the prologue of every call.

   The scene file, $FAKE_NVML, describes the host; without it, no driver is loaded. Every call checks whether the file
   was replaced, so a test changes the scene of a running program by renaming a new file over it. While the file is
   missing, the last scene applies. `#` starts a comment. Lines, in any number:

       driver VERSION
       cuda NUMBER                                                    13000 is 13.0
       gpu uuid=UUID [KEY=VALUE ...]                                  one per GPU, in index order
       instance GPU uuid=UUID [name= gi= ci= total= used= sm= ...]    a MIG instance of the GPU with that index
       process GPU PID MIB KIND [GPU_INSTANCE_ID [COMPUTE_INSTANCE_ID]]
                                                                      MIB of -1: not available
       busy PID SM                                                    the SM utilization of a process above, else 0
       fault GPU|* FUNCTION|* CODE|hang|slow=MILLISECONDS             the first that matches a call applies

   The keys of a gpu and their defaults are DEFAULTS below, name=Fake_H100_80GB (underscores are read as spaces) and
   bus=00000000:10:00.0 (then 20, 30, ...). Memory is in MiB, power and limit in W, tx, rx, nvlink_tx and nvlink_rx in
   KB/s, clocks in MHz, the rest in percent, degrees or NVML's unit. Negative values are not supported; ecc=0 is off,
   mig=1 is MIG mode, capability=80: compute capability 8.0, nvlinks=0: no NVLink, gpm=0: sm, tensor and dram cannot be
   measured, privileged=0: in MIG mode, only the instances list processes, display=1: a display is active, sampling=1: the
   utilization of processes can be measured.
   nvmlDeviceGetMemoryInfo (v1) counts reserved memory as used. KIND is compute, graphics, or mps for a client of an MPS
   server that is in no list but NVML's of MPS.

   A fault applies to a GPU and its instances, or with `*` to all GPUs and to calls without a GPU; and to an exported
   symbol, or with `*` to all symbols except those in SPARED. CODE is the nvmlReturn_t. A hang lasts until the scene
   has no such fault anymore; after a hang or a slow call, the answer comes from the scene at that time.

   A line that cannot be parsed aborts the program, so that a test with a typo does not pass. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;
enum {
  SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 9,
  GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, HANG = -1, SLOW = -2
};
enum { GPUS = 16, INSTANCES = 32, PROCESSES = 64, FAULTS = 64, HANDLES = 256, TEXT = 96, ANY = -1 };
static const unsigned nothing = -1u;

#define DEFAULTS(X)                                                                                                    \
  X(total, 81559) X(used, 500) X(reserved, 600) X(util, 0) X(memory_util, 0) X(temperature, 40) X(power, 100)          \
  X(limit, 700) X(sm_clock, 1200) X(memory_clock, 2600) X(max_sm_clock, 1980) X(max_memory_clock, 2619) X(fan, -1)     \
  X(pstate, 0) X(throttle, 0) X(ecc, 1) X(corrected, 0) X(uncorrected, 0) X(pcie_gen, 5) X(pcie_width, 16)             \
  X(replays, 0) X(tx, 1000) X(rx, 2000) X(nvlinks, 18) X(nvlink_tx, 3000) X(nvlink_rx, 4000)                           \
  X(memory_temperature, 45) X(mig, 0) X(privileged, 1) X(display, 0) X(capability, 80) X(gpm, 1) X(sm, 0)              \
  X(tensor, 0) X(dram, 0) X(sampling, 0)
#define INSTANCE_DEFAULTS(X) X(gi, 1) X(ci, 0) X(total, 9728) X(used, 20) X(sm, 0) X(tensor, 0) X(dram, 0)

#define MEMBER(key, value) key,
struct device { /* a GPU, or a MIG instance of the GPU `index` */
  char uuid[TEXT], name[TEXT], bus[TEXT];
  unsigned index;
  double DEFAULTS(MEMBER) gi, ci;
};
enum kind { COMPUTE, GRAPHICS, MPS };
struct process { unsigned gpu, pid, gi, ci; double used, sm; enum kind kind; };
struct fault { int gpu; char function[TEXT]; int code, milliseconds; };
struct scene {
  char driver[TEXT];
  int cuda;
  size_t gpu_count, instance_count, process_count, fault_count;
  struct device gpus[GPUS], instances[INSTANCES];
  struct process processes[PROCESSES];
  struct fault faults[FAULTS];
};

#define KEY(key, value) {#key, offsetof(struct device, key), value},
static const struct key { const char *name; size_t offset; double value; }
  GPU_KEYS[] = {DEFAULTS(KEY) {0}}, INSTANCE_KEYS[] = {INSTANCE_DEFAULTS(KEY) {0}};
static const char *const SPARED[] = {
  "nvmlInitWithFlags", "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString", "nvmlDeviceGetCount_v2",
  "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", NULL};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct scene *now; /* replaced, never freed: a concurrent call may still read an older one */
static atomic_int users;
static char handles[HANDLES][TEXT]; /* a handle points to the UUID of its device */

/* ---- Scene file ---- */

static void understand(bool understood, const char *line) {
  if (understood) return;
  fprintf(stderr, "fake_nvml: cannot read this line of $FAKE_NVML: %s\n", line);
  abort();
}

static bool set(struct device *device, const struct key *keys, char *pair) {
  char *value = strchr(pair, '='), *end;
  if (!value) return false;
  *value++ = 0;
  char *text = !strcmp(pair, "uuid") ? device->uuid : !strcmp(pair, "name") ? device->name
             : !strcmp(pair, "bus") ? device->bus : NULL;
  if (text) {
    snprintf(text, TEXT, "%s", value);
    for (char *at = text; text == device->name && *at; at++) if (*at == '_') *at = ' ';
    return true;
  }
  for (; keys->name; keys++) {
    if (strcmp(keys->name, pair)) continue;
    *(double *)((char *)device + keys->offset) = strtod(value, &end); /* parses 0x.. as well */
    return end != value && !*end;
  }
  return false;
}

static bool read_device(struct device *device, const struct key *keys, unsigned index, const char *name, char **rest) {
  device->index = index;
  snprintf(device->name, TEXT, "%s", name);
  snprintf(device->bus, TEXT, "00000000:%02X:00.0", (index + 1) * 0x10 & 0xFF);
  for (const struct key *key = keys; key->name; key++) *(double *)((char *)device + key->offset) = key->value;
  for (char *pair; (pair = strtok_r(NULL, " \t\n", rest));) if (!set(device, keys, pair)) return false;
  return *device->uuid;
}

static bool read_line(struct scene *scene, char *line) {
  char *rest, *first = strtok_r(line, " \t\n", &rest), kind[16], gpu[16], code[16];
  if (!first) return true;
  if (!strcmp(first, "driver")) return sscanf(rest, "%95s", scene->driver) == 1;
  if (!strcmp(first, "cuda")) return sscanf(rest, "%d", &scene->cuda) == 1;
  if (!strcmp(first, "gpu") && scene->gpu_count < GPUS) {
    unsigned index = (unsigned)scene->gpu_count++;
    return read_device(&scene->gpus[index], GPU_KEYS, index, "Fake H100 80GB", &rest);
  }
  if (!strcmp(first, "instance") && scene->instance_count < INSTANCES) {
    const char *number = strtok_r(NULL, " \t\n", &rest);
    unsigned index;
    return number && sscanf(number, "%u", &index) == 1 &&
           read_device(&scene->instances[scene->instance_count++], INSTANCE_KEYS, index, "Fake MIG 1g.10gb", &rest);
  }
  if (!strcmp(first, "process") && scene->process_count < PROCESSES) {
    struct process *process = &scene->processes[scene->process_count++];
    process->gi = nothing;
    if (sscanf(rest, "%u %u %lf %15s %u %u", &process->gpu, &process->pid, &process->used, kind, &process->gi,
               &process->ci) < 4)
      return false;
    process->kind = !strcmp(kind, "graphics") ? GRAPHICS : !strcmp(kind, "mps") ? MPS : COMPUTE;
    return process->kind != COMPUTE || !strcmp(kind, "compute");
  }
  if (!strcmp(first, "busy")) {
    unsigned pid;
    double sm;
    if (sscanf(rest, "%u %lf", &pid, &sm) != 2) return false;
    for (size_t i = 0; i < scene->process_count; i++)
      if (scene->processes[i].pid == pid) scene->processes[i].sm = sm;
    return true;
  }
  if (!strcmp(first, "fault") && scene->fault_count < FAULTS) {
    struct fault *fault = &scene->faults[scene->fault_count++];
    if (sscanf(rest, "%15s %95s %15s", gpu, fault->function, code) != 3) return false;
    if (!strcmp(gpu, "*")) fault->gpu = ANY; else if (sscanf(gpu, "%d", &fault->gpu) != 1) return false;
    if (!strcmp(code, "hang")) fault->code = HANG;
    else if (sscanf(code, "slow=%d", &fault->milliseconds) == 1) fault->code = SLOW;
    else return sscanf(code, "%d", &fault->code) == 1 && fault->code >= 0;
    return true;
  }
  return false;
}

/* Called with the lock held. Returns whether the scene file exists; `now` keeps the last scene. */
static bool load(void) {
  static struct stat seen;
  struct stat found;
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "re") : NULL;
  if (!file) return false;
  fstat(fileno(file), &found);
  if (!now || found.st_ino != seen.st_ino || found.st_size != seen.st_size ||
      found.st_mtim.tv_sec != seen.st_mtim.tv_sec || found.st_mtim.tv_nsec != seen.st_mtim.tv_nsec) {
    struct scene *scene = calloc(1, sizeof *scene);
    char line[1024], copy[1024];
    strcpy(scene->driver, "580.95.05");
    scene->cuda = 13000;
    while (fgets(line, sizeof line, file)) {
      line[strcspn(line, "#\n")] = 0;
      strcpy(copy, line);
      understand(read_line(scene, line), copy);
    }
    now = scene;
    seen = found;
  }
  fclose(file);
  return true;
}

/* ---- Prologue of every call ---- */

struct call { nvmlReturn_t code; const struct scene *scene; const struct device *gpu, *mig; };

static void wait_for(int milliseconds) {
  nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000L}, NULL);
}

static void *handle_of(const struct device *device) {
  int slot = 0;
  pthread_mutex_lock(&lock);
  while (slot < HANDLES && *handles[slot] && strcmp(handles[slot], device->uuid)) slot++;
  understand(slot < HANDLES, "(too many UUIDs in one program)");
  strcpy(handles[slot], device->uuid);
  pthread_mutex_unlock(&lock);
  return handles[slot];
}

static const struct device *with_uuid(const struct device *devices, size_t count, const char *uuid) {
  for (const struct device *device = devices; device < devices + count; device++)
    if (!strcmp(device->uuid, uuid)) return device;
  return NULL;
}

/* Without a handle (NULL), faults of the GPU `index` apply, or of no GPU (ANY). */
static struct call enter(const char *function, const char *handle, int index) {
  bool waited = false, spared = false, first = !strncmp(function, "nvmlInit", 8);
  for (const char *const *name = SPARED; *name; name++) spared |= !strcmp(*name, function);
  for (;;) {
    pthread_mutex_lock(&lock);
    bool readable = load();
    struct call call = {.scene = now};
    pthread_mutex_unlock(&lock);
    if (first ? !readable : !users) return (struct call){.code = first ? DRIVER_NOT_LOADED : UNINITIALIZED};
    if (handle) {
      if (handle < handles[0] || handle >= handles[HANDLES] || !*handle) return (struct call){.code = INVALID_ARGUMENT};
      call.gpu = with_uuid(call.scene->gpus, call.scene->gpu_count, handle);
      call.mig = with_uuid(call.scene->instances, call.scene->instance_count, handle);
      if (call.mig) call.gpu = call.mig->index < call.scene->gpu_count ? &call.scene->gpus[call.mig->index] : NULL;
      if (!call.gpu) return (struct call){.code = GPU_IS_LOST};
      index = (int)call.gpu->index;
    }
    const struct fault *fault = call.scene->faults, *end = fault + call.scene->fault_count;
    for (; fault < end; fault++)
      if ((fault->gpu == ANY || fault->gpu == index) &&
          (strcmp(fault->function, "*") ? !strcmp(fault->function, function) : !spared)) break;
    if (fault == end || waited) return call;
    if (fault->code >= 0) {
      call.code = fault->code;
      return call;
    }
    wait_for(fault->code == HANG ? 20 : fault->milliseconds);
    waited = fault->code == SLOW;
  }
}
